"""What the tests of the recipes by hand call on the ranks of a pool."""

import oneflow as flow

from harness import ledger, recipe
from harness.observe import kept, replaced


def messages(path, **arguments):
    """Run a recipe; returns each flow.comm.send and recv that it makes here: ("send" or "recv", other rank, shape)."""
    seen, module = [], recipe.load(path)
    send, recv = flow.comm.send, flow.comm.recv
    kept.append(module)

    def recording_send(tensor, rank):
        seen.append(("send", rank, tuple(tensor.shape)))
        return send(tensor, rank)

    def recording_recv(rank):
        tensor = recv(rank)
        seen.append(("recv", rank, tuple(tensor.shape)))
        return tensor

    with replaced({(flow.comm, "send"): recording_send, (flow.comm, "recv"): recording_recv}):
        module.run(**arguments)
    return seen


def exchange(first):
    """Two ranks exchange a tensor: both send first, or one receives first."""
    rank = flow.env.get_rank()
    if first == "send" or rank == 0:
        flow.comm.send(flow.ones(8, 4), 1 - rank)
        return flow.comm.recv(1 - rank).numpy().sum()
    arrived = flow.comm.recv(1 - rank)
    flow.comm.send(flow.ones(8, 4), 1 - rank)
    return arrived.numpy().sum()


def sent_to_the_server(shape):
    """What this rank sends for the gradient of weights that all ranks have fetched from rank 0 at once."""
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    w = flow.ones(*shape, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast, requires_grad=True)
    x = flow.ones(2 * len(ranks.ranks), shape[0], placement=ranks, sbp=flow.sbp.split(0))
    out = flow.matmul(x, w.to_global(placement=ranks, sbp=flow.sbp.broadcast))
    _, sent = ledger.sent_by(lambda: out.sum().backward())
    return sent
