"""What the tests of the chapter of data call on the ranks of a pool; it runs there, beside OneFlow."""

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.graph import FunctionGraph
from oneflow_cookbook.measure.sbp import label, sbp_of
from oneflow_cookbook.measure.sent import sent_by
from oneflow_cookbook.start import recipe


class Numbers(flow.utils.data.Dataset):
    """Sample i is i."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        return np.array([number], dtype=np.float32)


def orders(seed, set_epoch, samples=24):
    """The order of this rank's samples in two epochs, after a manual_seed that differs by rank."""
    flow.manual_seed(100 + flow.env.get_rank())
    sampler = flow.utils.data.distributed.DistributedSampler(Numbers(samples), seed=seed)
    epochs = []
    for epoch in (0, 1):
        if set_epoch:
            sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return epochs


def kept_by_dropout(path):
    """The part of ones that the recipe's Dropout leaves, in training and in eval mode."""
    ones = flow.ones(100, 100, placement=flow.placement.all("cpu"), sbp=flow.sbp.broadcast)
    dropout = recipe.load(path).Dropout()
    return {
        "training": float((dropout(ones).numpy() != 0).mean()),
        "eval": float((dropout.eval()(ones).numpy() == 1).mean()),
    }


def batch_sizes(samples, batch, drop_last):
    """Rows of each batch of one epoch on this rank."""
    data = Numbers(samples)
    sampler = flow.utils.data.distributed.DistributedSampler(data)
    return [len(rows) for rows in flow.utils.data.DataLoader(data, batch, sampler=sampler, drop_last=drop_last)]


def bytes_of_joining(rows, columns):
    """The bytes that this rank sends when local tensors become an S(0) tensor. Collective."""
    mine = flow.ones(rows, columns)
    return sent_by(lambda: mine.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)))[1]


def all_reduced():
    """What flow.comm.all_reduce returns, and its argument afterwards, which was 1 on rank 0 and 2 on rank 1."""
    total = flow.tensor([1.0 + flow.env.get_rank()])
    return flow.comm.all_reduce(total), total.item()


def mean_of_split(samples):
    """The SBP and the value of the mean over the rows of a tensor that is split by rows."""
    split = flow.tensor(samples, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    mean = split.mean(dim=0, keepdim=True)
    return label(mean.sbp), mean.numpy()


DRAW = {
    "functional dropout": lambda x: flow.nn.functional.dropout(x, 0.5),
    "nn.Dropout": lambda x: flow.nn.Dropout(0.5)(x),
    "rand": lambda x: flow.rand(*x.shape, placement=x.placement, sbp=x.sbp) * x,
    "init": lambda x: flow.nn.init.normal_(flow.empty(*x.shape, placement=x.placement, sbp=x.sbp)),
}


def drawn_by(source, graph, sbp, seeds):
    """This rank's shard of random numbers, when all ranks have the same seed or each its own."""
    x = flow.ones(8 * flow.env.get_world_size(), 6, placement=flow.placement.all("cpu"), sbp=sbp_of(sbp))
    draw = FunctionGraph(DRAW[source]) if graph else DRAW[source]
    flow.manual_seed(5 if seeds == "one" else 5 + flow.env.get_rank())
    return draw(x).to_local().numpy()
