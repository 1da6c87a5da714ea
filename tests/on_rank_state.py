"""What tests/test_state.py calls on the ranks of a pool."""

import os
import pathlib

import numpy as np
import oneflow as flow

from harness import recipe
from harness.ledger import sent_by
from harness.observe import held, kept, replaced


def put(path, folder, step=3, dtype="float32", drop=(), **shapes):
    """Save what the eager checkpoint.py would, of these shapes by name, as zeros of another dtype, or without keys."""
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))

    def zeros(shape):
        return flow.zeros(*shape, dtype=getattr(flow, dtype), placement=ranks, sbp=flow.sbp.broadcast)

    module = {name: zeros(shape) for name, shape in shapes.items()}
    state = {i: {"momentum_buf": zeros(shape)} for i, shape in enumerate(shapes.values())}
    state = {"module": module, "optimizer": {"state": state}}
    recipe.load(path).save({name: one for name, one in state.items() if name not in drop}, folder, step)


def die_while_saving(path, moment, **arguments):
    """Run checkpoint.py; rank 0 dies at this moment of saving: with half of a file written, or before it is named."""

    def half(file, data):
        with open(file, "wb") as opened:
            opened.write(data[: len(data) // 2])
        os._exit(9)

    place, function = {
        "half a file": ((pathlib.Path, "write_bytes"), half),
        "not named": ((os, "replace"), lambda *_: os._exit(9)),
    }[moment]
    with replaced({place: function} if flow.env.get_rank() == 0 else {}):
        recipe.load(path).run(**arguments)


def load_unchecked(folder):
    """flow.load alone. Rank 0 says what was raised; the others say what they got."""
    try:
        return sorted(flow.load(folder, global_src_rank=0))
    except Exception as error:
        return type(error).__name__


def load_onto(path, folder, ranks, w0, w1):
    """Load an eager checkpoint into a module in S(0) on these ranks, by the same calls as the recipe; what it holds."""
    module = recipe.load(path)
    where = {"placement": flow.placement("cpu", ranks), "sbp": flow.sbp.split(0)}
    model = module.Sharded(flow.zeros(*w0, **where), flow.zeros(*w1, **where))
    update = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = flow.load(folder, global_src_rank=0)
    model.load_state_dict(state["module"])
    update.load_state_dict(state["optimizer"])
    state = {"module": model.state_dict(), "optimizer": update.state_dict()}
    return {name: held(tensor) for name, tensor in module.by_name(state, False).items()}


def bytes_to_save_and_load(path, folder, sbp, rows, columns):
    """What this rank writes and sends to save one tensor of this SBP, and to load it into a parameter of that SBP."""
    module = recipe.load(path)
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    parameter = flow.nn.Module()
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    parameter.w = flow.nn.Parameter(flow.tensor(values, placement=ranks, sbp=module.SBPS[sbp]))
    kept.append(parameter)
    saved = sent_by(lambda: module.save(parameter.state_dict(), folder, 1))[1]
    state, read = sent_by(lambda: flow.load(f"{folder}/1", global_src_rank=0))
    loaded = sent_by(lambda: parameter.load_state_dict(state))[1]
    return saved, read + loaded


def gradient_of_gathered(rows, grad_sbp):
    """The SBP and the rows that this rank has of the gradient of a split tensor that is summed up whole on rank 0."""
    ranks, first = flow.placement("cpu", list(range(flow.env.get_world_size()))), flow.placement("cpu", [0])
    out = flow.ones(rows, 2, placement=ranks, sbp=flow.sbp.split(0), requires_grad=True)
    seen = {}
    middle = out * 2
    middle.register_hook(lambda gradient: seen.update(held(gradient)))
    named = {"grad_sbp": flow.sbp.split(0)} if grad_sbp else {}
    middle.to_global(placement=first, sbp=flow.sbp.broadcast, **named).sum().backward()
    return seen["sbp"], seen["ranks"], seen["shard"].shape[0]


def gradients_between(path, **arguments):
    """The SBP and ranks of the gradient of each tensor in one eager step of replicate_scatter_gather.py, by place."""
    module, seen = recipe.load(path), {}
    forward = module.StepByStep.forward

    def hooked(self, x, y):
        loss, *between = forward(self, x, y)
        for place, tensor in enumerate(between[1:]):
            tensor.register_hook(lambda gradient, place=place: seen.update({place: held(gradient)}))
        return (loss, *between)

    module.StepByStep.forward = hooked
    module.run(steps=1, **arguments)
    return [(seen[place]["sbp"], seen[place]["ranks"]) for place in sorted(seen)]
