"""Describe a tensor as plain data: its layout, its shape, this rank's shard, its value.

Only functions import OneFlow, because sent.py is also used without it.
"""

from oneflow_cookbook.measure.sbp import Layout, label


def layout_of(tensor):
    """The Layout of a tensor."""
    return Layout(label(tensor.sbp), tensor.placement.ranks.tolist()) if tensor.is_global else Layout("local", [])


def describe(tensor):
    """{"sbp", "ranks", "shape", "item": bytes of an element, "id"} of a tensor."""
    item = tensor.element_size()
    return {**layout_of(tensor)._asdict(), "shape": tuple(tensor.shape), "item": item, "id": id(tensor)}


def is_whole(tensor):
    """Whether every rank holds the whole value, so that reading it needs no other rank."""
    if not tensor.is_global:
        return True
    import oneflow as flow

    return set(label(tensor.sbp).split(", ")) == {"B"} and tensor.placement.ranks.size == flow.env.get_world_size()


def snapshot(tensor):
    """`describe`, "dtype", "device", "shard": this rank's, and "value": the whole tensor, both in numpy.

    Collective, because it reads the value: every rank calls this for the same tensors in the same order.
    """
    import oneflow as flow

    shard = tensor.to_local() if tensor.is_global else tensor
    outside = tensor.is_global and flow.env.get_rank() not in tensor.placement.ranks
    shard = None if outside and not shard.numel() else shard.detach().numpy()
    return {
        **describe(tensor),
        "dtype": str(tensor.dtype).split(".")[-1],
        "device": (tensor.placement if tensor.is_global else tensor.device).type,
        "shard": shard,
        "value": shard if is_whole(tensor) else tensor.detach().numpy(),
    }


def tensors_in(values):
    """All tensors in nested lists, tuples and dicts."""
    import oneflow as flow

    if isinstance(values, flow.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]
