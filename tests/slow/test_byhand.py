"""What the recipes by hand claim beyond their values: who talks to whom, and what goes wrong."""

import pytest

from harness.start.recipe import path_of
from tests.cases import CASES, ROOT
from tests.cases.ladder import OBSERVE, Checks
from tests.cases.reference import gradients, mlp, mse, trained
from tests.hanging import assert_hangs

ON_RANK = str(ROOT / "tests" / "on_rank_byhand.py")


def path(name):
    return str(path_of(name))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ring_talks_to_neighbours_only_one_chunk_at_a_time(pools, n):
    chunks = {2: [3, 4], 3: [2, 2, 3], 4: [1, 2, 2, 2]}[n]  # rows: 7 in all
    for rank, seen in enumerate(pools(n).call(f"{ON_RANK}:messages", path=path("ring_all_reduce"), in_features=7)):
        sent = [message for message in seen if message[0] == "send"]
        received = [message for message in seen if message[0] == "recv"]
        rounds = [rank - i for i in range(n - 1)] + [rank + 1 - i for i in range(n - 1)]
        assert sent == [("send", (rank + 1) % n, (chunks[i % n], 4)) for i in rounds]
        assert received == [("recv", (rank - 1) % n, (chunks[(i - 1) % n], 4)) for i in rounds]
        assert [message[0] for message in seen[:2]] == (["send", "recv"] if rank % 2 == 0 else ["recv", "send"])


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("sizes", [{"in_features": 720, "out_features": 1080}, {"in_features": 7, "out_features": 50_000}])
def test_bytes_of_the_ring(pools, n, sizes):
    found = pools(n).call(f"{ON_RANK}:sent_by_the_ring", path=path("ring_all_reduce"), **sizes)
    for rank, (sent, elements) in enumerate(zip(found, CASES["ring_all_reduce"](n, **sizes).sends)):
        near = abs(sent - 4 * elements) <= 0.02 * 4 * elements
        Checks.that(near, f"rank {rank} sends", sent, "and must send", 4 * elements)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ring_adds_in_the_order_of_oneflow_if_the_chunks_are_equal(pools, n):
    """Bit for bit then; if n does not divide the rows, OneFlow cuts elsewhere."""
    for rows, same in ((12, True), (13, n == 2)):  # two numbers give the same sum in either order
        sizes = {"in_features": rows, "out_features": 5_000}
        for seen in pools(n).call(OBSERVE, path=path("ring_all_reduce"), **sizes):
            summed, reduced = (seen["tensors"][name]["value"] for name in ("summed", "reduced"))
            Checks.equal((summed == reduced).all(), same, n, rows)


def test_all_ranks_that_send_first_wait_for_ever(pools):
    assert pools(2).call(f"{ON_RANK}:exchange", first="one each") == [32, 32]
    assert_hangs(f"{ON_RANK}:exchange", r"rank 0:(.|\n)*in exchange(.|\n)*rank 1:(.|\n)*in exchange", first="send")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_fresh_gradients_give_the_synchronous_update_and_stale_ones_do_not(n):
    """The ladder finds both on the ranks."""
    synchronous = trained("sgd", steps=4)
    fresh, stale = (CASES["async_update"](n, sync_every=every).values for every in (1, 2))
    for w in ("new w0", "new w1"):
        Checks.that((abs(fresh[w].exact - synchronous[w].exact) <= 1e-12).all(), n, w, "fresh")
        Checks.that(abs(stale[w].exact - synchronous[w].exact).max() > 1e-2, n, w, "stale")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_gradient_fetched_by_one_to_global_costs_an_all_reduce(pools, n):
    rows, columns = 600, 600
    for rank, sent in enumerate(pools(n).call(f"{ON_RANK}:sent_to_the_server", shape=(rows, columns))):
        wanted = 4 * rows * columns * 2 * (n - 1) / n
        Checks.that(abs(sent - wanted) <= 0.02 * wanted, rank, "sends", sent, "and must send", wanted)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_start_from_rank_0_and_stay_equal_bit_by_bit(pools, n):
    every = [seen["tensors"] for seen in pools(n).call(OBSERVE, path=path("ddp"), steps=20, batch=4 * n + 1)]
    for name in ("w0", "w1", "w0 grad", "w1 grad", "new w0", "new w1"):
        assert all((tensors[name]["value"] == every[0][name]["value"]).all() for tensors in every)
    for name in ("w0", "w1"):
        assert (every[0][name]["value"] == every[0][f"own {name}"]["value"]).all()
        assert all((tensors[name]["value"] != tensors[f"own {name}"]["value"]).all() for tensors in every[1:])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_gradient_of_uneven_rows_is_that_of_the_batch_only_if_weighed(n):
    """The ladder finds these gradients on the ranks."""
    for batch, weigh, same in ((12, "ranks", True), (13, "ranks", False), (13, "rows", True)):
        values = CASES["ddp"](n, steps=1, batch=batch, weigh=weigh).values
        weights = {w: values[w] for w in ("w0", "w1")}
        wanted = gradients(mse(mlp(values["x of all"], weights), values["y of all"]), weights)
        for w in weights:
            off = abs(values[f"{w} grad"].exact - wanted[w].exact).max()
            Checks.that((off < 1e-12) if same else (off > 1e-3), n, batch, weigh, w, off)


def test_module_stays_the_same_and_its_names_too(pools):
    assert pools(2).call(f"{ON_RANK}:wrapped") == [(True, ["w0", "w1"])] * 2


@pytest.mark.parametrize(
    "weights, options, buckets", [(2, {}, [2]), (11, {}, [10, 1]), (2, {"bucket_size": 1}, [1, 1])]
)
def test_weights_share_a_bucket(pools, weights, options, buckets):
    for calls, sent in pools(2).call(f"{ON_RANK}:reduced", weights=weights, **options):
        assert calls == [size * 256 * 256 for size in buckets]
        Checks.that(abs(sent - 4 * sum(calls)) <= 0.02 * 4 * sum(calls), sent, calls)  # 2 (n-1)/n is 1


def test_zero_grad_clears_and_setting_to_none_does_not(pools):
    assert pools(2).call(f"{ON_RANK}:gradients_after", set_to_none=False) == [[3.0, 3.0, 3.0]] * 2
    assert pools(2).call(f"{ON_RANK}:gradients_after", set_to_none=True) == [[3.0, 6.0, 9.0]] * 2
