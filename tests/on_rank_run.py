"""What the tests of training_run.py call on the ranks of a pool."""

import numpy as np
import oneflow as flow

from harness.measure.entry import call_entry
from harness.measure.frames import optimizer_state
from harness.measure.observe import RECORDED, observed
from harness.measure.recorder import Recorder
from harness.measure.tensors import snapshot
from harness.start import recipe


def trained(path, **arguments):
    """Train training_run.py; returns what `observe` does, with its weights before and after ("new") and moments."""
    recorder = Recorder()
    _, seen = observed(path, recorder, **arguments)
    model = seen.outer["model"]
    parameters = dict(model.named_parameters())
    moments = optimizer_state({"optimizer": seen.outer["optimizer"]}, parameters)
    tensors = {name: snapshot(moment) for name, moment in moments.items()}
    for name, parameter in parameters.items():
        tensors[name] = recorder.initial[id(parameter)]
        tensors[f"new {name}"] = snapshot(parameter)
    return {
        "tensors": tensors,
        "arrays": {name: np.array(seen.outer[name]) for name in ("losses", "held_out")},
        "in_graph": {},
        **{name: getattr(recorder, name) for name in RECORDED},
    }


def rows_read(path, **arguments):
    """The indices of the samples that this rank reads in a run, in order."""
    module, read = recipe.load(path), []
    sample = module.sample

    def reading(index, config):
        read.append(int(index))
        return sample(index, config)

    module.sample = reading
    call_entry(module, arguments)
    return read


def refused(path, samples=None, **arguments):
    """The error that training_run.py ends with. samples: an id and a target, which all positions then have."""
    module = recipe.load(path)
    if samples:
        module.sample = lambda index, config: [np.full(config.seq_len, number) for number in samples]
    try:
        call_entry(module, arguments)
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def loaded(folder):
    """What is in a checkpoint: {name: array, number or text}."""
    flat = {}

    def visit(name, value):
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)) and name.startswith(".optimizer"):
            for i, item in enumerate(value):
                visit(f"{name}.{i}", item)
        else:
            flat[name] = value.numpy() if isinstance(value, flow.Tensor) else value

    visit("", flow.load(folder, global_src_rank=0))
    return flat
