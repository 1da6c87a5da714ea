"""Record a script with the bytes that each step sends and the names of its tensors."""

import contextlib
import functools
import linecache
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.events import GRADIENT, SCRIPT, Event
from oneflow_cookbook.measure.graph import modules_in
from oneflow_cookbook.measure.names import Names, layout_and_shape
from oneflow_cookbook.measure.recorder import Recorder
from oneflow_cookbook.measure.sbp import label
from oneflow_cookbook.measure.sent import growth, quiet, sent_by
from oneflow_cookbook.measure.tensors import describe, is_whole, tensors_in
from oneflow_cookbook.start.errors import UsageError

MEASURED = 20  # times that a step is measured, as its tensors may have different names; after that it is counted
REPEATED = 2  # the same in a module and for backward; not 1, because at first ranks connect and gradients are created
STEPS = {"matmul", "to_global", "module to_global", "backward", "read", "graph"}  # kinds of calls that can move data
COMPARED = 1e5  # bytes of an array from which on flow.tensor is a step too: it sends the array, to compare the copies


@dataclass
class Trace(Recorder):
    """A Recorder that measures each step that can move data, and records nothing else. Collective.

    A call inside a step is part of the step. Facts of events: of a matmul "transposed", (x, w); of a graph's call
    "graph", "weights": the bytes that it trains, and "micro_batches": their number; of backward "gradients", [(what
    source_of returns, why it moves, the gradient before and after, bytes)], and "by_part", [[path of a part of the
    module, or (line, ids of the operands) of a matmul, bytes that its backward sent besides]]. A call of a part of a
    module is an event "layer". Its bytes are those that neither its steps nor its own parts sent: OneFlow moved an
    operand by itself.
    """

    events: list = field(default_factory=list)
    path: str = ""  # of the script
    others: tuple = ()  # paths of more files that belong to it
    similar: dict = field(default_factory=dict)  # signature of a step -> the events with this signature
    paths: dict = field(default_factory=dict)  # module -> its path in the outermost module
    layers: list = field(default_factory=list)  # paths of the running modules, innermost last
    accounted: int = 0  # bytes of all events so far
    by_part: Optional[list] = None  # of the running backward, as is reduced
    reduced: Optional[list] = None
    moved: dict = field(default_factory=dict)  # id of a leaf -> its gradient in the layout of the leaf
    watched: set = field(default_factory=set)  # ids of the parameters whose gradients are watched
    updates: int = 0  # number of an optimizer's steps, in eager mode
    averages: bool = False  # whether DistributedDataParallel averages the gradients of local tensors

    def __post_init__(self):
        self.names = Names(self.path, self.events, self.others)

    @contextlib.contextmanager
    def recording(self):
        with super().recording(), self.names.watching():
            yield

    def record(self, call, **facts):
        """Make a call; if it is a step, measure and record it."""
        tensors = tensors_in([call.arguments, call.keywords])
        if STEPS & set(call.around) or not self.can_move(call.kind, tensors):
            return call.proceed()
        arguments = (*call.arguments, *call.keywords.values())
        options = [argument for argument in arguments if not isinstance(argument, flow.Tensor)]
        return self.measured(call, tensors, str(options), **facts)

    def can_move(self, kind, tensors):
        """Whether a call with these tensors is a step. Other calls may run on a single rank, and must not wait."""
        if any(tensor.is_lazy for tensor in tensors):
            return False
        if kind == "read":
            return not is_whole(tensors[0])
        if kind == "to_global" or (kind == "backward" and self.averages):
            return True
        return any(tensor.is_global for tensor in tensors)

    def measured(self, call, inputs, options, name="", outputs_of=tensors_in, **facts):
        """Make a call that is a step: measure it, or only count it if similar steps were measured often enough.

        inputs: its tensors. options: its other arguments, as text. name: of the event, by default that of the function.
        outputs_of: a function from the call's result to its tensors. facts: of the event.
        """
        layer = self.layers[-1] if self.layers else ""
        signature = self.signature(call, inputs, options, layer)
        if self.is_counted(signature, REPEATED if layer or call.kind == "backward" else MEASURED):
            return call.proceed()
        self.names.add(inputs)
        self.names.add_variables()
        result, sent = self.measure(call.proceed)
        outputs = outputs_of(result)
        self.add(signature, call.kind, name or call.name, inputs, outputs, layer=layer, sent=sent, facts=facts)
        self.names.add(outputs)
        if call.kind == "to_global":
            self.names.add_moved(inputs[0], result)
        return result

    def signature(self, call, inputs, options, layer):
        """Equal for calls that repeat a step of the script."""
        looks = [layout_and_shape(tensor) if tensor.is_global else "local" for tensor in inputs]
        parameters = [id(tensor) for tensor in inputs if id(tensor) in self.names.parameters]
        return (call.kind, self.line(), layer, options, *looks, *parameters)

    def is_counted(self, signature, measured):
        """Whether a step was measured so often that it is only counted. Ranks agree, as they make the same calls."""
        similar = self.similar.get(signature, [])
        if len(similar) < measured:
            return False
        similar[-1].times += 1
        return True

    def add(self, signature, kind, name, inputs, outputs, **fields):
        """Add an Event on the present line of the script."""
        line, text = self.line()
        described = [[describe(tensor) for tensor in tensors] for tensors in (inputs, outputs)]
        event = Event(kind, name, *described, line=line, text=text, **fields)
        self.events.append(event)
        self.similar.setdefault(signature, []).append(event)
        self.accounted += event.sent

    def of_kind(self, kind):
        """The events of a kind of call."""
        return [event for event in self.events if event.kind == kind]

    def measure(self, function):
        """(function(), bytes that this rank sent for it)."""
        return sent_by(function)

    def line(self):
        """(number, text) of the current line of the script; number 0 outside of it."""
        frame = sys._getframe()
        while frame and frame.f_code.co_filename not in (self.path, *self.others):
            frame = frame.f_back
        if frame is None:
            return 0, ""
        return frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()

    def see_matmul(self, call):
        transposed = [bool(call.keywords.get(name, False)) for name in ("transpose_a", "transpose_b")]
        product = self.record(call, transposed=transposed)
        if not self.layers:
            self.watch_backward((self.line()[1], *map(id, tensors_in([call.arguments, call.keywords]))), product)
        return product

    def see_to_global(self, call):
        named = {**dict(zip(("tensor", "placement", "sbp"), call.arguments)), **call.keywords}
        tensor, placement, sbp = named["tensor"], named.get("placement"), named.get("sbp")
        if tensor.is_global:  # the shape of a local tensor is not the global shape
            self.check(tensor.shape, placement or tensor.placement, tensor.sbp if sbp is None else sbp)
        result = self.record(call)
        if gets_gradient(result) and not STEPS & set(call.around):
            layout = self.source_of(tensor), tensor.placement, call.keywords.get("grad_sbp")
            result.register_hook(functools.partial(self.move_gradient, *layout))
        return result

    def see_read(self, call):
        return self.record(call)

    def source_of(self, tensor):
        """What to name the gradient of a tensor after: a parameter's id, else the layer or the line it is used in."""
        parameter = self.names.parameter_of(tensor)
        if parameter is not None:
            return parameter
        return self.layers[-1] if self.layers else self.line()[1]

    def see_backward(self, call):
        self.names.add_variables()
        for leaf in self.names.leaves:
            self.watch_gradient(leaf)
        self.by_part, self.reduced, self.moved, self.before = [], [], {}, quiet()
        facts = {"by_part": self.by_part, "gradients": self.reduced}
        result = self.record(call, outputs_of=lambda _: self.names.gradients(), **facts)
        self.account()
        self.by_part = None
        return result

    def watch_gradient(self, leaf):
        """When the gradient of a leaf is there, move it to the leaf's layout, as OneFlow does after the hook."""
        if id(leaf) in self.watched or not leaf.is_global:
            return
        self.watched.add(id(leaf))
        layout = id(leaf), leaf.placement, leaf.sbp

        def gradient_arrived(gradient):
            if id(leaf) not in self.moved:  # OneFlow calls the hook of a leaf twice
                self.moved[id(leaf)] = self.move_gradient(*layout, gradient)
            return self.moved[id(leaf)]

        leaf.register_hook(gradient_arrived)

    def move_gradient(self, source, placement, sbp, gradient):
        """Move a gradient as OneFlow does after this hook, but measured; returns None if it has this layout already.

        source: of source_of. sbp: None to keep that of the gradient.
        """
        if self.by_part is None or gradient.is_lazy:
            return None
        sbp = sbp or gradient.sbp
        if (gradient.placement, label(gradient.sbp)) == (placement, label(sbp)):
            return None
        self.account()
        moved, sent = self.measure(lambda: gradient.to_global(placement=placement, sbp=sbp))
        why = GRADIENT if source in self.watched else SCRIPT
        self.reduced.append((source, why, describe(gradient), describe(moved), sent))
        self.before = quiet()
        return moved

    def account(self):
        """Add what was sent since the last account to the part that backward has reached."""
        if self.by_part:
            self.by_part[-1][1] += growth(self.before, quiet())
        self.before = quiet()

    def see_update(self, call):
        self.updates += 1
        return call.proceed()

    def watch_backward(self, part, output):
        """Begin the account of a layer or matmul in backward when the gradient of its output arrives."""

        def gradient_arrived(gradient):
            if self.by_part is not None:  # else backward is not measured
                self.account()
                self.by_part.append([part, 0])

        if gets_gradient(output):
            output.register_hook(gradient_arrived)

    def see_create(self, call):
        named = call.keywords
        if named.get("placement") is None or named.get("sbp") is None:
            return call.proceed()
        shape = created_shape(call.name, call.arguments, named)
        self.check(shape, named["placement"], named["sbp"])
        data = call.arguments[0] if call.arguments else named.get("data")
        is_large = call.name == "tensor" and getattr(data, "nbytes", 4 * math.prod(shape)) >= COMPARED
        everywhere = 1 < named["placement"].ranks.size == flow.env.get_world_size()  # other ranks may not call it
        if not (is_large and everywhere) or STEPS & set(call.around):
            return call.proceed()
        return self.measured(call, [], str((shape, named["sbp"])))

    def see_module(self, call):
        module = call.arguments[0]
        self.averages = self.averages or getattr(module, "_is_ddp_module", False)
        if not {"module", *STEPS} & set(call.around):
            self.names.add_variables()  # first the tensors that are older than the module
            self.names.add_module(module)
            self.paths.update({part: path for path, part in module.named_modules() if path})
        return self.layer(call) if module in self.paths else call.proceed()

    @contextlib.contextmanager
    def inside(self, path):
        """Inside it, the part of the module at this path runs."""
        self.layers.append(path)
        try:
            yield
        finally:
            self.layers.pop()

    def layer(self, call):
        """Call a part of a module. Its first call is measured; what its steps did not send is the layer's own."""
        path, inputs = self.paths[call.arguments[0]], tensors_in([call.arguments, call.keywords])
        is_global = bool(inputs) and all(tensor.is_global and not tensor.is_lazy for tensor in inputs)
        if STEPS & set(call.around) or not is_global:
            return call.proceed()
        signature = ("layer", path, *map(layout_and_shape, inputs))
        is_counted, accounted = self.is_counted(signature, 1), self.accounted
        with self.inside(path):
            result, sent = (call.proceed(), 0) if is_counted else self.measure(call.proceed)
        outputs = tensors_in(result)
        if not is_counted:
            sent -= self.accounted - accounted  # by its steps
            self.add(signature, "layer", path, inputs, outputs, layer=path, sent=sent)
            self.names.add_returned(path, outputs)
        for tensor in outputs[:1]:
            self.watch_backward(path, tensor)
        return result

    def see_module_to_global(self, call):
        """A module's to_global is a single step, in which all parameters and buffers move."""
        module = call.arguments[0]
        if STEPS & set(call.around):
            return call.proceed()
        self.names.add_variables()
        self.names.add_module(module)
        name = self.names.modules[module] or type(module).__name__
        options = str([*call.arguments[1:], *call.keywords.values()])

        def tensors(_=None):
            return [*module.parameters(), *module.buffers()]

        result = self.measured(call, tensors(), options, name, tensors)
        self.names.add_module(module)
        return result

    def see_graph(self, call):
        """Build a graph before its first call, so that only the call is measured."""
        graph, *arguments = call.arguments
        if STEPS & set(call.around):
            return call.proceed()
        self.names.add_variables()
        modules = modules_in(graph).values()
        parameters = [parameter for module in modules for parameter in self.names.add_module(module)]
        if not graph._is_compiled:
            graph._compile(*arguments, **call.keywords)
        inputs = tensors_in([arguments, call.keywords]) + parameters
        weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters) if graph.training else 0
        facts = {"weights": weights, "micro_batches": graph.config.proto.num_gradient_accumulation_steps}
        return self.measured(call, inputs, str(id(graph)), type(graph).__name__, graph=graph, **facts)

    def check(self, shape, placement, sbp):
        """Raises UsageError if a rank would hold nothing of a tensor: OneFlow 0.9.0 ends the rank there."""
        for dim, size in enumerate(shape):
            axes = zip(placement.ranks.shape, label(sbp).split(", "))
            ranks = math.prod(n for n, axis_sbp in axes if axis_sbp == f"S({dim})")
            if size < ranks and ranks > 1:
                place = f"{Path(self.path).name}:{self.line()[0]}"
                refused = f"a tensor of shape {tuple(shape)} cannot be split({dim}) over {ranks} ranks"
                raise UsageError(f"{place}: {refused}: a rank would hold nothing; make that size {ranks} or more")


def gets_gradient(tensor):
    """Whether a hook can be registered for the gradient of an operator's result."""
    return tensor.is_global and not tensor.is_lazy and tensor.requires_grad and flow.is_grad_enabled()


def created_shape(creator, arguments, named):
    """The shape of the tensor that a function of calls.CREATORS creates. named: its keyword arguments."""
    if creator == "tensor":
        data = arguments[0] if arguments else named["data"]
        return tuple(data.shape) if hasattr(data, "shape") else np.shape(data)
    size = named.get("size", arguments[:1] if creator == "full" else arguments)
    return tuple(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
