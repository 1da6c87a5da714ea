"""What the recipes by hand claim beyond their values: which ranks exchange what, and what goes wrong."""

import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import CASES, ROOT
from tests.cases.ladder import OBSERVE, Checks
from tests.cases.reference import trained

ON_RANK = str(ROOT / "tests" / "on_rank_byhand.py")


def path(name):
    return str(path_of(name))


def test_ring_talks_to_neighbours_only_one_chunk_at_a_time(pools):
    n, chunks = 3, [2, 2, 3]  # rows: 7 in all
    for rank, seen in enumerate(pools(n).call(f"{ON_RANK}:messages", path=path("ring_all_reduce"), in_features=7)):
        sent = [message for message in seen if message[0] == "send"]
        received = [message for message in seen if message[0] == "recv"]
        rounds = [rank - i for i in range(n - 1)] + [rank + 1 - i for i in range(n - 1)]
        assert sent == [("send", (rank + 1) % n, (chunks[i % n], 4)) for i in rounds]
        assert received == [("recv", (rank - 1) % n, (chunks[(i - 1) % n], 4)) for i in rounds]
        assert [message[0] for message in seen[:2]] == (["send", "recv"] if rank % 2 == 0 else ["recv", "send"])


@pytest.mark.parametrize("rows, columns", [(720, 1080), (7, 50_000)], ids=["equal chunks", "unequal chunks"])
def test_bytes_of_the_ring(pools, rows, columns):
    sizes = {"in_features": rows, "out_features": columns}
    by_rank = pools(3).call(f"{ON_RANK}:sent_by_the_ring", path=path("ring_all_reduce"), **sizes)
    for rank, (sent, elements) in enumerate(zip(by_rank, CASES["ring_all_reduce"](3, **sizes).sends)):
        near = abs(sent - 4 * elements) <= 0.02 * 4 * elements
        Checks.that(near, f"rank {rank} sends", sent, "and must send", 4 * elements)


def test_ring_adds_in_the_order_of_oneflow_if_the_chunks_are_equal(pools):
    """Bit for bit then; if n does not divide the rows, OneFlow cuts elsewhere."""
    for rows, same in ((12, True), (13, False)):
        sizes = {"in_features": rows, "out_features": 5_000}
        for seen in pools(3).call(OBSERVE, path=path("ring_all_reduce"), **sizes):
            summed, reduced = (seen["tensors"][name]["value"] for name in ("summed", "reduced"))
            Checks.equal((summed == reduced).all(), same, rows)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_fresh_gradients_give_the_synchronous_update_and_stale_ones_do_not(n):
    """In the references, with which the ladder compares both on the ranks."""
    synchronous = trained("sgd", steps=4)
    fresh, stale = (CASES["async_update"](n, sync_every=every).values for every in (1, 2))
    for w in ("new w0", "new w1"):
        Checks.that((abs(fresh[w].exact - synchronous[w].exact) <= 1e-12).all(), n, w, "fresh")
        Checks.that(abs(stale[w].exact - synchronous[w].exact).max() > 1e-2, n, w, "stale")


def test_gradient_fetched_by_one_to_global_costs_an_all_reduce(pools):
    n, rows, columns = 3, 600, 600
    for rank, sent in enumerate(pools(n).call(f"{ON_RANK}:sent_to_the_server", shape=(rows, columns))):
        wanted = 4 * rows * columns * 2 * (n - 1) / n
        Checks.that(abs(sent - wanted) <= 0.02 * wanted, rank, "sends", sent, "and must send", wanted)
