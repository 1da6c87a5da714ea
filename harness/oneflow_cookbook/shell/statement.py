"""What a statement of the shell did on this rank: its steps, and the bytes that left the rank in total."""

import oneflow as flow

from oneflow_cookbook.measure.graph import boxings_of
from oneflow_cookbook.measure.sent import connections, growth, quiet
from oneflow_cookbook.measure.tensors import tensors_in
from oneflow_cookbook.measure.trace import STEPS, Trace
from oneflow_cookbook.shell import SHELL


class Statement(Trace):
    """A Trace that waits for no other rank, so that a statement hangs only if it would hang without the shell.

    So it does not measure each step; `sent` counts the bytes of the whole statement.
    """

    def __init__(self, script):
        super().__init__(path=SHELL, others=(script,))
        self.before = connections()
        self.outside = 0  # bytes that were sent while graphs were built
        self.compares = False  # whether flow.tensor made a global tensor, for which OneFlow compares all ranks' values

    def sent(self):
        """The bytes that this rank has sent in this statement so far; 0 on all ranks if nothing has moved."""
        flow._oneflow_internal.eager.Sync()
        return max(0, growth(self.before, connections()) - self.outside)

    def settled(self):
        """The same, once all ranks have sent everything. Collective."""
        return max(0, growth(self.before, quiet()) - self.outside)

    def facts(self, variables):
        """The keys of measure_script that the terminal needs. variables: {name: value} after the statement."""
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
        return self.record(call, outputs_of=lambda _: self.names.gradients(), by_part=[], gradients=[])

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
        with self.inside(path):
            result = call.proceed()
        self.names.add_returned(path, [tensor for tensor in tensors_in(result) if not tensor.is_lazy])
        return result
