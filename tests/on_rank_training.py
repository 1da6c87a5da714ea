"""What the tests of DistributedDataParallel call on the ranks of a pool."""

import oneflow as flow

from oneflow_cookbook.measure.calls import replaced
from oneflow_cookbook.measure.sent import sent_by


class Chain(flow.nn.Module):
    """A chain of matmuls, and a sum."""

    def __init__(self, weights, size):
        super().__init__()
        for i in range(weights):
            setattr(self, f"w{i}", flow.nn.Parameter(flow.ones(size, size)))

    def forward(self, x):
        for w in self.parameters():
            x = flow.matmul(x, w)
        return x.sum()


def wrapped():
    """Whether DistributedDataParallel returns the module that it gets, and the names of its weights."""
    module = Chain(2, 4)
    replica = flow.nn.parallel.DistributedDataParallel(module)
    return replica is module, list(replica.state_dict())


def reduced(weights, **options):
    """The elements of each all-reduce of a backward pass, and the bytes that this rank sends in it."""
    calls, reduce = [], flow._C.local_all_reduce
    replica = flow.nn.parallel.DistributedDataParallel(Chain(weights, 256), **options)
    loss = replica(flow.ones(1, 256))

    def recording(tensor, **named):
        calls.append(tensor.numel())
        return reduce(tensor, **named)

    with replaced({(flow._C, "local_all_reduce"): recording}):
        _, sent = sent_by(loss.backward)
    return calls, sent
