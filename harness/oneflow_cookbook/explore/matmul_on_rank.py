"""Multiply two matrices in pairs of SBPs, and convert between SBPs: what this rank holds, and what it sends."""

import functools

import numpy as np
import oneflow as flow

from oneflow_cookbook.explore.shards import shard
from oneflow_cookbook.measure.graph import FunctionGraph
from oneflow_cookbook.measure.sbp import NAMES, Layout, label, label_of_proto, sbp_of
from oneflow_cookbook.measure.sent import sent_by


def sbps_of(names):
    """The objects of flow.sbp for a name such as "S(0)" or, on a mesh, "S(0), B"."""
    return [sbp_of(name) for name in names.split(", ")]


def global_tensor(value, sbp, ranks):
    """A global tensor with this value, made of what each rank holds of it."""
    part = shard(np.array(value), Layout(sbp, ranks), flow.env.get_rank())
    local = flow.tensor(part.astype("float32"))
    return local.to_global(placement=flow.placement("cpu", ranks), sbp=sbps_of(sbp))


def products(pairs, ranks, values, targets, graph):
    """Multiply x and w in each pair of SBPs, and move out to each of the SBPs `targets`. Collective.

    values: x and w as lists of rows of whole numbers; graph: whether one nn.Graph does it all.
    Returns {pair: {"x", "w": shard, "out": (SBP, shard), "to": {SBP: shard}, "inputs": see `inputs_of`, in a graph}}.
    """
    x, w = (
        {sbp: global_tensor(value, sbp, ranks) for sbp in dict.fromkeys(sbps)}
        for value, sbps in zip(values, zip(*pairs))
    )

    def multiply(*tensors):
        xs, ws = dict(zip(x, tensors)), dict(zip(w, tensors[len(x) :]))
        outs = [flow.matmul(xs[x_sbp], ws[w_sbp]) for x_sbp, w_sbp in pairs]
        return [[out, *(out.to_global(sbp=sbps_of(new)) for new in targets)] for out in outs]

    function = FunctionGraph(multiply) if graph else multiply
    results = function(*x.values(), *w.values())
    inputs = inputs_of(function) if graph else {}
    return {
        (x_sbp, w_sbp): {
            "x": x[x_sbp].to_local().numpy(),
            "w": w[w_sbp].to_local().numpy(),
            "out": (label(out.sbp), out.to_local().numpy()),
            "to": {new: tensor.to_local().numpy() for new, tensor in zip(targets, moved)},
            "inputs": inputs.get((x_sbp, w_sbp)),
        }
        for (x_sbp, w_sbp), (out, *moved) in zip(pairs, results)
    }


def bytes_sent(pairs, ranks, shapes, graph):
    """Multiply matrices of these shapes in each pair of SBPs, each pair by itself. Collective.

    Returns {pair: (SBP of out, bytes that this rank sent, see `inputs_of`, in a graph)}.
    """
    placement, measured = flow.placement("cpu", ranks), {}
    for pair in pairs:
        x, w = (flow.ones(*shape, placement=placement, sbp=sbps_of(sbp)) for shape, sbp in zip(shapes, pair))
        function = compiled(flow.matmul, x, w) if graph else flow.matmul
        out, sent = sent_by(lambda function=function, x=x, w=w: function(x, w))
        measured[pair] = label(out.sbp), sent, inputs_of(function).get(pair) if graph else None
    return measured


def conversions(shape, source, target, graph):
    """Convert a tensor of this shape from each SBP on the ranks `source` to each on the ranks `target`. Collective.

    Returns {(old SBP, new SBP): bytes that this rank sent}.
    """
    ranks, measured = flow.placement("cpu", target), {}
    for old in NAMES:
        x = flow.ones(*shape, placement=flow.placement("cpu", source), sbp=sbp_of(old))
        for new in NAMES:
            convert = functools.partial(flow.Tensor.to_global, placement=ranks, sbp=sbp_of(new))
            function = compiled(convert, x) if graph else convert
            _, measured[old, new] = sent_by(lambda function=function, x=x: function(x))
    return measured


def compiled(function, *tensors):
    """A graph of a function of tensors, which has been built for these, so that only its call is measured."""
    graph = FunctionGraph(function)
    graph._compile(*tensors)
    return graph


def inputs_of(graph):
    """{SBPs of x and w before a matmul: those in which it multiplies them} of each matmul in a compiled graph."""
    job = graph._full_job_proto
    signatures = job.job_parallel_view_conf.op_name2nd_sbp_signature_conf
    inputs = {}
    for op in job.net.op:
        if op.user_conf.op_type_name == "matmul":
            producers = [op.user_conf.input[key].s[0].split("/") for key in "ab"]
            before = [label_of_proto(signatures[name].bn_in_op2nd_sbp[output]) for name, output in producers]
            inside = [label_of_proto(signatures[op.name].bn_in_op2nd_sbp[key]) for key in ("a_0", "b_0")]
            inputs[tuple(before)] = tuple(inside)
    return inputs
