"""What the tests of the recipes by hand call on the ranks of a pool."""

import oneflow as flow

from harness.measure.calls import replaced
from harness.measure.entry import call_entry
from harness.measure.sent import sent_by
from harness.start import recipe


def messages(path, **arguments):
    """Run a recipe; returns each flow.comm.send and recv that it makes here: ("send" or "recv", other rank, shape)."""
    seen, module = [], recipe.load(path)

    def recording(name, function):
        def call(*arguments):
            result = function(*arguments)
            tensor = arguments[0] if name == "send" else result
            seen.append((name, arguments[-1], tuple(tensor.shape)))
            return result

        return call

    with replaced({(flow.comm, name): recording(name, getattr(flow.comm, name)) for name in ("send", "recv")}):
        call_entry(module, arguments)
    return seen


def sent_by_the_ring(path, in_features, out_features):
    """The bytes that this rank sends in the ring of a recipe."""
    tensor = flow.ones(in_features, out_features)
    _, sent = sent_by(lambda: recipe.load(path).ring_all_reduce(tensor))
    return sent


def exchange(first):
    """Two ranks exchange a tensor: both send first, or one receives first."""
    rank = flow.env.get_rank()
    sends_first = first == "send" or rank == 0
    if sends_first:
        flow.comm.send(flow.ones(8, 4), 1 - rank)
    arrived = flow.comm.recv(1 - rank)
    if not sends_first:
        flow.comm.send(flow.ones(8, 4), 1 - rank)
    return arrived.numpy().sum()


def sent_to_the_server(shape):
    """What this rank sends for the gradient of weights that all ranks have fetched from rank 0 at once."""
    ranks = flow.placement.all("cpu")
    w = flow.ones(*shape, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast, requires_grad=True)
    x = flow.ones(2 * len(ranks.ranks), shape[0], placement=ranks, sbp=flow.sbp.split(0))
    out = flow.matmul(x, w.to_global(placement=ranks, sbp=flow.sbp.broadcast))
    _, sent = sent_by(lambda: out.sum().backward())
    return sent


class Chain(flow.nn.Module):
    """Some weights, one behind the other."""

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
    """The elements of each all-reduce in one backward, and the bytes that this rank sends for it."""
    calls, reduce = [], flow._C.local_all_reduce
    replica = flow.nn.parallel.DistributedDataParallel(Chain(weights, 256), **options)
    loss = replica(flow.ones(1, 256))

    def recording(tensor, **named):
        calls.append(tensor.numel())
        return reduce(tensor, **named)

    with replaced({(flow._C, "local_all_reduce"): recording}):
        _, sent = sent_by(loss.backward)
    return calls, sent


def gradients_after(set_to_none):
    """The gradient of one weight in three steps that leave it as it is, cleared before each; 2 and 4 on two ranks."""
    replica = flow.nn.parallel.DistributedDataParallel(Chain(1, 1))
    update, found = flow.optim.SGD(replica.parameters(), lr=0.0), []
    for _ in range(3):
        update.zero_grad(set_to_none=set_to_none)
        replica(flow.ones(1, 1) * 2 * (flow.env.get_rank() + 1)).backward()
        found.append(replica.w0.grad.item())
    return found
