"""Every recipe, eager and graph, at every world size that it accepts: values, shards, SBP, placement, operations."""

import shutil

import numpy as np
import pytest

from harness.start.recipe import all_paths, path_of
from tests.cases import CASES, LONG, WITHOUT_CASE, is_default, modes, proven_on, run_id, runs, sizes_of
from tests.cases.ladder import MAIN, OBSERVE, Checks, check_recipe, runs_of
from tests.cases.mains import PROOFS  # with those of recipes that have no case

RUNS = [pytest.param(run, id=run_id(run), marks=() if is_default(run) else pytest.mark.slow) for run in runs()]
IN_BOTH_MODES = [param for param in RUNS if param.values[0][2] and len(modes(param.values[0][0])) == 2]
COPIED = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES]


@pytest.fixture(scope="module")
def seen():
    """What each run recorded, so that no other test has to run it again."""
    return {}


@pytest.mark.parametrize("run", RUNS)
def test_proof_ladder(pools, seen, run):
    name, n, graph, sizes = run
    seen[run] = check_recipe(pools(n), path_of(name), name, graph, sizes)


@pytest.mark.parametrize("run", IN_BOTH_MODES)
def test_graph_equals_eager_bit_by_bit(pools, seen, run):
    name, n, _, sizes = run
    arguments = sizes_of(name, n)[sizes]
    for mode in (False, True):
        if (name, n, mode, sizes) not in seen:
            for _, recipe_arguments in runs_of({"graph": mode, **arguments}):  # the last run counts
                seen[name, n, mode, sizes] = pools(n).call(OBSERVE, path=str(path_of(name)), **recipe_arguments)
    eager, graph = (seen[name, n, mode, sizes] for mode in (False, True))
    eager_case, case = (CASES[name](n, mode, **arguments) for mode in (False, True))
    eager_case.draw(eager[0]["tensors"])
    case.draw(graph[0]["tensors"])
    for rank in range(n):
        for tensor in case.layout:
            if tensor in graph[rank]["in_graph"] and tensor not in graph[rank]["tensors"]:  # it has no value there
                continue
            difference = value_of(graph[rank], tensor) - value_of(eager[rank], tensor)
            expected = case.values[tensor].exact - eager_case.values[tensor].exact  # 0 unless it depends on the mode
            allowed = 2 * case.values[tensor].bound if tensor in case.summed else 0
            off = np.abs(difference - np.nan_to_num(expected))
            Checks.that((off <= allowed).all(), rank, tensor, "differ by", difference)


def value_of(result, name):
    """A tensor's value, or the numbers that the recipe keeps by this name."""
    return result["tensors"][name]["value"] if name in result["tensors"] else result["arrays"][name]


REFUSED = {f"{name} {line}": words for name, proof in PROOFS.items() for line, words in proof.refused.items()}


@pytest.mark.parametrize("line", REFUSED)
def test_number_that_does_not_work_is_refused_in_one_line(pools, line):
    """By each rank, with exit code 2, before it waits for another."""
    name, *arguments = line.split()
    for code, out, err in pools(2).call(MAIN, path=str(path_of(name)), arguments=arguments):
        assert (code, out) == (2, ""), err
        assert err.splitlines()[-1].endswith(f": error: {' '.join(arguments)}: {REFUSED[line]}")


@pytest.mark.parametrize("name", COPIED)
def test_main_of_a_copy_passes(pools, name, tmp_path):
    path = shutil.copy(path_of(name), tmp_path)
    for rank, (code, out, err) in enumerate(pools(proven_on(name)[0]).call(MAIN, path=path, arguments=[])):
        assert (code, err) == (0, ""), err
        lines = out.splitlines()
        assert rank or lines and max(map(len, lines)) <= 120


def test_every_recipe_has_a_case():
    assert [path.stem for path in all_paths()] == sorted([*CASES, *WITHOUT_CASE])
