"""Measure every conversion between two SBPs, and a matmul in every pair of SBPs, for the SBP atlas."""

import functools
import itertools

import oneflow as flow

from oneflow_cookbook.measure.graph import FunctionGraph
from oneflow_cookbook.measure.sbp import NAMES, label, sbp_of
from oneflow_cookbook.measure.sent import sent_by


def conversions(shape, source, target, graph):
    """Measure to_global from each SBP on the ranks `source` to each on the ranks `target`, for a tensor of this shape.

    Returns {(old SBP, new SBP): bytes that this rank sent}. Collective.
    """
    ranks, sent = flow.placement("cpu", target), {}
    for old in NAMES:
        x = flow.ones(*shape, placement=flow.placement("cpu", source), sbp=sbp_of(old))
        for new in NAMES:
            convert = functools.partial(flow.Tensor.to_global, placement=ranks, sbp=sbp_of(new))
            _, sent[old, new] = call(convert, graph, x)
    return sent


def signatures(x_shape, w_shape, graph):
    """Measure matmul in each pair of SBPs, on all ranks.

    Returns {(SBP of x, of w): (SBP of the product, bytes that this rank sent)}. Collective.
    """
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    x, w = in_every_sbp(x_shape, ranks), in_every_sbp(w_shape, ranks)
    return {(i, j): call(flow.matmul, graph, x[i], w[j]) for i, j in itertools.product(NAMES, NAMES)}


def in_every_sbp(shape, ranks):
    """{SBP: tensor of ones}."""
    return {name: flow.ones(*shape, placement=ranks, sbp=sbp_of(name)) for name in NAMES}


def call(function, graph, *tensors):
    """Call a function of global tensors. Returns (SBP of the result, bytes that this rank sent).

    graph: whether it runs in an nn.Graph, which is built first, so that only its call is measured.
    """
    if graph:
        function = FunctionGraph(function)
        function._compile(*tensors)
    result, sent = sent_by(lambda: function(*tensors))
    return label(result.sbp), sent
