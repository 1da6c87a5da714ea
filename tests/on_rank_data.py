"""What the tests of the chapter of data call on the ranks of a pool; it runs there, beside OneFlow."""

import numpy as np
import oneflow as flow

from harness.ledger import sent_by


class Numbers(flow.utils.data.Dataset):
    """Sample i is i."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        return np.array([number], dtype=np.float32)


def everyone():
    return flow.placement("cpu", list(range(flow.env.get_world_size())))


def orders(seed, set_epoch, samples=24):
    """The order of this rank's samples in two epochs, after a manual_seed that differs by rank."""
    flow.manual_seed(100 + flow.env.get_rank())
    sampler = flow.utils.data.distributed.DistributedSampler(Numbers(samples), seed=seed)
    found = []
    for epoch in (0, 1):
        if set_epoch:
            sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def batch_sizes(samples, batch, drop_last):
    """Rows of each batch of one epoch on this rank."""
    data = Numbers(samples)
    sampler = flow.utils.data.distributed.DistributedSampler(data)
    return [len(rows) for rows in flow.utils.data.DataLoader(data, batch, sampler=sampler, drop_last=drop_last)]


def joined(rows_by_rank):
    """The rows of what the ranks' local tensors of so many rows become in S(0), or why they do not."""
    mine = flow.ones(rows_by_rank[flow.env.get_rank()], 2)
    try:
        return mine.to_global(placement=everyone(), sbp=flow.sbp.split(0)).shape[0]
    except RuntimeError as error:
        return str(error).strip()


def bytes_of_joining(rows, columns):
    """What this rank sends when the ranks' local tensors become one in S(0). Collective."""
    mine = flow.ones(rows, columns)
    return sent_by(lambda: mine.to_global(placement=everyone(), sbp=flow.sbp.split(0)))[1]


def all_reduced():
    """What flow.comm.all_reduce returns, and what it makes of a tensor that is 1 on rank 0 and 2 on rank 1."""
    total = flow.tensor([1.0 + flow.env.get_rank()])
    return flow.comm.all_reduce(total), total.item()
