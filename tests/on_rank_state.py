"""What tests of recipes with checkpoints call on the ranks of a pool."""

import os
import pathlib

import numpy as np
import oneflow as flow

from harness.measure.calls import replaced
from harness.measure.entry import call_entry
from harness.measure.sent import sent_by
from harness.measure.tensors import snapshot
from harness.start import recipe


def die(path, moment, step, **arguments):
    """Train; rank 0 dies when it saves this step: with half of a file, or before it is named."""
    module = recipe.load(path)
    save = module.save

    def half(file, data):
        with open(file, "wb") as opened:
            opened.write(data[: len(data) // 2])
        os._exit(9)

    def dying(state, folder, now):
        if now < step:
            return save(state, folder, now)
        place, function = {
            "half a file": ((pathlib.Path, "write_bytes"), half),
            "not named": ((os, "replace"), lambda *_: os._exit(9)),
        }[moment]
        with replaced({place: function}):
            save(state, folder, now)

    if flow.env.get_rank() == 0:
        module.save = dying
    call_entry(module, arguments)


def after_saving(path, folder):
    """The files in the folder that this rank has left open when save returns."""
    w = flow.ones(4, 2, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    recipe.load(path).save({"w": w}, folder, step=3)
    opened = [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")]
    return [name for name in opened if name.startswith(folder)]


def saved_again(path, folder):
    """Save twice under the same name: the error of the second save on this rank, and the sum of what is loaded then."""
    module, ranks, raised = recipe.load(path), flow.placement.all("cpu"), None
    for value in (1.0, 2.0):
        try:
            module.save({"w": flow.full((4, 2), value, placement=ranks, sbp=flow.sbp.split(0))}, folder, step=3)
        except OSError as error:
            raised = os.path.basename(error.filename2)
    step, state = module.load_latest(folder)
    return raised, step, state["w"].numpy().sum()


def bytes_to_save_and_load(path, folder, sbp, rows, columns):
    """The bytes that this rank sends to save a tensor of this SBP, and to load it into a parameter of the same SBP."""
    module = recipe.load(path)
    parameter = flow.nn.Module()
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    parameter.w = flow.nn.Parameter(flow.tensor(values, placement=flow.placement.all("cpu"), sbp=module.SBPS[sbp]))
    saved = sent_by(lambda: module.save(parameter.state_dict(), folder, step=1))[1]
    (_, state), read = sent_by(lambda: module.load_latest(folder))
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
