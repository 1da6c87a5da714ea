"""Name the tensors of a recipe after its variables, read from the frames of its functions as they return."""

import contextlib
import re
import sys
from collections import Counter

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.graph import modules_in
from oneflow_cookbook.measure.tensors import layout_of

STATE_OF_GRAPH = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buf"}  # graph's name -> optimizer's name


@contextlib.contextmanager
def returns_of(path, handler):
    """Inside it, handler(frame) is called when the file at `path`, or a function of it, returns."""

    def look(frame, event, _):
        if event == "return" and frame.f_code.co_filename == path:
            handler(frame)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


class Frames:
    """Collects the variables of the functions in the file at `path`, when they return.

    outer: {name: value} of the function whose code is `entry`, at its last return; inner: of all other functions;
    in_graph: {name: (SBP, ranks, shape)} of the tensors in a graph that is being built, which have no value.
    """

    def __init__(self, path, entry):
        self.path, self.entry = path, entry
        self.outer, self.inner, self.in_graph = {}, {}, {}

    def watching(self):
        """Inside it, collect variables."""
        return returns_of(self.path, self.collect)

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


def modules_of(variables):
    """{variable: nn.Module} of the outermost modules, each once, under its first variable."""
    modules = {name: value for name, value in variables.items() if isinstance(value, flow.nn.Module)}
    excluded = {id(part) for module in modules.values() for part in list(module.modules())[1:]}
    outermost = {}
    for name, module in modules.items():
        if id(module) not in excluded:
            outermost[name] = module
            excluded.add(id(module))
    return outermost


def parameters_by_name(variables):
    """{name: parameter or buffer}: its path in the module; of several modules, preceded by the module's variable."""
    modules, named = modules_of(variables), {}
    for variable, module in modules.items():
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            named[short(path) if len(modules) == 1 else f"{variable}.{short(path)}"] = tensor
    return named


def short(path):
    """The path of a parameter as recipes call it: "w0" for "0.w", the w of part 0 of a Sequential."""
    return re.sub(r"^(?:\w+\.)?(\d+)\.(\w+)$", r"\2\1", path)


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
