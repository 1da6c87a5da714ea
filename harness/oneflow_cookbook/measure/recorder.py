"""Record a script on this rank: an Event for each call of OneFlow, and the parameters before training."""

import contextlib
from dataclasses import dataclass, field

from oneflow_cookbook.measure.calls import replaced, watching
from oneflow_cookbook.measure.events import Event, layout
from oneflow_cookbook.measure.graph import modules_in, recomputed, without_identity
from oneflow_cookbook.measure.sbp import label
from oneflow_cookbook.measure.tensors import describe, snapshot, tensors_in


@dataclass
class Recorder:
    """Records inside `with recorder.recording():`, and multiplies the result of each matmul by matmul_scale."""

    matmul_scale: float = 1.0
    keeps_initial: bool = True  # whether to copy each parameter before the first step
    events: list = field(default_factory=list)
    graphs: list = field(default_factory=list)  # the class of each graph that is made
    without_identity: list = field(default_factory=list)  # see graph.py
    recomputed: dict = field(default_factory=dict)  # of the graph that was compiled last, see graph.py
    initial: dict = field(default_factory=dict)  # id of a parameter -> its snapshot before the first step
    referenced: list = field(default_factory=list)  # these parameters, so that Python does not reuse their ids
    gradients: dict = field(default_factory=dict)  # id of a parameter -> its gradient in a graph's last call
    appended: dict = field(default_factory=dict)  # graph -> ids of the parameters whose gradients it returns
    paused: bool = False

    @contextlib.contextmanager
    def recording(self):
        with watching(self.see):
            yield

    def see(self, call):
        """Handle a call with the method for its kind, if there is one; returns the call's result."""
        if self.paused or "read" in call.around:
            return call.proceed()
        handler = getattr(self, f"see_{call.kind.replace(' ', '_')}", None)
        return handler(call) if handler else call.proceed()

    @contextlib.contextmanager
    def pause(self):
        """Inside it nothing is recorded."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def record(self, call, **facts):
        """Make a call and record it as an event; returns its result."""
        inputs, result = tensors_in([call.arguments, call.keywords]), call.proceed()
        self.note(call, inputs, tensors_in(result), **facts)
        return result

    def note(self, call, inputs, outputs, **facts):
        """Append the Event of a call."""
        lazy = any(tensor.is_lazy for tensor in outputs)
        described = [[describe(tensor) for tensor in tensors] for tensors in (inputs, outputs)]
        self.events.append(Event(call.kind, call.name, *described, lazy=lazy, facts=facts))

    def see_matmul(self, call):
        product = self.record(call)
        return product if self.matmul_scale == 1.0 else product * self.matmul_scale

    def see_to_global(self, call):
        grad_sbp = call.keywords.get("grad_sbp")
        return self.record(call, grad_sbp=None if grad_sbp is None else label(grad_sbp))

    def see_read(self, call):
        return self.record(call)

    def see_set_stage(self, call):
        named = {**dict(zip(("stage_id", "placement"), call.arguments[1:])), **call.keywords}
        return self.record(call, stage=(named["stage_id"], named["placement"].ranks.tolist()))

    def see_module(self, call):
        if "module" not in call.around and "graph" not in call.around:
            self.keep_initial(tensors_of(call.arguments[0]))
        return call.proceed()

    def see_update(self, call):
        optimizer = call.arguments[0]  # a script may only ever call copies of its model
        self.keep_initial([parameter for group in optimizer.param_groups for parameter in group.parameters])
        return call.proceed()

    def see_new_graph(self, call):
        self.graphs.append(type(call.arguments[0]).__name__)
        return call.proceed()

    def see_graph(self, call):
        graph = call.arguments[0]
        self.events.append(Event("graph", type(graph).__name__))
        result = call.proceed() if graph._is_compiled else self.first_call(graph, call)
        if graph not in self.appended:
            return result
        outputs, gradients = result
        self.gradients.update(zip(self.appended[graph], gradients))
        return outputs

    def first_call(self, graph, call):
        """Build a graph so that it also returns the gradients of its parameters, and call it."""
        for module in modules_in(graph).values():
            self.keep_initial(tensors_of(module))
        build = type(graph).build

        def build_with_gradients(graph, *arguments, **keywords):
            outputs = build(graph, *arguments, **keywords)
            gradients = gradients_of(graph)
            if not gradients:
                return outputs
            self.appended[graph] = list(gradients)
            return outputs, tuple(gradients.values())

        with replaced({(type(graph), "build"): build_with_gradients}):
            result = call.proceed()
        self.without_identity += without_identity(graph)
        self.recomputed = recomputed(graph)
        return result

    def keep_initial(self, tensors):
        """Take a snapshot of each parameter or buffer that has none yet. Collective."""
        with self.pause():
            for tensor in tensors:
                if self.keeps_initial and id(tensor) not in self.initial:
                    self.referenced.append(tensor)
                    copy = tensor.detach().clone()  # as numpy shares a tensor's memory
                    self.initial[id(tensor)] = snapshot(copy)

    def of_kind(self, kind):
        """The events of a kind of call."""
        return [event for event in self.events if event.kind == kind]

    @property
    def matmuls(self):
        """[(SBP, ranks, shape) of x, of w, of the product] for each matmul."""
        operands = [(*event.inputs[:2], *event.outputs) for event in self.of_kind("matmul")]
        return [[(*layout(tensor), tensor["shape"]) for tensor in tensors] for tensors in operands]

    @property
    def lazy(self):
        """For each matmul whether it is in a graph."""
        return [event.lazy for event in self.of_kind("matmul")]

    @property
    def moves(self):
        """[Layout before, Layout after] of each to_global, followed by its grad_sbp if set."""
        moves = []
        for event in self.of_kind("to_global"):
            [old], [new], grad_sbp = event.inputs, event.outputs, event.facts["grad_sbp"]
            moves.append([layout(old), layout(new), *([grad_sbp] if grad_sbp else [])])
        return moves

    @property
    def reads(self):
        """The Layout of each global tensor whose value is read."""
        layouts = [layout(event.inputs[0]) for event in self.of_kind("read")]
        return [where for where in layouts if where.sbp != "local"]

    @property
    def stages(self):
        """(number, ranks) of each set_stage."""
        return [event.facts["stage"] for event in self.of_kind("set_stage")]

    @property
    def calls(self):
        """For each call of a graph the name of its class."""
        return [event.name for event in self.of_kind("graph")]


def tensors_of(module):
    """The parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def gradients_of(graph):
    """{id of a parameter: its gradient} in a graph that is being built; {} with micro-batches or auto parallel."""
    if graph.config.proto.num_gradient_accumulation_steps > 1:
        return {}  # OneFlow cannot return a gradient of all micro-batches
    if graph.config.proto.enable_auto_parallel:
        return {}  # a gradient that is returned is P, and OneFlow would choose another layout
    parameters = [parameter for module in modules_in(graph).values() for parameter in module.parameters()]
    return {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
