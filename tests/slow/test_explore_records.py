"""Fresh runs hold, multiply and send what docs/explore.json says."""

import json

import numpy as np
import pytest

from harness.explore import records
from harness.pool import Pool
from tests.cases.ladder import Checks

RUNS = json.loads(records.PATH.read_text())["runs"]
# Of so many pairs one is run: with each SBP of x and of w, also on the mesh.
STEPS = {"1": 5, "2": 1, "3": 3, "4": 3, "2x2": 13}


@pytest.mark.parametrize("which", RUNS)
def test_records_are_those_of_this_run(which):
    pairs = records.pairs_of(which)[:: STEPS[which]]
    with Pool(np.size(records.RANKS[which]), timeout=300, repeat=True) as pool:
        fresh = records.measured_on(pool, which, pairs)
    recorded = {pair: RUNS[which][pair] for pair in fresh}
    Checks.equal(len(fresh), len(pairs), which, "pairs")
    for path in records.differences(recorded, fresh)[:1]:
        old, new = recorded, fresh
        for name in path:
            old, new = ((one or {}).get(name) for one in (old, new))
        raise AssertionError(f"{which}, {path}: {old} is now {new}; ./launch.sh docs makes it anew")


def test_a_pair_that_ends_the_ranks_is_an_error_and_others_run():
    wrong, right = ("S(5)", "B"), ("B", "S(1)")
    with Pool(2, timeout=300) as pool:
        sent = records.each(pool, "bytes_sent", [wrong, right], ranks=[0, 1], shapes=records.SHAPES, graph=False)
    error = records.run_of(wrong, [0, 1], sent[wrong], sent[wrong])
    Checks.equal(error, {"error": "a rank died (SIGABRT)"})
    Checks.equal([out for out, *_ in sent[right]], ["S(1)", "S(1)"])
