"""Recipes on two hosts: the proof ladder, and the bytes that go from the first host to the second."""

from functools import partial

import pytest

from harness.pool import pool_cache
from harness.start.recipe import path_of
from tests.cases import ROOT, modes, sizes_of
from tests.cases.ladder import Checks, check_recipe
from tests.hosts import NO_HOSTS
from tests.markdown import CLUSTERS, tables
from tests.pools import RecipePool

HERE = str(ROOT / "tests" / "on_rank_hosts.py")
SIZE = 1024  # rows and columns of what is moved between hosts: 4 MB
CONTROL = 0.02  # of the tensor: OneFlow's own messages
RECIPES = [  # at least one for each way to send: collectives, stages, meshes, `comm`, files, meeting
    *("row_parallel", "sbp_conversions", "cross_placement", "two_d_sbp", "train_data_parallel", "train_pipeline"),
    *("fully_sharded", "ddp", "ring_all_reduce", "parameter_server", "checkpoint", "elastic_training"),
    *("hello_ranks", "rendezvous", "ring_attention", "mixture_of_experts"),
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


def crossings():
    """The rows of the tables in docs/clusters.md: (source, target, old SBP, new SBP, graph, times the tensor)."""
    rows = []
    for first, *cells in tables(CLUSTERS):
        if first.startswith("ranks 0"):
            ranks = [[int(rank) for rank in side.split(", ")] for side in first[len("ranks ") :].split(" → ")]
        elif " → " in first:
            for graph, cell in ((False, cells[0]), (True, cells[1])):
                rows.append((ranks[0], ranks[-1], *first.split(" → "), graph, float(cell)))
    assert len(rows) == 22
    return rows


@pytest.mark.parametrize("source, target, old, new, graph, units", crossings())
def test_bytes_between_two_hosts(hosts, pools, source, target, old, new, graph, units):
    """The payload that ranks 0 and 1, on host 0, send to those on host 1."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    keywords = {"source": source, "target": target, "old": old, "new": new, "graph": graph}
    by_rank = pools(4).call(f"{HERE}:between_hosts", rows=SIZE, columns=SIZE, **keywords)
    sent = sum(by_rank[:2]) / (4 * SIZE**2)
    Checks.that(0 <= sent - units <= CONTROL, old, new, sent, "times the tensor, not", units)
