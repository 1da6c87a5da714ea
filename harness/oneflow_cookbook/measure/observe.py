"""Run a recipe on this rank: its tensors and shards, its matmuls, moves, reads, stages and graph calls."""

from oneflow_cookbook.measure.entry import call_entry, entry_of
from oneflow_cookbook.measure.frames import Frames, arrays_by_name, optimizer_state, parameters_by_name, tensors_by_name
from oneflow_cookbook.measure.recorder import Recorder
from oneflow_cookbook.measure.tensors import snapshot
from oneflow_cookbook.start import recipe

RECORDED = ("matmuls", "lazy", "moves", "reads", "stages", "graphs", "calls", "without_identity", "recomputed")


def observe(path, matmul_scale=1.0, names=None, **arguments):
    """Call `train` or `run` of the recipe at `path` on all ranks. Collective.

    matmul_scale: factor of each matmul. names: of the tensors to read; None: all. arguments: of the entry.

    Returns {"tensors": {name: snapshot}, "arrays": {name: numpy array}, "in_graph": {name: (SBP, ranks, shape)} of the
    tensors inside a graph, which have no value}, and the attributes RECORDED of a Recorder.
    """
    recorder = Recorder(matmul_scale)
    tensors, seen = observed(path, recorder, **arguments)
    selected = {name: value for name, value in tensors.items() if names is None or name in names}
    values = {name: value if isinstance(value, dict) else snapshot(value) for name, value in selected.items()}
    events = {name: getattr(recorder, name) for name in RECORDED}
    return {"tensors": values, "arrays": arrays_by_name(seen.outer), "in_graph": seen.in_graph, **events}


def observed(path, recorder, **arguments):
    """Call the entry of a recipe while `recorder` records.

    Returns ({name: tensor, or its snapshot before the first step}, Frames). A parameter w is "w" before and "new w"
    after training; its gradient is "w grad", its momentum "w momentum_buf".
    """
    module = recipe.load(path)
    seen = Frames(module.__file__, entry_of(module).__code__)
    with recorder.recording(), seen.watching():
        call_entry(module, arguments)
    return by_name(seen, recorder), seen


def by_name(seen, recorder):
    """The tensors of a recipe by name, from its frames and what was recorded."""
    parameters = parameters_by_name(seen.outer)
    tensors = {**tensors_by_name(seen.inner), **tensors_by_name(seen.outer)}
    tensors.update(optimizer_state(seen.outer, parameters))
    for name, parameter in parameters.items():
        tensors[f"new {name}"] = parameter
        tensors[name] = recorder.initial.get(id(parameter), parameter)
    for name, tensor in {**tensors_by_name(seen.outer), **parameters}.items():
        gradient = recorder.gradients.get(id(tensor))
        if gradient is None and tensor.is_leaf and tensor.requires_grad and not recorder.calls:
            gradient = tensor.grad
        if gradient is not None:
            tensors[f"{name} grad"] = gradient
    return tensors
