"""What the recipes of the chapter of data claim beyond their tensors: loading, metrics, statistics, random numbers."""

import numpy as np
import pytest

from tests.cases import CASES, RECIPES, ROOT

ON_RANK = str(ROOT / "tests" / "on_rank_data.py")
OBSERVE = str(ROOT / "harness" / "observe.py") + ":observe"


def seen(pools, name, n, **arguments):
    """Each rank's tensors of a recipe, by name."""
    return [rank["tensors"] for rank in pools(n).call(OBSERVE, path=str(RECIPES / f"{name}.py"), **arguments)]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("samples", [24, 25])
def test_ranks_share_all_samples_and_only_padding_comes_twice(pools, n, samples):
    ranks = seen(pools, "data_loading", n, samples=samples)
    for epoch in (0, 1):
        fed = [rank[f"order {epoch}"]["shard"].ravel().astype(int) for rank in ranks]
        assert len({len(numbers) for numbers in fed}) == 1
        assert all(len(set(numbers)) == len(numbers) for numbers in fed)
        assert set(np.concatenate(fed)) == set(range(samples))
        assert sum(map(len, fed)) - samples == -samples % n  # 0 twice where the ranks divide the samples


@pytest.mark.parametrize("n", [2, 4])
def test_batch_without_a_sampler_is_one_part_n_times(pools, n):
    right = seen(pools, "data_loading", n)[0]
    assert len(set(right["numbers"]["value"].ravel())) == right["numbers"]["value"].size
    doubled = seen(pools, "data_loading", n)[0]["doubled"]["value"].ravel()
    assert doubled.size == n * 24 and all((doubled == part).sum() == n for part in range(24))


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


@pytest.mark.parametrize("rows, wanted", [((2, 2, 2), 6), ((3, 2, 2), 7), ((2, 3, 2), None), ((4, 2, 2), None)])
def test_blocks_that_are_no_even_split_are_refused(pools, rows, wanted):
    for found in pools(3).call(f"{ON_RANK}:joined", rows_by_rank=rows):
        assert found == wanted or (wanted is None and "match balanced split distribution" in found)


def test_joining_the_ranks_batches_sends_no_data(pools):
    for sent in pools(2).call(f"{ON_RANK}:bytes_of_joining", rows=1000, columns=1000):
        assert sent < 10_000  # of 4 million bytes


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("graph", [False, True])
def test_mean_of_means_is_another_number_where_ranks_have_uneven_counts(pools, n, graph):
    case = CASES["metrics"](n)  # 25 samples: 13 + 12, 9 + 8 + 8, 7 + 6 + 6 + 6
    off = np.abs(case.values["of_means"].exact - case.values["by_hand"].exact)
    assert (off > 10 * (case.values["of_means"].bound + case.values["by_hand"].bound)).all()
    for rank in seen(pools, "metrics", n, graph=graph):
        right, wrong = (rank[name]["value"] for name in ("by_hand", "of_means"))
        assert (np.abs(right - wrong) > 0.5 * off).all()
        assert np.allclose(right, rank["means"]["value"][0], rtol=1e-6, atol=0)
        assert np.allclose(right, rank["samples"]["value"].mean(axis=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [2, 4])
def test_mean_of_means_is_right_where_the_ranks_divide_the_samples(pools, n):
    [rank, *_] = seen(pools, "metrics", n, batch=24)
    assert np.allclose(rank["of_means"]["value"], rank["by_hand"]["value"], rtol=1e-6, atol=0)


def test_all_reduce_of_the_local_way_returns_nothing(pools):
    assert pools(2).call(f"{ON_RANK}:all_reduced") == [(None, 3.0)] * 2
