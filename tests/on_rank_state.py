"""What tests of recipes with checkpoints call on the ranks of a pool."""

import os
import pathlib

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.calls import replaced
from oneflow_cookbook.measure.entry import call_entry
from oneflow_cookbook.measure.sent import sent_by
from oneflow_cookbook.measure.tensors import snapshot
from oneflow_cookbook.start import recipe


def die(path, moment, step, **arguments):
    """Train; rank 0 dies when it saves this step: with half of a file, or before it is named."""
    module = recipe.load(path)
    save = module.Checkpoints.save

    def half(file, data):
        with open(file, "wb") as opened:
            opened.write(data[: len(data) // 2])
        os._exit(9)

    def dying(self, state, now):
        if now < step:
            return save(self, state, now)
        place, function = {
            "half a file": ((pathlib.Path, "write_bytes"), half),
            "not named": ((os, "replace"), lambda *_: os._exit(9)),
        }[moment]
        with replaced({place: function}):
            save(self, state, now)

    if flow.env.get_rank() == 0:
        module.Checkpoints.save = dying
    call_entry(module, arguments)


def left_open(path, folder):
    """The files in the folder that this rank has open after a save, and when the object is gone."""

    def opened():
        paths = [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")]
        return [os.path.basename(path) for path in paths if path.startswith(folder)]

    checkpoints = recipe.load(path).Checkpoints(folder, 0, {})
    w = flow.ones(4, 2, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    checkpoints.save({"w": w}, step=3)
    while_saving = opened()
    del checkpoints
    return while_saving, opened()


def bytes_to_save_and_load(path, folder, sbp, rows, columns):
    """The bytes that this rank sends to save a tensor of this SBP, and to load it into a parameter of the same SBP."""
    module = recipe.load(path)
    parameter = flow.nn.Module()
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    parameter.w = flow.nn.Parameter(flow.tensor(values, placement=flow.placement.all("cpu"), sbp=module.SBPS[sbp]))
    checkpoints = module.Checkpoints(folder, 0, {})
    saved = sent_by(lambda: checkpoints.save(parameter.state_dict(), step=1))[1]
    state, read = sent_by(lambda: flow.load(f"{folder}/{checkpoints.newest()}", global_src_rank=0))
    loaded = sent_by(lambda: parameter.load_state_dict(state))[1]
    return saved, read + loaded


def gradient_of_gathered(rows, grad_sbp):
    """A split tensor is gathered on rank 0 and summed: the SBP of its gradient, and how many rows this rank has."""
    first = flow.placement("cpu", [0])
    out = flow.ones(rows, 2, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0), requires_grad=True)
    seen = {}
    middle = out * 2
    middle.register_hook(lambda gradient: seen.update(snapshot(gradient)))
    named = {"grad_sbp": flow.sbp.split(0)} if grad_sbp else {}
    middle.to_global(placement=first, sbp=flow.sbp.broadcast, **named).sum().backward()
    return seen["sbp"], seen["ranks"], seen["shard"].shape[0]
