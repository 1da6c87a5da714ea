"""What a recipe's entry really did on this rank: its tensors, its shards, its matmuls and its pipeline stages."""
import contextlib

import oneflow as flow

from harness import recipe

# Every recipe that ran, with its graph: one that the garbage collector frees while another is built hangs OneFlow 0.9.0.
kept = []


def label(sbp):
    """An SBP as the cookbook writes it, "S(0)", "B" or "P"; several, for a placement of several dimensions, by comma."""
    names = {str(flow.sbp.broadcast): "B", str(flow.sbp.partial_sum): "P"}
    return ", ".join(names.get(str(one)) or f"S({str(one).split('=')[1].rstrip(')')})" for one in sbp)


def where(tensor):
    """SBP, device type and ranks of a global tensor; of a local one "local", its device type and no ranks."""
    if not tensor.is_global:
        return ("local", tensor.device.type, [])
    return (label(tensor.sbp), tensor.placement.type, tensor.placement.ranks.tolist())


def held(tensor):
    """A tensor as this rank has it: global shape, dtype, SBP, placement, its own shard and the full value (numpy).

    The full value of a global tensor is collective: every rank calls this for the same tensors in the same order.
    """
    sbp, device, ranks = where(tensor)
    shard = tensor.to_local() if tensor.is_global else tensor
    outside = tensor.is_global and flow.env.get_rank() not in ranks
    return {
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).split(".")[-1],
        "sbp": sbp,
        "device": device,
        "ranks": ranks,
        "shard": None if outside and shard.numel() == 0 else shard.detach().numpy(),
        "value": tensor.detach().numpy(),
    }


@contextlib.contextmanager
def traced(gain=1.0):
    """Record every matmul and every pipeline stage, in graphs while they are built; each matmul is scaled by `gain`.

    Yields {"matmuls": [(SBP and ranks of both operands and of the product)], "stages": [(number, ranks)]}.
    """
    seen = {"matmuls": [], "stages": []}
    matmul, operator, method = flow.matmul, flow.Tensor.__matmul__, flow.Tensor.matmul
    set_stage = flow.nn.graph.GraphModule.set_stage

    def recording_matmul(x, w, *arguments, **named):
        product = matmul(x, w, *arguments, **named)
        seen["matmuls"].append([(*where(tensor)[::2], tuple(tensor.shape)) for tensor in (x, w, product)])
        return product if gain == 1.0 else product * gain

    def recording_set_stage(module, number=None, placement=None):
        seen["stages"].append((number, placement.ranks.tolist()))
        return set_stage(module, number, placement)

    flow.matmul = flow.Tensor.__matmul__ = flow.Tensor.matmul = recording_matmul
    flow.nn.graph.GraphModule.set_stage = recording_set_stage
    try:
        yield seen
    finally:
        flow.matmul, flow.Tensor.__matmul__, flow.Tensor.matmul = matmul, operator, method
        flow.nn.graph.GraphModule.set_stage = set_stage


def observe(path, gain=1.0, **arguments):
    """Call the entry of the recipe at `path` on this rank; returns {"tensors": {name: held}, "matmuls", "stages"}."""
    module = recipe.load(path)
    kept.append(module)
    with traced(gain) as seen:
        tensors = module.run(**arguments)
    return {"tensors": {name: held(tensor) for name, tensor in tensors.items()}, **seen}
