"""What test_hosts.py calls on the ranks of a pool on two hosts."""

import oneflow as flow

from oneflow_cookbook.measure.graph import FunctionGraph
from oneflow_cookbook.measure.sbp import sbp_of
from oneflow_cookbook.measure.sent import growth, quiet, wait_for


def between_hosts(source, target, old, new, rows, columns, graph):
    """The bytes that this rank sends to other hosts for one to_global of a tensor in float32. Collective."""
    x = flow.ones(rows, columns, placement=flow.placement("cpu", source), sbp=sbp_of(old))
    there = flow.placement("cpu", target)

    def function(x):
        return x.to_global(placement=there, sbp=sbp_of(new))

    if graph:
        function = FunctionGraph(function)
        function._compile(x)
    wait_for(function(x))  # once beforehand: connections are made
    before = quiet()
    wait_for(function(x))
    after = quiet()
    to_others = {ends: count for ends, count in after.items() if ends[0][0] != ends[1][0]}  # by their addresses
    return growth(before, to_others)
