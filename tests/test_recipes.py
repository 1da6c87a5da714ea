"""Every recipe, eager and graph, at every world size that it accepts: values, shards, SBP, placement, operations."""

import shutil

import numpy as np
import pytest

from harness.start.recipe import all_paths, path_of, world_sizes
from tests.cases import CASES, ROOT, WITHOUT_CASE, modes, run_id, runs, sizes_of
from tests.ladder import OBSERVE, Checks, climb

ON_RANK = str(ROOT / "tests" / "on_rank.py")


@pytest.fixture(scope="module")
def seen():
    """What the ladder saw of each run, so that no other test has to run it again."""
    return {}


@pytest.mark.parametrize("run", runs(), ids=run_id)
def test_proof_ladder(pools, seen, run):
    name, n, graph, sizes = run
    seen[run] = climb(pools(n), path_of(name), name, graph, sizes)


@pytest.mark.parametrize("run", [run for run in runs() if run[2] and len(modes(run[0])) == 2], ids=run_id)
def test_graph_equals_eager_bit_by_bit(pools, seen, run):
    name, n, _, sizes = run
    arguments = sizes_of(name, n)[sizes]
    case, path = CASES[name](n, **arguments), str(path_of(name))
    eager, graph = (
        seen.get((name, n, mode, sizes)) or pools(n).call(OBSERVE, path=path, graph=mode, **arguments)
        for mode in (False, True)
    )
    for rank in range(n):
        for tensor, (sbp, _) in case.layout_in(True).items():
            apart = graph[rank]["tensors"][tensor]["value"] - eager[rank]["tensors"][tensor]["value"]
            if sbp == "local" and (tensor, True) in case.parts:  # it tells the mode
                apart = apart - case.parts[tensor, True][rank].exact + case.parts[tensor, False][rank].exact
            off = np.abs(apart)
            allowed = 2 * case.values[tensor].bound if tensor in case.added else 0
            Checks.that((off <= allowed).all(), rank, tensor, "differ by", off.max())


def mains():
    return [
        (name, graph) for name in CASES for graph in modes(name) if len(modes(name)) == 2 or graph == modes(name)[0]
    ]


@pytest.mark.parametrize("name, graph", mains())
def test_main_of_a_copy_says_that_it_is_right(pools, name, graph, tmp_path):
    path = shutil.copy(path_of(name), tmp_path)
    arguments = ["--graph"] * (graph and len(modes(name)) == 2)
    n = world_sizes(path)[0]
    for rank, (code, out, err) in enumerate(pools(n).call(f"{ON_RANK}:main_of", path=path, arguments=arguments)):
        assert (code, err) == (0, ""), err
        lines = out.splitlines()
        assert rank or lines and max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name](world_sizes(path_of(name))[0]).matmuls])
def test_main_sees_a_wrong_product(pools, name):
    """With each matmul scaled, what main compares with numpy must not be equal."""
    path = str(path_of(name))
    results = pools(world_sizes(path)[0]).call(f"{ON_RANK}:main_of", path=path, arguments=[], gain=1.01)
    assert [code for code, _, _ in results] == [1] * len(results)
    assert all("Not equal to tolerance" in err for _, _, err in results)


def test_every_recipe_has_a_case():
    assert [path.stem for path in all_paths()] == sorted([*CASES, *WITHOUT_CASE])
