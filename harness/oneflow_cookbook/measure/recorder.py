"""Record a script on this rank: what records it has a method for each kind of call of OneFlow."""

import contextlib
from dataclasses import dataclass, field

from oneflow_cookbook.measure.calls import replaced, watching
from oneflow_cookbook.measure.graph import modules_in


@dataclass
class Recorder:
    """Inside `with recorder.recording():`, handles each call with the method for its kind, such as see_matmul.

    Of a graph it gets the gradients, too.
    """

    gradients: dict = field(default_factory=dict)  # id of a parameter -> its gradient in a graph's last call
    appended: dict = field(default_factory=dict)  # graph -> ids of the parameters whose gradients it returns
    referenced: list = field(default_factory=list)  # objects that must live, so that Python does not reuse their ids
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

    def see_graph(self, call):
        graph = call.arguments[0]
        result = call.proceed() if graph._is_compiled else self.first_call(graph, call)
        if graph not in self.appended:
            return result
        outputs, gradients = result
        self.gradients.update(zip(self.appended[graph], gradients))
        return outputs

    def first_call(self, graph, call):
        """Build a graph so that it also returns the gradients of its parameters, and call it."""
        build = type(graph).build

        def build_with_gradients(graph, *arguments, **keywords):
            outputs = build(graph, *arguments, **keywords)
            gradients = gradients_of(graph)
            if not gradients:
                return outputs
            self.appended[graph] = list(gradients)
            return outputs, tuple(gradients.values())

        with replaced({(type(graph), "build"): build_with_gradients}):
            return call.proceed()


def gradients_of(graph):
    """{id of a parameter: its gradient} in a graph that is being built; {} with micro-batches or auto parallel."""
    if graph.config.proto.num_gradient_accumulation_steps > 1:
        return {}  # OneFlow cannot return a gradient of all micro-batches
    if graph.config.proto.enable_auto_parallel:
        return {}  # a gradient that is returned is P, and OneFlow would choose another layout
    parameters = [parameter for module in modules_in(graph).values() for parameter in module.parameters()]
    return {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
