"""More ranks than the ladder has: each recipe whose default sizes allow them, single layers also in a graph."""

import pytest

from harness.start.recipe import path_of, world_sizes
from tests.cases import CASES, ONE_LAYER, modes
from tests.cases.ladder import MAIN
from tests.pools import RecipePool

RANKS = 6  # with more of them, each collective waits longer for a core than it works
RUNS = [
    (name, graph)
    for name in CASES
    if RANKS in world_sizes(path_of(name))
    for graph in (modes(name) if name in ONE_LAYER else modes(name)[:1])
]


@pytest.fixture(scope="module")
def six():
    with RecipePool(RANKS) as pool:
        yield pool


@pytest.mark.parametrize("name, graph", RUNS)
def test_main_on_six_ranks(six, name, graph):
    arguments = ["--graph"] * (graph and len(modes(name)) == 2)
    for code, _, err in six.call(MAIN, path=str(path_of(name)), arguments=arguments):
        assert (code, err) == (0, "")
