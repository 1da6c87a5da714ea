"""Record what a script does on this rank: the steps that can move data, in order and measured, and its tensors."""

import contextlib
import linecache
import math
import sys
from pathlib import Path

import numpy as np
import oneflow as flow

from harness.measure.names import Names, looks
from harness.measure.calls import PLACES, replaced
from harness.measure.sbp import label
from harness.measure.sent import sent_by
from harness.measure.tensors import describe, is_whole, tensors_in
from harness.start.errors import UsageError

MEASURED = 20  # times that a step on one line is measured; then it is only counted, so that training takes its time
TO_GLOBAL = (flow.Tensor, "to_global")
READS = {"numpy": "{}.numpy()", "item": "{}.item()", "__repr__": "print({})"}  # they gather the value on every rank
CREATORS = ("tensor", "ones", "zeros", "empty", "full", "rand", "randn")


def created_shape(creator, arguments, named):
    """The shape of the tensor that a call of one of CREATORS makes."""
    if creator == "tensor":
        data = arguments[0] if arguments else named["data"]
        return tuple(data.shape) if hasattr(data, "shape") else np.shape(data)
    size = named.get("size", arguments[:1] if creator == "full" else arguments)
    return tuple(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)


class Trace:
    """Records and measures the steps of the script at `path` inside `with trace.recording():`. Collective.

    A step is a dict: "what", its "line" and "text" in the script, "inputs" and "outputs" (see tensors.describe), bytes
    "sent" by this rank, how many "times"; of a matmul "transposed"; of a graph's call "graph" and bytes of "weights".
    """

    def __init__(self, path):
        self.path, self.steps, self.inside = str(path), [], False
        self.names = Names(self.path, self.steps)
        self.alike = {}  # those of the steps that look alike
        self.averages = False  # whether DistributedDataParallel averages the gradients of local tensors

    @contextlib.contextmanager
    def recording(self):
        """Inside it, every call by which a script can move data is recorded."""
        tensor, module, graph = flow.Tensor, flow.nn.Module, flow.nn.Graph
        places = {place: self.step("matmul", getattr(*place)) for place in PLACES["matmul"]}
        places[TO_GLOBAL] = self.to_global(getattr(*TO_GLOBAL))
        places[tensor, "backward"] = self.step("backward", tensor.backward)
        places.update({(tensor, name): self.step(words, getattr(tensor, name)) for name, words in READS.items()})
        places.update({(flow, name): self.create(name, getattr(flow, name)) for name in CREATORS})
        places[module, "__call__"] = self.module_call(module.__call__)
        places[module, "to_global"] = self.module_call(module.to_global)
        places[graph, "__call__"] = self.graph_call(graph.__call__)
        with replaced(places), self.names.watching():
            yield

    def step(self, what, function):
        def call(*arguments, **named):
            tensors = tensors_in([arguments, named])
            if self.inside or not self.can_move(what, tensors):
                with self.one_step():
                    return function(*arguments, **named)
            transposed = [bool(named.get(name, False)) for name in ("transpose_a", "transpose_b")]
            rest = str([one for one in (*arguments, *named.values()) if not isinstance(one, flow.Tensor)])
            return self.record(what, tensors, lambda: function(*arguments, **named), rest, transposed=transposed)

        return call

    @contextlib.contextmanager
    def one_step(self):
        """Inside it, no step is recorded: what is called belongs to the one around it."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def can_move(self, what, tensors):
        """Whether a call with these tensors is a step. Any other may be made on one rank only, and must not wait."""
        if any(tensor.is_lazy for tensor in tensors):
            return False
        if what in READS.values():
            return not is_whole(tensors[0])
        if what == "to_global" or (what == "backward" and self.averages):
            return True
        return any(tensor.is_global for tensor in tensors)

    def record(self, what, inputs, function, rest="", **more):
        """Call a function as one step, measured; rest: what else than its inputs tells it from others on its line."""
        line = self.line()
        parameters = [id(one) for one in inputs if id(one) in self.names.parameters]
        alike = (what, line["line"], rest, *(looks(one) if one.is_global else "local" for one in inputs), *parameters)
        measured = self.alike.setdefault(alike, [])  # as many on all ranks, so that they measure together
        with self.one_step():
            if len(measured) == MEASURED:
                measured[-1]["times"] += 1
                return function()
            self.names.add(inputs)
            self.names.add_variables(sys._getframe(), all_frames=True)
            result, sent = sent_by(function)
        outputs = self.names.gradients() if what == "backward" else tensors_in(result)
        tensors = {"inputs": [describe(one) for one in inputs], "outputs": [describe(one) for one in outputs]}
        measured.append({"what": what, "sent": sent, "times": 1, **tensors, **line, **more})
        self.steps.append(measured[-1])
        self.names.add(outputs)
        if what == "to_global":
            self.names.add_moved(inputs[0], result)
        return result

    def line(self):
        """Number and text of the line of the script that is running; number 0 outside of it."""
        frame = sys._getframe()
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        number = frame.f_lineno if frame else 0
        return {"line": number, "text": linecache.getline(self.path, number).strip()}

    def to_global(self, function):
        step = self.step("to_global", function)

        def call(tensor, placement=None, sbp=None, **named):
            if tensor.is_global:  # the size of the whole is not known from a local tensor
                self.check(tensor.shape, placement or tensor.placement, tensor.sbp if sbp is None else sbp)
            return step(tensor, placement, sbp, **named)

        return call

    def create(self, name, function):
        def call(*arguments, **named):
            if named.get("placement") is not None and named.get("sbp") is not None:
                self.check(created_shape(name, arguments, named), named["placement"], named["sbp"])
            return function(*arguments, **named)

        return call

    def check(self, shape, placement, sbp):
        """Raises UsageError if a rank would hold nothing of a tensor: OneFlow 0.9.0 ends the rank there."""
        for dim, size in enumerate(shape):
            axes = zip(placement.ranks.shape, label(sbp).split(", "))
            ranks = math.prod(n for n, one in axes if one == f"S({dim})")
            if size < ranks and ranks > 1:
                place = f"{Path(self.path).name}:{self.line()['line']}"
                what = f"a tensor of shape {tuple(shape)} cannot be split({dim}) over {ranks} ranks"
                raise UsageError(f"{place}: {what}: a rank would hold nothing; make that size {ranks} or more")

    def module_call(self, function):
        def call(module, *arguments, **named):
            self.averages = self.averages or getattr(module, "_is_ddp_module", False)
            if not self.inside:
                self.names.add_module(module)
            return function(module, *arguments, **named)

        return call

    def graph_call(self, function):
        """A graph's first call builds it; here it is built before, so that only the call is measured."""

        def call(graph, *arguments, **named):
            def run():
                return function(graph, *arguments, **named)

            if self.inside:
                return run()
            modules = [block.to(flow.nn.Module) for block in graph._blocks.values()]
            parameters = [one for module in modules for one in self.names.add_module(module)]
            if not graph._is_compiled:
                with self.one_step():
                    graph._compile(*arguments, **named)
            what, inputs = f"a call of {type(graph).__name__}", tensors_in([arguments, named]) + parameters
            weights = sum(one.numel() * one.element_size() for one in parameters) if graph.training else 0
            return self.record(what, inputs, run, str(id(graph)), graph=graph, weights=weights)

        return call
