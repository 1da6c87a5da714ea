"""What global_and_local.py warns of is so."""

import numpy as np
import pytest

from harness.start.recipe import path_of
from tests.cases import ROOT
from tests.hanging import assert_hangs

ON_RANK = str(ROOT / "tests" / "on_rank.py")
PATH = str(path_of("global_and_local"))
OBSERVE = str(ROOT / "harness" / "measure" / "observe.py") + ":observe"


@pytest.mark.parametrize("n", [2, 3])
def test_layer_taken_straight_to_a_split_grows(pools, n):
    assert pools(n).call(f"{ON_RANK}:width_of_split_linear") == [(12 * n, 12)] * n


@pytest.mark.parametrize("how", ["print", "numpy", "item"])
def test_reading_a_global_tensor_on_one_rank_waits_for_ever(how):
    assert_hangs(f"{ON_RANK}:read_on_rank_0", "rank 0 of 2", "in read_on_rank_0", how=how)


@pytest.mark.parametrize("n", [2, 4])
def test_random_numbers_by_sbp(pools, n):
    one, again, other = ([rank["tensors"] for rank in pools(n).call(OBSERVE, path=PATH, seed=s)] for s in (1, 1, 2))
    for name in ("noise", "blocks"):
        values = [run[0][name]["value"] for run in (one, again, other)]
        assert (values[0] == values[1]).all() and (values[0] != values[2]).all()
    rows = min(rank["blocks"]["shard"].shape[0] for rank in one)
    shards = np.array([rank["blocks"]["shard"][:rows] for rank in one])
    assert all((shards[i] != shards[j]).all() for i in range(n) for j in range(i))  # a draw of its own on each rank
    assert all((rank["noise"]["shard"] == one[0]["noise"]["shard"]).all() for rank in one)


def test_random_numbers_of_a_split_differ_with_the_number_of_ranks(pools):
    two, four = (pools(n).call(OBSERVE, path=PATH, seed=1)[0]["tensors"] for n in (2, 4))
    assert (two["noise"]["value"] == four["noise"]["value"]).all()
    assert (two["blocks"]["value"] != four["blocks"]["value"]).any()
