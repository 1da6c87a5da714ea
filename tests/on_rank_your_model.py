"""What the tests of the chapter on your own model call on the ranks of a pool."""

import os
import pathlib

import numpy as np
import oneflow as flow

from harness.measure.calls import replaced
from harness.measure.memory import memory_size
from harness.measure.sent import sent_by
from harness.start import recipe


def loaded(path, weights, ranks=None):
    """Load PyTorch's weights and train: logits, losses, how many numbers this rank reads from the file and holds."""
    module, sizes = recipe.load(path), []
    to_float32 = module.to_float32

    def counting(array):
        sizes.append(array.size)
        return to_float32(array)

    module.to_float32 = counting
    placement = flow.placement("cpu", ranks) if ranks else flow.placement.all("cpu")
    model, logits, losses = module.train(placement, weights=weights)
    return {
        "logits": logits,
        "losses": np.array(losses),
        "read": sum(sizes),
        "held": sum(w.to_local().numel() for w in model.parameters()),
    }


def bytes_to_load(path, hidden_size):
    """The bytes of all replicated parameters of a model, and those that this rank sends to load it."""
    module = recipe.load(path)
    model = module.Classifier(hidden_size=hidden_size)
    arrays = {name: w.numpy() for name, w in model.named_parameters()}
    replicated = sum(
        4 * w.numel() for name, w in model.named_parameters() if not name.endswith(tuple(module.SPLIT_DIMS))
    )
    _, sent = sent_by(lambda: module.load(model, arrays, flow.placement.all("cpu")))
    return replicated, sent


def refused(path, weights):
    """The error of open_safetensors or load for weights of another model, and whether the model is unchanged."""
    module = recipe.load(path)
    model = module.Classifier()
    before = {name: w.numpy() for name, w in model.named_parameters()}
    try:
        arrays = weights if isinstance(weights, dict) else module.open_safetensors(weights)
        module.load(model, arrays, flow.placement.all("cpu"))
    except ValueError as error:
        unchanged = all(not w.is_global and (w.numpy() == before[name]).all() for name, w in model.named_parameters())
        return str(error), unchanged
    return None, None


def saved(path, weights, target, fails=False):
    """Train from weights and save; returns the new weights. fails: whether the disk is full when the file is named."""
    module = recipe.load(path)
    model, _, _ = module.train(flow.placement.all("cpu"), weights=weights)

    def full(*_):
        raise OSError("No space left on device")

    try:
        with replaced({(os, "replace"): full} if fails else {}):
            module.save_safetensors(model, pathlib.Path(target))
    except OSError:
        flow.comm.barrier()  # which the others wait in
    return {name: w.numpy() for name, w in model.named_parameters()}


def losses_of(path, **arguments):
    """The losses of a training by tensor_parallel_module.py with a mesh of `data` ranks, and those on one rank."""
    module, data = recipe.load(path), arguments.pop("data")
    n = flow.env.get_world_size()
    _, losses = module.train(module.placements("cpu", n, data), **arguments)
    _, alone = module.train(module.placements("cpu", 1), **arguments)
    return np.array(losses), np.array(alone)


def growth(path, num_layers, hidden_size, at_once):
    """The peak of memory that this rank gains while it makes a sharded model, and what the shards take, in bytes.

    at_once: whether all blocks are made before the first one is split.
    """
    module, ranks = recipe.load(path), flow.placement.all("cpu")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = memory_size("VmRSS")
    if at_once:
        model = module.shard(module.Classifier(hidden_size=hidden_size, num_layers=num_layers), ranks)
    else:
        model = module.make_model(ranks, hidden_size, num_layers)
    flow._oneflow_internal.eager.Sync()
    held = sum(4 * w.to_local().numel() for w in model.parameters())
    return memory_size("VmHWM") - before, held
