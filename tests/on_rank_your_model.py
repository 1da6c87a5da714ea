"""What the tests of the chapter on your own model call on the ranks of a pool."""

import contextlib
import io
import os
import pathlib
import sys

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.calls import replaced
from oneflow_cookbook.measure.rank_memory import memory, memory_size
from oneflow_cookbook.measure.script import run_script
from oneflow_cookbook.measure.sent import sent_by
from oneflow_cookbook.measure.tensors import layout_of
from oneflow_cookbook.start import recipe


def printed(path):
    """What a script prints, also as errors, run from its folder; the next one imports modules of its own folder."""
    out, before, folder = io.StringIO(), os.getcwd(), os.path.dirname(path)
    os.chdir(folder)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        run_script(path)
    os.chdir(before)
    forget(folder)
    return out.getvalue()


def forget(folder):
    """Let the next script import modules of its own folder."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]


def memory_of(path):
    held = memory(path)
    forget(os.path.dirname(path))
    return held


def recurrent_outputs(path, kind):
    """(local, global) outputs of nn.LSTM or the like without an initial state, for a batch that each rank has whole."""
    module, x = recipe.load(path), np.random.RandomState(0).rand(4, 5, 4).astype(np.float32)
    layer = getattr(flow.nn, kind)(4, 6, batch_first=True).to("cpu")
    for parameter in layer.parameters():
        parameter.data = flow.tensor(np.random.RandomState(1).rand(*parameter.shape).astype(np.float32))
    alone = layer(flow.tensor(x))[0].numpy()
    ranks = flow.placement.all("cpu")
    out, _ = module.lay_out(layer, ranks, {})(flow.tensor(x, placement=ranks, sbp=flow.sbp.broadcast))
    return alone, out.numpy()


def loaded(path, weights, ranks=None):
    """Load PyTorch's weights and train: logits, losses, how many numbers this rank reads from the file and holds."""
    module, sizes = recipe.load(path), []
    copy = module.copy

    def counting(array, local):
        sizes.append(array.size)
        copy(array, local)

    module.copy = counting
    placement = flow.placement("cpu", ranks) if ranks else flow.placement.all("cpu")
    model, logits, losses = module.train(placement, weights=weights)
    return {
        "logits": logits,
        "losses": np.array(losses),
        "read": sum(sizes),
        "held": sum(w.to_local().numel() for w in model.parameters()),
    }


def held_of_a_global_model(path):
    """How many elements of each parameter and buffer this rank holds, by what the model was when it was laid out."""
    module, n, held = recipe.load(path), flow.env.get_world_size(), {}
    everywhere, rank_0 = flow.placement.all("cpu"), flow.placement("cpu", [0])
    layouts = {"local": None, "B": (everywhere, flow.sbp.broadcast), "S(0) on rank 0": (rank_0, flow.sbp.split(0))}
    for name, layout in layouts.items():
        model = module.Classifier()
        model.head.register_buffer("scale", flow.ones(8))
        if layout:
            model.to_global(*layout)
        if hasattr(module, "shard"):
            module.shard(model, flow.placement.all("cpu"))
        else:
            module.assign_stages(model, module.parts_of(model), module.placements("cpu", n))
        tensors = [*model.named_parameters(), *model.named_buffers()]
        held[name] = {key: tensor.to_local().numel() for key, tensor in tensors}
    return held


def sharded_again(path):
    """The bytes that this rank sends when a model is sharded a second time, and its part of a buffer that was split."""
    module, everywhere = recipe.load(path), flow.placement.all("cpu")
    model = module.shard(module.Classifier(), everywhere)
    split = flow.ones(8, placement=everywhere, sbp=flow.sbp.split(0))
    model.head.register_buffer("scale", split)
    _, sent = sent_by(lambda: module.shard(model, everywhere))
    return sent, model.head.scale.to_local().numel()


def bytes_to_load_and_save(path, hidden_size, target):
    """The bytes of the parameters by SBP, and those that this rank sends to load a split model and to save it."""
    module = recipe.load(path)
    model = module.lay_out(module.Classifier(hidden_size=hidden_size), flow.placement.all("cpu"))
    arrays = {name: w.numpy() for name, w in model.state_dict().items()}
    by_sbp = dict.fromkeys(("B", "S(0)", "S(1)"), 0)
    for w in model.parameters():
        by_sbp[layout_of(w).sbp] += 4 * w.numel()
    _, loading = sent_by(lambda: module.load(model, arrays))
    _, saving = sent_by(lambda: module.save_safetensors(model, pathlib.Path(target)))
    return by_sbp, loading, saving


def refused(path, weights):
    """The error of open_safetensors or load for weights of another model, and whether the model is unchanged."""
    module = recipe.load(path)
    model = module.Classifier()
    before = {name: w.numpy().copy() for name, w in model.named_parameters()}  # numpy() may share the memory
    try:
        module.load(model, weights)
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
