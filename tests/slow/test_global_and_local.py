"""The traps that global_and_local.py warns of."""

import pytest

from tests.cases import ROOT
from tests.pools import assert_hangs

ON_RANK = str(ROOT / "tests" / "on_rank_global_and_local.py")


@pytest.mark.parametrize("n", [2, 3])
def test_layer_taken_straight_to_a_split_grows(pools, n):
    assert pools(n).call(f"{ON_RANK}:width_of_split_linear") == [(12 * n, 12)] * n


@pytest.mark.parametrize("how", ["print", "numpy", "item"])
def test_reading_a_global_tensor_on_a_single_rank_waits_forever(how):
    assert_hangs(f"{ON_RANK}:read_on_rank_0", "rank 0 of 2", "in read_on_rank_0", how=how)
