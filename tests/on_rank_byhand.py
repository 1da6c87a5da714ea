"""What the tests of the recipes by hand call on the ranks of a pool."""

import oneflow as flow

from oneflow_cookbook.measure.calls import replaced
from oneflow_cookbook.measure.entry import call_entry
from oneflow_cookbook.measure.sent import sent_by
from oneflow_cookbook.start import recipe


def messages(path, **arguments):
    """Run a recipe; returns its flow.comm.send and recv on this rank, in order: ("send" or "recv", rank, shape)."""
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


def sent_to_the_server(shape):
    """The bytes that this rank sends for the gradient of weights that all ranks have fetched from rank 0 at once."""
    ranks = flow.placement.all("cpu")
    w = flow.ones(*shape, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast, requires_grad=True)
    x = flow.ones(2 * len(ranks.ranks), shape[0], placement=ranks, sbp=flow.sbp.split(0))
    out = flow.matmul(x, w.to_global(placement=ranks, sbp=flow.sbp.broadcast))
    _, sent = sent_by(lambda: out.sum().backward())
    return sent
