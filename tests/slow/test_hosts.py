"""Recipes on two hosts: the proof ladder, and the bytes that go from the first host to the second."""

from functools import partial

import pytest

from oneflow_cookbook.measure.sbp import sbp_of
from oneflow_cookbook.pool import pool_cache
from oneflow_cookbook.start.recipe import path_of
from tests.cases import modes, sizes_of
from tests.cases.ladder import Checks, check_recipe
from tests.hosts import NO_HOSTS
from tests.pools import RecipePool

SIZE = 1024  # rows and columns of what is moved between hosts: 4 MB
CONTROL = 0.02  # of the tensor: OneFlow's own messages
RECIPES = [  # at least one for each way to send: collectives, stages, meshes, `comm`, files, meeting
    *("sbp_conversions", "cross_placement", "two_d_sbp", "train_pipeline", "ring_all_reduce", "checkpoint"),
    *("hello_ranks", "rendezvous", "mixture_of_experts"),
]


@pytest.fixture(scope="module")
def pools(hosts):
    """A function from a world size to a pool of as many ranks, half of them on each host."""
    with pool_cache(partial(RecipePool, place=hosts.place)) as pools:
        yield pools


@pytest.mark.parametrize("name, graph", [(name, modes(name)[i % len(modes(name))]) for i, name in enumerate(RECIPES)])
def test_proof_ladder_on_two_hosts(hosts, pools, name, graph):
    """Every second recipe runs in a graph, if it has one: between hosts only what carries the bytes is another."""
    facts = {"nodes": 2 if hosts.real else 1} if name == "hello_ranks" else {}
    check_recipe(pools(4), path_of(name), name, graph, next(iter(sizes_of(name, 4))), **facts)


CROSSINGS = {  # ranks that hold it before, after -> {(old SBP, new SBP): times the tensor, in eager mode, in a graph}
    ((0, 1), (2, 3)): {
        ("S(0)", "S(0)"): (1.0, 1.0),
        ("S(0)", "B"): (2.0, 2.0),
        ("B", "S(0)"): (1.0, 1.0),
        ("B", "B"): (1.0, 2.0),
        ("P", "S(0)"): (2.0, 2.0),
        ("P", "B"): (4.0, 2.0),
    },
    ((0, 1, 2, 3), (0, 1, 2, 3)): {
        ("S(0)", "B"): (0.75, 1.0),
        ("P", "S(0)"): (0.75, 1.0),
        ("P", "B"): (1.5, 2.0),
        ("S(0)", "S(1)"): (0.25, 0.25),
        ("B", "S(0)"): (0.0, 0.0),
    },
}


def crossings():
    """(source, target, old SBP, new SBP, graph, times the tensor) of each."""
    for (source, target), rows in CROSSINGS.items():
        for (old, new), (eager, graph) in rows.items():
            yield list(source), list(target), old, new, False, eager
            yield list(source), list(target), old, new, True, graph


def between_hosts(source, target, old, new, rows, columns, graph):
    """The bytes that this rank sends to other hosts for one to_global of a tensor in float32. Collective."""
    import oneflow as flow

    from oneflow_cookbook.measure.graph import FunctionGraph
    from oneflow_cookbook.measure.sent import growth, quiet, wait_for

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


@pytest.mark.parametrize("source, target, old, new, graph, units", crossings())
def test_bytes_between_two_hosts(hosts, pools, source, target, old, new, graph, units):
    """The payload that ranks 0 and 1, on host 0, send to those on host 1."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    keywords = {"source": source, "target": target, "old": old, "new": new, "graph": graph}
    by_rank = pools(4).call(f"{__file__}:between_hosts", rows=SIZE, columns=SIZE, **keywords)
    sent = sum(by_rank[:2]) / (4 * SIZE**2)
    Checks.that(0 <= sent - units <= CONTROL, old, new, sent, "times the tensor, not", units)
