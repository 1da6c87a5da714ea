"""Every recipe, eager and graph, at every world size that it accepts: values, shards, SBP, placement, operations."""

import numpy as np
import pytest

from harness.recipe import world_sizes
from tests.cases import CASES, PROVEN, RECIPES, run_id, runs
from tests.ladder import OBSERVE, Checks, climb


@pytest.mark.parametrize("run", runs(), ids=run_id)
def test_proof_ladder(pools, run):
    name, n, graph, sizes = run
    climb(pools(n), RECIPES / f"{name}.py", name, graph, sizes)


@pytest.mark.parametrize("name", CASES)
def test_graph_equals_eager_bit_by_bit(pools, name):
    n = max(n for n in PROVEN if n in world_sizes(RECIPES / f"{name}.py"))
    case, path = CASES[name](n, seed=3), str(RECIPES / f"{name}.py")
    eager, graph = (pools(n).call(OBSERVE, path=path, graph=mode, seed=3) for mode in (False, True))
    for rank in range(n):
        for tensor, found in eager[rank]["tensors"].items():
            off = np.abs(found["value"] - graph[rank]["tensors"][tensor]["value"])
            allowed = 2 * case.values[tensor].bound if tensor in case.added else 0
            Checks.that((off <= allowed).all(), rank, tensor, "differ by", off.max())


def test_every_recipe_has_a_case():
    assert sorted(path.stem for path in RECIPES.glob("*.py")) == sorted(CASES)
