"""What a recipe's entry really did on this rank: its tensors and shards, its matmuls, moves and stages."""

import contextlib

import numpy as np
import oneflow as flow

from harness.start import recipe

# Every recipe that ran, with its graph: OneFlow 0.9.0 hangs when one is freed while another is built.
kept = []


def label(sbp):
    """An SBP as the cookbook writes it, "S(0)", "B" or "P"; for a 2-D placement two of them."""
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
    outside = tensor.is_global and flow.env.get_rank() not in tensor.placement.ranks
    shard = None if outside and shard.numel() == 0 else shard.detach().numpy()
    everywhere = set(sbp.split(", ")) == {"B"} and tensor.placement.ranks.size == flow.env.get_world_size()
    return {
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).split(".")[-1],
        "sbp": sbp,
        "device": device,
        "ranks": ranks,
        "shard": shard,
        "value": shard if everywhere else tensor.detach().numpy(),  # what each rank has whole needs no gathering
    }


@contextlib.contextmanager
def replaced(functions):
    """While it lasts, each (owner, name) of this dict is another function."""
    before = {place: getattr(*place) for place in functions}
    try:
        for (owner, name), function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


# Every name by which a script can reach OneFlow's matmul: `@`, the method, the function, and that of nn.Linear.
MATMULS = [(flow, "matmul"), (flow.Tensor, "__matmul__"), (flow.Tensor, "matmul"), (flow._C, "matmul")]
TO_GLOBAL = (flow.Tensor, "to_global")


def bare(graph):
    """The parameters that a graph with micro-batches feeds to another op than identity.

    The last micro-batch's backward may read such a parameter while the optimizer changes it: rarely, and silently.
    """
    job = graph._forward_job_proto  # as it is built, before OneFlow optimizes it
    if job.job_conf.num_gradient_accumulation_steps < 2:
        return []
    parameters = {op.name: op.name for op in job.net.op if op.WhichOneof("op_type") == "variable_conf"}
    found = set()
    for op in job.net.op:
        for name in (name for fed in op.user_conf.input.values() for name in fed.s):
            parameter = parameters.get(name.split("/")[0])
            if parameter and op.user_conf.op_type_name == "repeat":  # OneFlow's own: once for each micro-batch
                parameters[op.name] = parameter
            elif parameter and op.user_conf.op_type_name != "identity":
                found.add(parameter)
    return sorted(found)


@contextlib.contextmanager
def traced(gain=1.0):
    """Record what the ranks do, in a graph while it is built; each matmul's product is scaled by `gain`.

    Yields {"matmuls": [(SBP, ranks and shape of x, of w and of the product)], "lazy": [whether in a graph, by matmul],
    "moves": [(SBP and ranks before and after each to_global, and its grad_sbp if any)],
    "stages": [(number, ranks) of each set_stage],
    "calls": [the class of each nn.Graph that is called], "bare": [see there, of the first call of a graph]}.
    """
    seen = {"matmuls": [], "lazy": [], "moves": [], "stages": [], "calls": [], "bare": []}
    matmul, to_global, set_stage = flow.matmul, flow.Tensor.to_global, flow.nn.graph.GraphModule.set_stage
    call = flow.nn.Graph.__call__

    def recording_matmul(x, w, *arguments, **named):
        product = matmul(x, w, *arguments, **named)
        seen["matmuls"].append([(*where(tensor)[::2], tuple(tensor.shape)) for tensor in (x, w, product)])
        seen["lazy"].append(product.is_lazy)
        return product if gain == 1.0 else product * gain

    def recording_to_global(tensor, *arguments, **named):
        moved = to_global(tensor, *arguments, **named)
        back = named.get("grad_sbp", ())  # what the gradient becomes in front of it
        back = [label(back if isinstance(back, (list, tuple)) else [back])] if back else []
        seen["moves"].append([where(one)[::2] for one in (tensor, moved)] + back)
        return moved

    def recording_set_stage(module, number=None, placement=None):
        seen["stages"].append((number, placement.ranks.tolist()))
        return set_stage(module, number, placement)

    def recording_call(graph, *arguments, **named):
        seen["calls"].append(type(graph).__name__)
        first = not graph._is_compiled
        outputs = call(graph, *arguments, **named)
        seen["bare"] += bare(graph) if first else []
        return outputs

    places = {**dict.fromkeys(MATMULS, recording_matmul), TO_GLOBAL: recording_to_global}
    places.update(
        {(flow.nn.graph.GraphModule, "set_stage"): recording_set_stage, (flow.nn.Graph, "__call__"): recording_call}
    )
    with replaced(places):
        yield seen


def observe(path, gain=1.0, **arguments):
    """Call the entry of the recipe at `path` on this rank; returns {"tensors": {name: held}} and what `traced` saw."""
    module = recipe.load(path)
    kept.append(module)
    with traced(gain) as seen:
        tensors = module.run(**arguments)
    return {"tensors": {name: held(tensor) for name, tensor in tensors.items()}, **seen}


def returned(path, name):
    """Call the test `name` of a file, made by harness.testing.on_ranks, on this rank; returns what it returned as data:
    {name: `held` of the tensor, "wanted_sbp" as `label` writes it, "wanted": array}."""
    found = {}
    for key, (tensor, sbp, wanted) in getattr(recipe.load(path), name).on_rank().items():
        sbps = sbp if isinstance(sbp, (tuple, list)) else (sbp,)
        found[key] = {**held(tensor), "wanted_sbp": label(sbps), "wanted": np.asarray(wanted)}
    return found
