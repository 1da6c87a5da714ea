"""What a training step does, in order and with the bytes that each part of it makes this rank send."""

from dataclasses import dataclass, field

from harness.measure.events import Event
from harness.measure.observe import observed
from harness.measure.recorder import Recorder
from harness.measure.sent import growth, quiet
from harness.measure.tensors import describe, layout_of
from harness.measure.training import costs


@dataclass
class Order(Recorder):
    """A Recorder of a step in eager mode, also inside backward(), where a gradient tells that it has come. Collective.

    The kinds of its events: "forward"; "backward": the gradient of a product has come, the matmuls of its backward
    follow; "move": a to_global, each with a "number"; "ready": a gradient must still go from a layout, "old", to
    another, "new"; "update". Those of a matmul have the facts "weight", the number of the layer, and "part", that of
    the micro-batch; a gradient that goes back through a move has its number. `sent` counts from the event before.
    """

    keeps_initial: bool = False
    weights: list = field(default_factory=list)  # (layout, shape) of each, in the order of their matmuls
    parts: dict = field(default_factory=dict)  # number of a weight -> its matmuls so far
    numbered: int = 0  # moves so far

    def record(self, call, **facts):
        return call.proceed()  # none but the events above

    def begin(self):
        if not self.events:  # what was sent to make tensors is not of the step
            self.before = quiet()

    def add(self, kind, tensor, **facts):
        sent = growth(self.before, quiet())
        self.events.append(Event(kind, "", outputs=[describe(tensor)], sent=sent, facts=facts))
        self.before = quiet()

    def see_matmul(self, call):
        self.begin()
        w, product = call.arguments[1], call.proceed()
        look = layout_of(w), tuple(w.shape)
        self.weights += [look] if look not in self.weights else []
        weight = self.weights.index(look)
        part = self.parts[weight] = self.parts.get(weight, -1) + 1
        self.add("forward", product, weight=weight, part=part)
        if product.requires_grad:
            product.register_hook(lambda gradient: self.add("backward", gradient, weight=weight, part=part))
        if w.is_leaf and w.requires_grad:
            own = layout_of(w)
            w.register_hook(lambda gradient: self.add_ready(gradient, own, weight=weight, part=part))
        return product

    def see_to_global(self, call):
        self.begin()
        old, moved = layout_of(call.arguments[0]), call.proceed()
        new = layout_of(moved)
        if old != new:
            number, self.numbered = self.numbered, self.numbered + 1
            self.add("move", moved, old=old, new=new, number=number)
            if moved.requires_grad:
                moved.register_hook(lambda gradient: self.add_ready(gradient, old, number=number))
        return moved

    def add_ready(self, gradient, new, **facts):
        old = layout_of(gradient)
        if old != new:
            self.add("ready", gradient, old=old, new=new, **facts)

    def see_update(self, call):
        result = call.proceed()
        weights = [weight for group in call.arguments[0].param_groups for weight in group.parameters]
        self.add("update", weights[0], ranks=sorted({rank for one in weights for rank in layout_of(one).members}))
        return result


def order(path, **arguments):
    """{"events": see Order} and `costs` of one step of the eager training recipe at `path`. Collective."""
    recorder = Order()
    tensors, _ = observed(path, recorder, steps=1, **arguments)
    return {"events": recorder.events, **costs(tensors)}
