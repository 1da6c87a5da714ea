"""Multiply two matrices in pairs of SBPs on this rank: what each rank holds, and the bytes that it sends."""

import numpy as np
import oneflow as flow

from harness.explore.shards import shard
from harness.measure.graph import FunctionGraph
from harness.measure.sbp import Layout, label, label_of_proto, sbp_of
from harness.measure.sent import sent_by


def sbps(name):
    """The objects of flow.sbp for a name such as "S(0)" or, on a mesh, "S(0), B"."""
    return [sbp_of(one) for one in name.split(", ")]


def global_tensor(value, name, ranks):
    """A global tensor with this value, from what each rank holds of it."""
    part = shard(np.array(value), Layout(name, ranks), flow.env.get_rank())
    local = flow.tensor(part.astype("float32"))
    return local.to_global(placement=flow.placement("cpu", ranks), sbp=sbps(name))


def held(tensor):
    """(SBP, what this rank holds of a global tensor)."""
    return label(tensor.sbp), tensor.to_local().numpy()


def products(pairs, ranks, values, targets, graph):
    """Multiply x and w in each pair of SBPs, and give out each of the SBPs `targets`. Collective.

    values: x and w as lists of rows of whole numbers; graph: whether one nn.Graph does it all.
    Returns {pair: {"x", "w", "out": (SBP, shard), "to": {SBP: shard}, "inputs": see `inputs_of`, in a graph}}.
    """
    x, w = (
        {name: global_tensor(value, name, ranks) for name in dict.fromkeys(names)}
        for value, names in zip(values, zip(*pairs))
    )

    def multiply(*tensors):
        given = dict(zip([("x", name) for name in x] + [("w", name) for name in w], tensors))
        outs = [flow.matmul(given["x", i], given["w", j]) for i, j in pairs]
        return [[out, *(out.to_global(sbp=sbps(new)) for new in targets)] for out in outs]

    function = FunctionGraph(multiply) if graph else multiply
    results = function(*x.values(), *w.values())
    inputs = inputs_of(function) if graph else {}
    return {
        (i, j): {
            "x": held(x[i])[1],
            "w": held(w[j])[1],
            "out": held(out),
            "to": {new: held(moved)[1] for new, moved in zip(targets, given)},
            "inputs": inputs.get((i, j)),
        }
        for (i, j), (out, *given) in zip(pairs, results)
    }


def bytes_sent(pairs, ranks, shapes, graph):
    """Multiply matrices of these shapes in each pair of SBPs, each pair by itself. Collective.

    Returns {pair: (SBP of out, bytes that this rank sent, see `inputs_of`, in a graph)}.
    """
    placement, found = flow.placement("cpu", ranks), {}
    for pair in pairs:
        x, w = (flow.ones(*shape, placement=placement, sbp=sbps(name)) for shape, name in zip(shapes, pair))
        function = FunctionGraph(flow.matmul) if graph else flow.matmul
        if graph:
            function._compile(x, w)  # so that only its call is measured
        out, sent = sent_by(lambda function=function, x=x, w=w: function(x, w))
        found[pair] = label(out.sbp), sent, inputs_of(function).get(pair) if graph else None
    return found


def inputs_of(graph):
    """{(SBP of x, of w) as they are given: the same as they are multiplied} of each matmul in a compiled graph."""
    job = graph._full_job_proto
    signatures = job.job_parallel_view_conf.op_name2nd_sbp_signature_conf
    found = {}
    for op in job.net.op:
        if op.user_conf.op_type_name == "matmul":
            producers = [op.user_conf.input[key].s[0].split("/") for key in "ab"]
            given = [label_of_proto(signatures[name].bn_in_op2nd_sbp[out]) for name, out in producers]
            inside = [label_of_proto(signatures[op.name].bn_in_op2nd_sbp[key]) for key in ("a_0", "b_0")]
            found[tuple(given)] = tuple(inside)
    return found
