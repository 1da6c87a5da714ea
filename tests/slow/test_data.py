"""What the recipes on data claim beyond their tensors: loading, metrics, statistics, random numbers."""

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import OBSERVE

ON_RANK = str(ROOT / "tests" / "on_rank_data.py")


def seen(pools, name, n, **arguments):
    """Each rank's tensors and arrays of a recipe, by name."""
    ranks = pools(n).call(OBSERVE, path=str(path_of(name)), **arguments)
    return [{**rank["arrays"], **rank["tensors"]} for rank in ranks]


def test_set_epoch_and_the_samplers_seed_make_the_order_and_manual_seed_does_not(pools):
    same, again, other, fixed = (
        pools(2).call(f"{ON_RANK}:orders", seed=seed, set_epoch=set_epoch)
        for seed, set_epoch in ((0, True), (0, True), (1, True), (0, False))
    )
    assert same == again != other
    for rank in (0, 1):
        assert same[rank][0] != same[rank][1]
        assert fixed[rank][0] == fixed[rank][1] == same[rank][0]
    assert not set(same[0][0]) & set(same[1][0])  # though the ranks' manual_seed differed


def test_last_batch_is_smaller_unless_it_is_dropped(pools):
    assert pools(2).call(f"{ON_RANK}:batch_sizes", samples=25, batch=4, drop_last=False) == [[4, 4, 4, 1]] * 2
    assert pools(2).call(f"{ON_RANK}:batch_sizes", samples=25, batch=4, drop_last=True) == [[4, 4, 4]] * 2


def test_dropout_of_random_numbers_keeps_all_in_eval_mode(pools):
    [kept] = pools(1).call(f"{ON_RANK}:kept_by_dropout", path=str(path_of("random_numbers")))
    assert 0.4 < kept["training"] < 0.6 and kept["eval"] == 1


def test_joining_the_ranks_batches_sends_no_data(pools):
    for sent in pools(2).call(f"{ON_RANK}:bytes_of_joining", rows=1000, columns=1000):
        assert sent < 200_000  # of 4 million bytes


@pytest.mark.parametrize("n", [2, 3])
def test_mean_of_split_samples_is_the_same_in_p(pools, n):
    samples = np.random.default_rng(0).standard_normal((25, 2), dtype=np.float32)
    for sbp, mean in pools(n).call(f"{ON_RANK}:mean_of_split", samples=samples):
        assert sbp == "P" and np.allclose(mean, samples.mean(axis=0, keepdims=True), rtol=1e-5)


def test_all_reduce_of_the_local_way_returns_nothing(pools):
    assert pools(2).call(f"{ON_RANK}:all_reduced") == [(None, 3.0)] * 2


DIMS = pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])


@DIMS
@pytest.mark.parametrize("graph", [False, True])
def test_random_numbers_of_manual_seed_repeat_the_mask_but_not_that_of_nn_dropout(pools, graph, dim):
    first, again, other = (seen(pools, "random_numbers", 2, graph=graph, seed=seed, dim=dim)[0] for seed in (1, 1, 2))
    masks = {name: [run[name]["value"] != 0 for run in (first, again, other)] for name in ("out", "repeated")}
    assert (masks["out"][0] == masks["out"][1]).all() and (masks["out"][0] != masks["out"][2]).any()
    assert (masks["repeated"][0] == masks["repeated"][2]).all()
    assert (first["weight"]["value"] == again["weight"]["value"]).all()
    assert (first["weight"]["value"] != other["weight"]["value"]).any()


@DIMS
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("graph", [False, True])
def test_random_numbers_of_a_mask_keep_its_share_and_the_mean(pools, n, graph, dim):
    [rank, *_] = seen(pools, "random_numbers", n, graph=graph, batch=300, features=200, dim=dim)
    out, size = rank["out"]["value"], 300 * 200
    assert abs((out != 0).mean() - 0.5) < 5 * np.sqrt(0.5 * 0.5 / size)  # 5 standard deviations
    assert abs((out - rank["x"]["value"]).mean()) < 5 * np.sqrt(0.5 / 0.5 / size)


@DIMS
def test_random_numbers_of_a_mask_depend_on_the_number_of_ranks(pools, dim):
    two, four = (seen(pools, "random_numbers", n, dim=dim)[0] for n in (2, 4))
    assert (two["weight"]["value"] == four["weight"]["value"]).all()
    assert (two["mask"]["value"] != four["mask"]["value"]).any()


# (what draws, in a graph, SBP) -> whether the ranks' shards are equal if all have the same seed, and if they differ
EQUAL = {
    **{("functional dropout", False, sbp): (True, False) for sbp in ("S(0)", "B")},
    **{("functional dropout", True, sbp): (True, True) for sbp in ("S(0)", "B")},
    **{("nn.Dropout", graph, sbp): (True, True) for graph in (False, True) for sbp in ("S(0)", "B")},
    **{("rand", graph, sbp): (sbp == "B",) * 2 for graph in (False, True) for sbp in ("S(0)", "B")},
    ("init", False, "B"): (True, True),
}


def test_numbers_in_b_are_the_same_on_any_number_of_ranks(pools):
    """So a mask that is drawn in B and then split is that of one device."""
    arguments = {"source": "rand", "graph": False, "sbp": "B", "seeds": "one"}
    alone, *others = (pools(n).call(f"{ON_RANK}:drawn_by", **arguments)[-1] for n in (1, 2, 3))
    assert all((block[: len(alone)] == alone).all() for block in others)  # n ranks draw 8 n rows


@pytest.mark.parametrize("what", EQUAL, ids=lambda what: f"{what[0]}-{'graph' if what[1] else 'eager'}-{what[2]}")
def test_equal_seeds_draw_equal_shards_or_not(pools, what):
    source, graph, sbp = what
    for seeds, wanted in zip(("one", "many"), EQUAL[what]):
        block, other = pools(2).call(f"{ON_RANK}:drawn_by", source=source, graph=graph, sbp=sbp, seeds=seeds)
        assert (block == other).all() == wanted, (seeds, wanted)
