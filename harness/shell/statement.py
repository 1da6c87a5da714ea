"""What one statement of the shell did on this rank: its steps, and the bytes that left the rank during all of it."""

import oneflow as flow

from harness.measure.graph import boxings_of
from harness.measure.sent import connections, growth, quiet
from harness.measure.tensors import tensors_in
from harness.measure.trace import STEPS, Trace
from harness.shell import SHELL


class Statement(Trace):
    """A Trace that waits for no other rank: the user's statement hangs only where it would hang without us.

    So its steps are not measured one by one. `sent` counts the bytes of the whole statement.
    """

    def __init__(self, script):
        super().__init__(path=SHELL, others=(script,))
        self.before = connections()
        self.outside = 0  # bytes that were sent while graphs were built
        self.compares = False  # whether flow.tensor made a global tensor, for which OneFlow compares all ranks' values

    def sent(self):
        """The bytes that this rank has sent so far; 0 on all ranks if nothing has moved."""
        flow._oneflow_internal.eager.Sync()
        return max(0, growth(self.before, connections()) - self.outside)

    def settled(self):
        """The same once all ranks have sent everything. Collective."""
        return max(0, growth(self.before, quiet()) - self.outside)

    def facts(self, variables):
        """{"events", "names"} as measure_script has them, for the terminal. variables: those after the statement."""
        for name, value in list(variables.items()):
            if id(value) in self.names.tensors and not name.startswith("_"):
                self.names.add_variable(value, name, 1)
        for event in self.of_kind("graph"):
            event.facts["boxings"] = boxings_of(event.facts.pop("graph"))
        return {"events": self.events, "names": self.names.all(), "tensors": [], "compares": self.compares}

    def measure(self, function):
        return function(), 0

    def see_create(self, call):
        self.compares = self.compares or (call.name == "tensor" and call.keywords.get("placement") is not None)
        return super().see_create(call)

    def see_backward(self, call):
        return self.record(call, outputs_of=lambda _: self.names.gradients(), by_layer=[])

    def see_graph(self, call):
        """All ranks build a graph together, so here we may wait for them."""
        graph, *arguments = call.arguments
        if not graph._is_compiled and not STEPS & set(call.around):
            before = quiet()
            graph._compile(*arguments, **call.keywords)
            self.outside += growth(before, quiet())
        return super().see_graph(call)

    def layer(self, call):
        path = self.paths[call.arguments[0]]
        self.layers.append(path)
        try:
            result = call.proceed()
        finally:
            self.layers.pop()
        self.names.add_returned(path, [one for one in tensors_in(result) if not one.is_lazy])
        return result
