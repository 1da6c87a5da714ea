"""What a recipe does on this rank, seen from outside: its tensors by name, its matmuls, moves, reads and graphs."""

import contextlib
from dataclasses import dataclass, field

from harness.measure.calls import replaced, watching
from harness.measure.graph import modules_in, recomputed, without_identity
from harness.measure.sbp import label
from harness.measure.tensors import layout_of, snapshot


@dataclass
class Recorder:
    """Records inside `with recorder.recording():`; `tensors` and `arrays` are read after it.

    Each matmul is scaled by matmul_scale, to see what depends on it.
    """

    matmul_scale: float = 1.0
    keeps_initial: bool = True  # whether to copy each parameter before the first step
    matmuls: list = field(default_factory=list)  # [(SBP, ranks, shape) of x, of w and of the product]
    lazy: list = field(default_factory=list)  # whether in a graph, by matmul
    moves: list = field(default_factory=list)  # [the Layout before and after each to_global, and its grad_sbp if any]
    reads: list = field(default_factory=list)  # the Layout of each global tensor whose value is read
    stages: list = field(default_factory=list)  # (number, ranks) of each set_stage
    calls: list = field(default_factory=list)  # the class of each nn.Graph that is called
    without_identity: list = field(default_factory=list)  # see graph.py
    recomputed: dict = field(default_factory=dict)  # of the graph that was compiled last, see graph.py
    initial: dict = field(default_factory=dict)  # id of a parameter -> its snapshot before the first step
    gradients: dict = field(default_factory=dict)  # id of a parameter -> its gradient in a graph's last call
    appended: dict = field(default_factory=dict)  # graph -> ids of the parameters whose gradients it returns
    paused: bool = False

    @contextlib.contextmanager
    def recording(self):
        with watching(self.see):
            yield

    def see(self, call):
        if self.paused or "read" in call.around:
            return call.proceed()
        handler = getattr(self, f"see_{call.kind.replace(' ', '_')}", None)
        return handler(call) if handler else call.proceed()

    @contextlib.contextmanager
    def pause(self):
        """Inside it nothing is recorded: the calls are our own."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def see_matmul(self, call):
        product = call.proceed()
        operands = (*call.arguments[:2], product)
        self.matmuls.append([(*layout_of(tensor), tuple(tensor.shape)) for tensor in operands])
        self.lazy.append(product.is_lazy)
        return product if self.matmul_scale == 1.0 else product * self.matmul_scale

    def see_to_global(self, call):
        moved = call.proceed()
        backward = [label(call.keywords["grad_sbp"])] if call.keywords.get("grad_sbp") is not None else []
        self.moves.append([layout_of(call.arguments[0]), layout_of(moved), *backward])
        return moved

    def see_read(self, call):
        if call.arguments[0].is_global:
            self.reads.append(layout_of(call.arguments[0]))
        return call.proceed()

    def see_set_stage(self, call):
        number, placement = (*call.arguments[1:], None, None)[:2]
        self.stages.append((number, placement.ranks.tolist()))
        return call.proceed()

    def see_module(self, call):
        if "module" not in call.around and "graph" not in call.around:
            self.keep_initial(call.arguments[0])
        return call.proceed()

    def see_graph(self, call):
        graph = call.arguments[0]
        self.calls.append(type(graph).__name__)
        if graph._is_compiled:
            result = call.proceed()
        else:
            result = self.first_call(graph, call)
        if graph not in self.appended:
            return result
        outputs, gradients = result
        self.gradients.update(zip(self.appended[graph], gradients))
        return outputs

    def first_call(self, graph, call):
        """It builds the graph, which is made to return the gradients of its parameters as well."""
        for module in modules_in(graph).values():
            self.keep_initial(module)
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

    def keep_initial(self, module):
        """A copy of each parameter and buffer as it is now, unless there is an earlier one. Collective."""
        with self.pause():
            for tensor in [*module.parameters(), *module.buffers()]:
                if self.keeps_initial and id(tensor) not in self.initial:
                    self.initial[id(tensor)] = snapshot(tensor.detach().clone())  # numpy's array is the tensor's own


def gradients_of(graph):
    """{id of a parameter: its gradient} while a graph is built; none with micro-batches or auto parallel."""
    if graph.config.proto.num_gradient_accumulation_steps > 1:
        return {}  # OneFlow cannot return one for all of them
    if graph.config.proto.enable_auto_parallel:
        return {}  # a gradient that is returned is P, and OneFlow would choose another layout
    parameters = [parameter for module in modules_in(graph).values() for parameter in module.parameters()]
    return {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
