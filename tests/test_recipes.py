"""Every recipe, eager and graph, at every world size that it accepts: values, shards, SBP, placement, operations."""

import shutil

import pytest

from oneflow_cookbook.start.recipe import all_paths, copied_with, path_of
from tests.cases import CASES, LONG, WITHOUT_CASE, is_default, proven_on, run_id, runs
from tests.cases.ladder import MAIN, check_recipe
from tests.cases.mains import PROOFS  # with those of recipes that have no case

RUNS = [pytest.param(run, id=run_id(run), marks=() if is_default(run) else pytest.mark.slow) for run in runs()]
COPIED = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES]


@pytest.mark.parametrize("run", RUNS)
def test_proof_ladder(pools, run):
    name, n, graph, sizes = run
    check_recipe(pools(n), path_of(name), name, graph, sizes)


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
    path, *_ = [shutil.copy(file, tmp_path) for file in copied_with(path_of(name))]
    for rank, (code, out, err) in enumerate(pools(proven_on(name)[0]).call(MAIN, path=path, arguments=[])):
        assert (code, err) == (0, ""), err
        lines = out.splitlines()
        assert rank or lines and max(map(len, lines)) <= 120


def test_every_recipe_has_a_case():
    assert [path.stem for path in all_paths()] == sorted([*CASES, *WITHOUT_CASE])
