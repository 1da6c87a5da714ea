"""What a recipe's `run` does on this rank: its tensors and shards, its matmuls, moves, stages and calls of graphs."""

import contextlib
from unittest import mock

import numpy as np
import oneflow as flow

from harness.measure.graph import without_identity
from harness.measure.sbp import label
from harness.measure.tensors import layout_of, snapshot
from harness.start import recipe

# Every name by which a script can reach OneFlow's matmul: `@`, the method, the function, and that of nn.Linear.
MATMULS = [(flow, "matmul"), (flow.Tensor, "__matmul__"), (flow.Tensor, "matmul"), (flow._C, "matmul")]
TO_GLOBAL = (flow.Tensor, "to_global")


@contextlib.contextmanager
def replaced(functions):
    """Inside it, each (owner, attribute) of this dict has another value."""
    with contextlib.ExitStack() as stack:
        for (owner, name), function in functions.items():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextlib.contextmanager
def recorded(gain=1.0):
    """Record OneFlow's calls, in a graph while it is built; the product of each matmul is scaled by `gain`.

    Yields {"matmuls": [(SBP, ranks, shape) of x, of w and of the product], "lazy": [whether in a graph, by matmul],
    "moves": [the Layout before and after each to_global, and its grad_sbp if any], "stages": [(number, ranks) of each
    set_stage], "calls": [the class of each nn.Graph that is called], "without_identity": see graph.py}.
    """
    seen = {"matmuls": [], "lazy": [], "moves": [], "stages": [], "calls": [], "without_identity": []}
    stage, graph = (flow.nn.graph.GraphModule, "set_stage"), (flow.nn.Graph, "__call__")
    matmul, to_global, set_stage, call = (getattr(*place) for place in (MATMULS[0], TO_GLOBAL, stage, graph))

    def recording_matmul(x, w, *arguments, **named):
        product = matmul(x, w, *arguments, **named)
        seen["matmuls"].append([(*layout_of(tensor), tuple(tensor.shape)) for tensor in (x, w, product)])
        seen["lazy"].append(product.is_lazy)
        return product if gain == 1.0 else product * gain

    def recording_to_global(tensor, *arguments, **named):
        moved = to_global(tensor, *arguments, **named)
        backward = [label(named["grad_sbp"])] if "grad_sbp" in named else []
        seen["moves"].append([layout_of(tensor), layout_of(moved), *backward])
        return moved

    def recording_set_stage(module, number=None, placement=None):
        seen["stages"].append((number, placement.ranks.tolist()))
        return set_stage(module, number, placement)

    def recording_call(graph, *arguments, **named):
        seen["calls"].append(type(graph).__name__)
        first = not graph._is_compiled
        outputs = call(graph, *arguments, **named)
        seen["without_identity"] += without_identity(graph) if first else []
        return outputs

    recording = {TO_GLOBAL: recording_to_global, stage: recording_set_stage, graph: recording_call}
    with replaced({**dict.fromkeys(MATMULS, recording_matmul), **recording}):
        yield seen


def observe(path, gain=1.0, **arguments):
    """Call `run` of the recipe at `path`; returns {"tensors": {name: snapshot}} and what `recorded` saw."""
    module = recipe.load(path)
    with recorded(gain) as seen:
        tensors = module.run(**arguments)
    return {"tensors": {name: snapshot(tensor) for name, tensor in tensors.items()}, **seen}


def returned(path, name):
    """Call the test `name` of a file, made by harness.testing.on_ranks, on this rank; returns what it returned as data:
    {name: `snapshot` of the tensor, "wanted_sbp" as `label` writes it, "wanted": array}."""
    tensors = getattr(recipe.load(path), name).on_rank()
    return {
        key: {**snapshot(tensor), "wanted_sbp": label(sbp), "wanted": np.asarray(wanted)}
        for key, (tensor, sbp, wanted) in tensors.items()
    }
