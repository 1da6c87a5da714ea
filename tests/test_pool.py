"""The pool of ranks fails where it should, says why, and goes on with fresh ranks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.pool import Pool, PoolError
from tests.cases import ROOT
from tests.jobs import LONG, wait_until
from tests.pools import RecipePool, assert_hangs

ON_RANK = str(ROOT / "tests" / "on_rank.py")


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


def works(pool):
    return pool.call(f"{ON_RANK}:rank_of") == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how, text", [("raise", "ValueError: boom"), ("die", "exit code 7")])
def test_failure_of_one_rank_fails_the_call_and_the_next_one_works(pool, rank, how, text):
    assert works(pool)
    starts = pool.starts
    with pytest.raises(PoolError, match=text) as caught:
        pool.call(f"{ON_RANK}:fail", rank=rank, how=how)
    assert caught.value.rank == rank
    assert works(pool) and pool.starts == starts + 1


def test_hanging_rank_fails_the_call_and_shows_where_it_is():
    assert_hangs(f"{ON_RANK}:fail", r'on_rank.py", line \d+ in fail', rank=1, how="hang")


def test_ranks_live_on_between_calls(pool):
    assert works(pool)
    starts = pool.starts
    assert works(pool) and works(pool) and pool.starts == starts


@pytest.mark.parametrize("repeat", [False, True])
def test_ranks_that_use_much_memory_are_replaced_if_calls_may_be_repeated(repeat, monkeypatch):
    monkeypatch.setattr("harness.pool.pool.LARGE", 0)
    with Pool(2, repeat=repeat) as pool:
        assert works(pool) and works(pool) and pool.starts == 1 + repeat


def test_graphs_are_kept(pool):
    assert pool.call(f"{ON_RANK}:graph_lives_on") == [True, True]


def test_missing_function_is_an_error_of_the_call(pool):
    with pytest.raises(PoolError, match="no_such_function"):
        pool.call(f"{ON_RANK}:no_such_function")


def test_call_is_made_once_more_if_a_rank_died_of_sigsegv(tmp_path):
    with Pool(2, repeat=True) as pool:
        assert pool.call(f"{ON_RANK}:crash", mark=str(tmp_path)) == ["well"] * 2
        assert len(pool.repeated) == 1


def test_without_repeat_the_death_is_told(tmp_path, pool):
    with pytest.raises(PoolError, match=r"rank 0 of 2 died \(SIGSEGV\)"):
        pool.call(f"{ON_RANK}:crash", mark=str(tmp_path))
    assert not pool.repeated


SLEEPS = "import time\n\n\ndef run(path, seconds):\n    time.sleep(seconds)\n"


def test_recipe_that_hung_is_not_called_again_nor_is_a_copy_of_it(tmp_path):
    recipe, copy = tmp_path / "recipe.py", tmp_path / "copy.py"
    recipe.write_text(SLEEPS)
    copy.write_text(SLEEPS)
    with RecipePool(1, timeout=2) as pool:
        with pytest.raises(PoolError, match="gave no answer in 2 s"):
            pool.call(f"{recipe}:run", path=str(recipe), seconds=1000)
        with pytest.raises(PoolError, match="copy.py hung in recipe.py:run on 1 ranks, so it is not called again"):
            pool.call(f"{copy}:run", path=str(copy), seconds=0)
        copy.write_text(f"{SLEEPS}# changed\n")
        assert pool.call(f"{copy}:run", path=str(copy), seconds=0) == [None]


def test_recipe_that_hangs_ends_its_calls_in_other_threads(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"{SLEEPS}# of this test\n")
    call = {"function": f"{recipe}:run", "path": str(recipe)}
    with RecipePool(1, timeout=2) as pool, RecipePool(1, timeout=10 * LONG) as patient, ThreadPoolExecutor(1) as thread:
        patient.call(**call, seconds=0)  # so that its rank is there
        waiting = thread.submit(patient.call, **call, seconds=10 * LONG)
        wait_until(lambda: patient in RecipePool.calling, "the call of the other thread")
        with pytest.raises(PoolError, match="gave no answer in 2 s"):
            pool.call(**call, seconds=1000)
        with pytest.raises(PoolError, match="recipe.py hung in recipe.py:run on 1 ranks"):
            waiting.result(LONG)
