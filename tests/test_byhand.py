"""What the recipes by hand claim beyond their values: who talks to whom, and what goes wrong."""

import pytest

from harness.pool import Pool, PoolError
from harness.recipe import HARNESS
from tests.cases import CASES, RECIPES, ROOT
from tests.ladder import Checks

ON_RANK = str(ROOT / "tests" / "on_rank_byhand.py")
PER_STEP = f"{HARNESS / 'ledger.py'}:per_step"


def path(name):
    return str(RECIPES / f"{name}.py")


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
def test_ring_sends_what_the_formula_says_also_in_uneven_chunks(pools, n):
    sizes = {"in_features": 7, "out_features": 50_000}
    wanted = CASES["ring_all_reduce"](n, **sizes).sends
    assert n == 2 or len(set(wanted)) > 1
    for rank, sent in enumerate(pools(n).call(PER_STEP, path=path("ring_all_reduce"), **sizes)):
        Checks.that(abs(sent - 4 * wanted[rank]) <= 0.02 * 4 * wanted[rank], rank, sent, 4 * wanted[rank])


def test_all_ranks_that_send_first_wait_for_ever():
    with Pool(2) as pool:
        assert pool.call(f"{ON_RANK}:exchange", first="one each") == [32, 32]
        pool.timeout = 2  # the ranks run already
        with pytest.raises(PoolError, match="gave no answer in 2 s") as error:
            pool.call(f"{ON_RANK}:exchange", first="send")
        assert str(error.value).count("on_rank_byhand.py") >= 2 and "in exchange" in str(error.value)
