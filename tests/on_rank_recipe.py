"""Run a recipe on a rank: its tensors by name, its matmuls, moves, reads, stages and graph calls; what its main prints.

Tensors are named after the variables of its functions, read as they return, and after parameters.
"""

import contextlib
import io
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.calls import watching
from oneflow_cookbook.measure.entry import call_entry, entry_of
from oneflow_cookbook.measure.events import Event, layout
from oneflow_cookbook.measure.graph import modules_in
from oneflow_cookbook.measure.names import of_sequential, returns_of
from oneflow_cookbook.measure.recorder import Recorder
from oneflow_cookbook.measure.sbp import label
from oneflow_cookbook.measure.sent import growth, quiet, wait_for
from oneflow_cookbook.measure.tensors import describe, layout_of, snapshot, tensors_in
from oneflow_cookbook.start import recipe

RECORDED = ("matmuls", "lazy", "moves", "reads", "stages", "graphs", "calls", "without_identity", "recomputed")
STATE_OF_GRAPH = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buf"}  # graph's name -> optimizer's name


def observe(path, matmul_scale=1.0, names=None, **arguments):
    """Call `train` or `run` of the recipe at `path` on all ranks. Collective.

    matmul_scale: factor of each matmul. names: of the tensors to read; None: all. arguments: of the entry.

    Returns {"tensors": {name: snapshot}, "arrays": {name: numpy array}, "in_graph": {name: (SBP, ranks, shape)} of the
    tensors inside a graph, which have no value}, and the attributes RECORDED of a RecipeRecorder.
    """
    recorder = RecipeRecorder(matmul_scale=matmul_scale)
    tensors, frames = observed(path, recorder, **arguments)
    selected = {name: value for name, value in tensors.items() if names is None or name in names}
    values = {name: value if isinstance(value, dict) else snapshot(value) for name, value in selected.items()}
    events = {name: getattr(recorder, name) for name in RECORDED}
    return {"tensors": values, "arrays": arrays_by_name(frames.outer), "in_graph": frames.in_graph, **events}


def observed(path, recorder, **arguments):
    """Call the entry of a recipe while `recorder` records.

    Returns ({name: tensor, or its snapshot before the first step}, Frames). A parameter w is "w" before and "new w"
    after training; its gradient is "w grad", its momentum "w momentum_buf".
    """
    module = recipe.load(path)
    frames = Frames(entry_of(module).__code__)
    with recorder.recording(), returns_of(module.__file__, frames.collect):
        call_entry(module, arguments)
    return by_name(frames, recorder), frames


def by_name(frames, recorder):
    """The tensors of a recipe by name, from its frames and what was recorded."""
    parameters = parameters_by_name(frames.outer)
    tensors = {**tensors_by_name(frames.inner), **tensors_by_name(frames.outer)}
    tensors.update(optimizer_state(frames.outer, parameters))
    for name, parameter in parameters.items():
        tensors[f"new {name}"] = parameter
        tensors[name] = recorder.initial.get(id(parameter), parameter)
    for name, tensor in {**tensors_by_name(frames.outer), **parameters}.items():
        gradient = recorder.gradients.get(id(tensor))
        if gradient is None and tensor.is_leaf and tensor.requires_grad and not recorder.calls:
            gradient = tensor.grad
        if gradient is not None:
            tensors[f"{name} grad"] = gradient
    return tensors


class Frames:
    """Collects the variables of a recipe's functions, when they return.

    outer: {name: value} of the function whose code is `entry`, at its last return; inner: of all other functions;
    in_graph: {name: (SBP, ranks, shape)} of the tensors in a graph that is being built, which have no value.
    """

    def __init__(self, entry):
        self.entry = entry
        self.outer, self.inner, self.in_graph = {}, {}, {}

    def collect(self, frame):
        if frame.f_code is self.entry:
            self.outer = dict(frame.f_locals)
            return
        for name, value in frame.f_locals.items():
            if isinstance(value, flow.Tensor) and value.is_lazy:
                self.in_graph[name] = (*layout_of(value), tuple(value.shape))
            else:
                self.inner[name] = value


def tensors_by_name(variables):
    """{name: tensor} of {variable: value}.

    A tensor x is named "x", the items of a list x "x0", "x1", those of a dict by its keys. A key of several dicts is
    preceded by the variable.
    """
    named = {}
    keys = Counter(key for value in variables.values() if isinstance(value, dict) for key in value)
    for name, value in variables.items():
        items = {name: value}
        if isinstance(value, (list, tuple)) and len(value) < 1000:  # longer lists are data
            items = {f"{name}{i}": item for i, item in enumerate(value)}
        elif isinstance(value, dict):
            items = {f"{name} {key}" if keys[key] > 1 else str(key): item for key, item in value.items()}
        named.update({key: item for key, item in items.items() if isinstance(item, flow.Tensor) and not item.is_lazy})
    return named


def arrays_by_name(variables):
    """{name: array} of the variables that hold plain numbers, such as the losses."""
    numbers = (int, float, np.number, np.ndarray)
    named = {}
    for name, value in variables.items():
        if isinstance(value, np.ndarray):
            named[name] = value
        elif isinstance(value, list) and value and all(isinstance(item, numbers) for item in value):
            with contextlib.suppress(ValueError):  # the arrays have different shapes
                named[name] = np.array(value)
    return named


def parameters_by_name(variables):
    """{name: parameter or buffer}: its path in the module; of several modules, preceded by the module's variable.

    Only outermost modules count, each under its first variable. Of a model's list the name is left out.
    """
    modules = {name: value for name, value in variables.items() if isinstance(value, flow.nn.Module)}
    excluded = {id(part) for module in modules.values() for part in list(module.modules())[1:]}
    outermost = {}
    for variable, module in modules.items():
        if id(module) not in excluded:
            outermost[variable] = module
            excluded.add(id(module))
    named = {}
    for variable, module in outermost.items():
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            name = of_sequential(path, in_a_list=True)
            named[name if len(outermost) == 1 else f"{variable}.{name}"] = tensor
    return named


def optimizer_state(variables, parameters):
    """{"w0 momentum_buf": tensor}: the state of the optimizers and graphs in these variables, by parameter."""
    names = {id(tensor): name for name, tensor in parameters.items()}
    state = {}
    graphs = [value for value in variables.values() if isinstance(value, flow.nn.Graph) and value._is_compiled]
    for graph in graphs:
        paths = {}
        for attribute, module in modules_in(graph).items():
            for path, tensor in module.named_parameters(attribute):
                paths[path] = names.get(id(tensor), path)
        for key, value in flatten(graph.state_dict()).items():
            path, _, kind = key.rpartition("-")
            if path in paths and kind in STATE_OF_GRAPH:
                state[f"{paths[path]} {STATE_OF_GRAPH[kind]}"] = value
    if graphs:
        return state
    for optimizer in [value for value in variables.values() if isinstance(value, flow.optim.Optimizer)]:
        optimized = [parameter for group in optimizer.param_groups for parameter in group.parameters]
        for i, parameter in enumerate(optimized):
            for kind, value in optimizer.state_dict()["state"].get(i, {}).items():
                if isinstance(value, flow.Tensor):
                    state[f"{names.get(id(parameter), i)} {kind}"] = value
    return state


def flatten(state):
    """A graph's state, which has a nested dict for each module, as a flat dict."""
    flat = {}
    for key, value in state.items():
        flat.update(flatten(value) if isinstance(value, dict) else {key: value})
    return flat


@dataclass
class RecipeRecorder(Recorder):
    """Records an Event for each call, and the parameters before training; multiplies each matmul by matmul_scale."""

    matmul_scale: float = 1.0
    events: list = field(default_factory=list)
    graphs: list = field(default_factory=list)  # the class of each graph that is made
    without_identity: list = field(default_factory=list)  # see without_identity
    recomputed: dict = field(default_factory=dict)  # of the graph that was compiled last, see recomputed
    initial: dict = field(default_factory=dict)  # id of a parameter -> its snapshot before the first step

    def record(self, call, **facts):
        """Make a call and record it as an event; returns its result."""
        inputs, result = tensors_in([call.arguments, call.keywords]), call.proceed()
        outputs = tensors_in(result)
        described = [[describe(tensor) for tensor in tensors] for tensors in (inputs, outputs)]
        lazy = any(tensor.is_lazy for tensor in outputs)
        self.events.append(Event(call.kind, call.name, *described, facts={**facts, "lazy": lazy}))
        return result

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
        self.events.append(Event("graph", type(call.arguments[0]).__name__))
        return super().see_graph(call)

    def first_call(self, graph, call):
        for module in modules_in(graph).values():
            self.keep_initial(tensors_of(module))
        result = super().first_call(graph, call)
        self.without_identity += without_identity(graph)
        self.recomputed = recomputed(graph)
        return result

    def keep_initial(self, tensors):
        """Take a snapshot of each parameter or buffer that has none yet. Collective."""
        with self.pause():
            for tensor in tensors:
                if id(tensor) not in self.initial:
                    self.referenced.append(tensor)
                    copy = tensor.detach().clone()  # as numpy shares a tensor's memory
                    self.initial[id(tensor)] = snapshot(copy)

    def of_kind(self, kind):
        return [event for event in self.events if event.kind == kind]

    @property
    def matmuls(self):
        """[(SBP, ranks, shape) of x, of w, of the product] for each matmul."""
        operands = [(*event.inputs[:2], *event.outputs) for event in self.of_kind("matmul")]
        return [[(*layout(tensor), tensor["shape"]) for tensor in tensors] for tensors in operands]

    @property
    def lazy(self):
        """For each matmul whether it is in a graph."""
        return [event.facts["lazy"] for event in self.of_kind("matmul")]

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
        return [read for read in layouts if read.sbp != "local"]

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


def without_identity(graph):
    """The names of the parameters that a graph with micro-batches reads without identity.

    The last micro-batch's backward may read such a parameter while the optimizer changes it, rarely and silently.
    """
    job = graph._forward_job_proto  # before OneFlow optimizes it
    if job.job_conf.num_gradient_accumulation_steps < 2:
        return []
    parameters = {op.name: op.name for op in job.net.op if op.WhichOneof("op_type") == "variable_conf"}
    unprotected = set()
    for op in job.net.op:
        for lbn in (lbn for lbns in op.user_conf.input.values() for lbn in lbns.s):
            parameter = parameters.get(lbn.split("/")[0])
            if parameter and op.user_conf.op_type_name == "repeat":  # OneFlow adds it, for the micro-batches
                parameters[op.name] = parameter
            elif parameter and op.user_conf.op_type_name != "identity":
                unprotected.add(parameter)
    return sorted(unprotected)


def recomputed(graph):
    """{type of op: number of ops that backward computes again} because of activation checkpointing."""
    ops = [op for op in graph._full_job_proto.net.op if op.name.startswith("Sys-Checkpointing-Fake-Fw-Op_")]
    return dict(Counter(op.user_conf.op_type_name for op in ops))


def per_step(path, **arguments):
    """The bytes that this rank sends in a step of a training recipe. Collective.

    Of 3 steps the first is not counted. A step ends with a call of the graph, or in eager mode with an update of the
    optimizer. AssertionError if not every step can have the same number of these.
    """
    ends = {"graph": [], "update": []}  # kind of call -> the result of `quiet` at the end of each

    def count(call):
        result = call.proceed()
        if call.kind == "graph":
            wait_for(result)
        ends[call.kind].append(quiet())
        return result

    with watching(count, list(ends)):
        call_entry(recipe.load(path), {"steps": 3, **arguments})
    counts = ends["graph"] or ends["update"]
    assert counts and len(counts) % 3 == 0, f"{len(counts)} updates in 3 steps"
    return growth(counts[len(counts) // 3 - 1], counts[-1]) / 2


def main_of(path, arguments):
    """Run a recipe's main with these arguments.

    Returns (exit code, standard output, standard error) of this rank; the code is 1 if main's comparison fails.
    """
    module, out, err = recipe.load(path), io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = [path, *arguments]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            module.main()
    except SystemExit as stop:
        code = stop.code
    except AssertionError:
        code = 1
        err.write(traceback.format_exc())
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()
