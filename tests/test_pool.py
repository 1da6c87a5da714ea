"""A pool of ranks fails where it should, says why, and goes on with new ranks."""

import gc
import os
import re
import signal
import subprocess
import time
import weakref
from pathlib import Path

import pytest

from oneflow_cookbook.pool import Pool, PoolError
from tests.jobs import wait_until


def rank_of():
    """On a rank: its number, after all have met."""
    import oneflow as flow

    flow.comm.barrier()
    return flow.env.get_rank()


def fail(rank, how):
    """On one rank raise, exit, die or hang; the others wait for it in a collective."""
    import oneflow as flow

    if flow.env.get_rank() == rank:
        if how == "raise":
            raise ValueError("boom")
        if how == "die":
            os._exit(7)
        time.sleep(1000)
    flow.ones(2, placement=flow.placement.all("cpu"), sbp=flow.sbp.partial_sum).numpy()


def crash_once(folder):
    """On a rank: rank 0 dies of SIGSEGV in the first call, which leaves the file `died`."""
    import oneflow as flow

    flow.comm.barrier()
    died = Path(folder) / "died"
    if flow.env.get_rank() == 0 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    flow.comm.barrier()
    return "well"


def keeps_a_called_graph():
    """On a rank: whether a graph that was called is kept when nothing of ours refers to it."""
    import oneflow as flow

    class Doubled(flow.nn.Graph):
        def build(self, x):
            return 2 * x

    graph = Doubled()
    graph(flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)))
    reference = weakref.ref(graph)
    del graph
    gc.collect()
    return reference() is not None


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


def works(pool):
    return pool.call(f"{__file__}:rank_of") == [0, 1]


@pytest.mark.parametrize(
    "rank, how, text", [(0, "die", "exit code 7"), pytest.param(1, "raise", "ValueError: boom", marks=pytest.mark.slow)]
)
def test_failure_of_one_rank_fails_the_call_and_the_next_one_works(pool, rank, how, text):
    assert works(pool)
    starts = pool.starts
    with pytest.raises(PoolError, match=text) as caught:
        pool.call(f"{__file__}:fail", rank=rank, how=how)
    assert caught.value.rank == rank
    assert works(pool) and pool.starts == starts + 1
    assert works(pool) and pool.starts == starts + 1, "ranks live on between calls"


def with_a_child(program):
    """On a rank: start a program without the environment by which descendants are found; its process id."""
    return subprocess.Popen(["env", "-i", *program]).pid


def status_of(pid):
    """The state of a process as ps shows it; "" if there is none."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""


def test_id_of_a_rank_that_has_ended_is_its_own_until_its_group_has_ended(monkeypatch):
    """Later it may be that of any other process of the user, whose group must get no signal."""
    with Pool(2) as pool:
        child, _ = pool.call(f"{__file__}:with_a_child", program=["sleep", "1000"])
        ranks = pool.ranks
        process = ranks.processes[0]
        os.kill(process.pid, signal.SIGKILL)
        wait_until(ranks.exit_codes, "the end of the rank")
        assert (ranks.exit_codes()[0], status_of(process.pid)) == (-signal.SIGKILL, "Z")
        ranks.dump_tracebacks()  # which must not reap it either
        assert (status_of(process.pid), status_of(child)) == ("Z", "S")
    wait_until(lambda: not status_of(process.pid) and status_of(child) in ("", "Z"), "the end of both")
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a group that is gone gets a signal"))
    ranks.end()


@pytest.mark.slow
def test_hanging_rank_fails_the_call_and_shows_where_it_is():
    shown = ""
    for seconds in (2, 60):  # on a busy machine it may not be there after 2 s
        error = pytest.raises(PoolError, match=f"gave no answer in {seconds} s")
        with Pool(2, timeout=seconds) as pool, error as caught:
            pool.call(f"{__file__}:fail", rank=1, how="hang")
        shown = str(caught.value)
        if re.search(r'test_pool.py", line \d+ in fail', shown):
            return
    raise AssertionError(shown)


@pytest.mark.slow
@pytest.mark.parametrize("repeat", [False, True])
def test_ranks_that_use_much_memory_are_replaced_if_calls_may_be_repeated(repeat, monkeypatch):
    monkeypatch.setattr("oneflow_cookbook.pool.pool.LARGE", 0)
    with Pool(2, repeat=repeat) as pool:
        assert works(pool) and works(pool) and pool.starts == 1 + repeat


def test_graphs_are_kept(pool):
    """OneFlow sometimes aborts when one is freed right after its call."""
    assert pool.call(f"{__file__}:keeps_a_called_graph") == [True, True]


def test_missing_function_is_an_error_of_the_call(pool):
    with pytest.raises(PoolError, match="no_such_function"):
        pool.call(f"{__file__}:no_such_function")


@pytest.mark.slow
def test_call_is_repeated_after_sigsegv_where_that_is_allowed(pool, tmp_path):
    with pytest.raises(PoolError, match=r"rank 0 of 2 died \(SIGSEGV\)"):
        pool.call(f"{__file__}:crash_once", folder=str(tmp_path))
    assert not pool.repeated
    (tmp_path / "died").unlink()
    with Pool(2, repeat=True) as repeating:
        assert repeating.call(f"{__file__}:crash_once", folder=str(tmp_path)) == ["well"] * 2
        assert len(repeating.repeated) == 1
