"""What the tests of the pictures call on the ranks of a pool."""

import numpy as np
import oneflow as flow

from harness.measure.calls import replaced
from harness.measure.observe import observe, observed
from harness.measure.order import Order
from harness.measure.recorder import Recorder
from harness.measure.tensors import layout_of
from harness.measure.training import costs


class OrderOfInputs(Order):
    """An Order that also tells when the gradient of x has come, with the fact "input"."""

    def see_matmul(self, call):
        x = call.arguments[0]
        product = super().see_matmul(call)
        if x.is_leaf and x.requires_grad:
            own, part = layout_of(x), self.events[-1].facts["part"]
            x.register_hook(lambda gradient: self.add_ready(gradient, own, input="x", part=part))
        return product


def adam(parameters, lr, momentum=0.0):
    """Adam where a recipe makes SGD, so that all recipes keep the same kinds of state."""
    return flow.optim.Adam(parameters, lr=lr)


def inner_tensor(make=flow.tensor):
    """flow.tensor for a layer that is not the first of its model: x, which a recipe makes first, needs its gradient."""
    made = []

    def tensor(*arguments, **keywords):
        made.append(make(*arguments, **keywords, requires_grad=not made))
        return made[-1]

    return tensor


def order(path, inner=False, **arguments):
    """{"events": see Order} and `costs` of one step of the eager training recipe at `path` with Adam. Collective.

    inner: as a layer that is not the first of its model.
    """
    recorder = OrderOfInputs()
    with replaced({(flow.optim, "SGD"): adam, (flow, "tensor"): inner_tensor() if inner else flow.tensor}):
        tensors, _ = observed(path, recorder, steps=1, **arguments)
    return {"events": recorder.events, **costs(tensors)}


def kept(path, **arguments):
    """`costs` of one step of a training recipe with Adam. Collective."""
    with replaced({(flow.optim, "SGD"): adam}):
        tensors, _ = observed(path, Recorder(keeps_initial=False), steps=1, **arguments)
    return costs(tensors)


def product(x, w):
    """x @ w, x split by columns and w by rows: what this rank has of {"partial", "out"}, as lists. Collective."""
    ranks = flow.placement.all("cpu")
    x = flow.tensor(np.array(x, dtype=np.float32), placement=ranks, sbp=flow.sbp.split(1))
    w = flow.tensor(np.array(w, dtype=np.float32), placement=ranks, sbp=flow.sbp.split(0))
    partial = flow.matmul(x, w)
    out = partial.to_global(sbp=flow.sbp.broadcast)
    sbps = [layout_of(tensor).sbp for tensor in (partial, out)]
    return {"sbps": sbps, "partial": partial.to_local().numpy().tolist(), "out": out.to_local().numpy().tolist()}


def slots(path, capacity, **arguments):
    """{"slots": the tokens of each group in the slots of each expert, "dropped": those in none}. Collective."""
    found = observe(path, names=["dispatch_mask", "chosen"], capacity=capacity, **arguments)["tensors"]
    chosen, mask = found["chosen"]["value"], found["dispatch_mask"]["value"]
    taken = mask.reshape(*chosen.shape, capacity).sum(axis=(1, 3))
    return {"slots": taken.tolist(), "dropped": float(chosen.sum() - taken.sum())}
