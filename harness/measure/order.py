"""What a training step does, in order and with the bytes that each part of it makes this rank send."""

import oneflow as flow

from harness.measure.calls import PLACES, replaced
from harness.measure.observe import observed
from harness.measure.recorder import Recorder
from harness.measure.script import measure_script
from harness.measure.sent import growth, quiet
from harness.measure.tensors import layout_of
from harness.measure.training import costs


class Order:
    """The events of a step in order, also of those inside backward(), where a gradient tells that it has come.

    Each has "what": "forward", "backward" (the gradient of a product has come, the matmuls of its backward follow),
    "move" (to_global, each with a "number"), "ready" (a gradient that must still go from a layout, "old", to another,
    "new") or "update". Those of a matmul have "weight", the number of the layer, and "part", of the micro-batch; a
    gradient that goes back through a move has its number. "sent": the bytes that left this rank since the event before.
    """

    def __init__(self):
        self.events, self.weights, self.parts, self.moves = [], [], {}, 0

    def note(self, what, tensor, **more):
        sent = growth(self.before, quiet())
        self.events.append(
            {"what": what, "ranks": layout_of(tensor).ranks, "shape": tuple(tensor.shape), "sent": sent, **more}
        )
        self.before = quiet()

    def begin(self):
        if not self.events:  # what was sent to make tensors is not of the step
            self.before = quiet()

    def matmul(self, function):
        def call(x, w, *rest, **named):
            self.begin()
            product = function(x, w, *rest, **named)
            look = (layout_of(w), tuple(w.shape))
            self.weights += [look] if look not in self.weights else []
            layer = self.weights.index(look)
            part = self.parts[layer] = self.parts.get(layer, -1) + 1
            self.note("forward", product, weight=layer, part=part)
            if product.requires_grad:
                product.register_hook(lambda gradient: self.note("backward", gradient, weight=layer, part=part))
            if w.is_leaf and w.requires_grad:
                own = layout_of(w)
                w.register_hook(lambda gradient: self.ready(gradient, own, weight=layer, part=part))
            return product

        return call

    def ready(self, gradient, new, **more):
        old = layout_of(gradient)
        if old != new:
            self.note("ready", gradient, old=old, new=new, **more)

    def to_global(self, function):
        def call(tensor, *rest, **named):
            self.begin()
            moved = function(tensor, *rest, **named)
            old, new = layout_of(tensor), layout_of(moved)
            if old != new:
                number = self.moves
                self.moves += 1
                self.note("move", moved, old=old, new=new, number=number)
                if moved.requires_grad:
                    moved.register_hook(lambda gradient: self.ready(gradient, old, number=number))
            return moved

        return call

    def step(self, function):
        def call(optimizer, *rest, **named):
            result = function(optimizer, *rest, **named)
            weights = [weight for group in optimizer.param_groups for weight in group.parameters]
            self.note("update", weights[0], of=[layout_of(weight).ranks for weight in weights])
            return result

        return call


def order(path, **arguments):
    """{"events": see Order} and `costs` of one step of the eager training recipe at `path`. Collective."""
    seen = Order()
    places = {place: seen.matmul(getattr(*place)) for place in PLACES["matmul"]}
    places[flow.Tensor, "to_global"] = seen.to_global(flow.Tensor.to_global)
    for kind in (flow.optim.SGD, flow.optim.Adam):
        places[kind, "step"] = seen.step(kind.step)
    with replaced(places):
        tensors, _ = observed(path, Recorder(keeps_initial=False), steps=1, **arguments)
    return {"events": seen.events, **costs(tensors)}


def sends(path, **arguments):
    """What measure_script says of a recipe, and "to": {rank: bytes that this rank gives to flow.comm.send for it}."""
    to, send = {}, flow.comm.send

    def noted_send(tensor, dst, *rest, **named):
        to[dst] = to.get(dst, 0) + tensor.numel() * tensor.element_size()
        return send(tensor, dst, *rest, **named)

    with replaced({(flow.comm, "send"): noted_send}):
        return {**measure_script(path, arguments), "to": to}
