"""Recipes on ranks that do not begin at 0: a rank's share is that of its position in the placement."""

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import CASES
from tests.cases.ladder import OBSERVE, Checks, assert_close, check_tensors

LATER = {4: [2, 3], 3: [1, 2]}  # number of ranks -> those that the recipe uses
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
WORLDS = pytest.mark.parametrize("n", LATER)


@MODES
@WORLDS
@pytest.mark.parametrize("name", ["elastic_training", "sbp_conversions"])
def test_recipe_on_the_last_ranks(pools, name, n, graph):
    case = CASES[name](n, graph, ranks=LATER[n])
    arguments = {"path": str(path_of(name)), "names": list(case.layout), "ranks": LATER[n], "graph": graph}
    check_tensors(case, pools(n).call(OBSERVE, **arguments))


@MODES
@WORLDS
def test_ring_on_the_last_ranks(pools, n, graph):
    """The first of them has the first rows."""
    sizes = {"seq_len": 5, "num_heads": 2}
    values = CASES["ring_attention"](n, graph, **sizes).values
    arguments = {"path": str(path_of("ring_attention")), "ranks": LATER[n], "graph": graph, **sizes}
    for seen in pools(n).call(OBSERVE, **arguments):
        assert_close(np.array(seen["arrays"]["losses"]), values["losses"], "losses")
        blocks = [seen["tensors"][f"q{k}"] for k in range(2)]
        Checks.equal([(q["ranks"], q["shape"][0]) for q in blocks], [([LATER[n][0]], 3), ([LATER[n][1]], 2)], "blocks")
