"""The recipes under OneFlow's own launcher, and as plain Python. They run while other tests do: see conftest.py."""

import sys

import pytest

from tests.jobs import Run, free_port, official
from tests.markdown import ENGLISH, blocks

PROXY = "http://127.0.0.1:9"
HELLO = "recipes/starting/hello_ranks.py"


def by_hand(script, *ranks):
    """A job whose ranks are started one by one, each given as (number, local number or None)."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(ranks))}
    where.update(GLOG_minloglevel="3", OMP_NUM_THREADS="1")
    return [Run(sys.executable, script, RANK=str(rank), LOCAL_RANK=local, **where) for rank, local in ranks]


def early_jobs(tmp_path_factory):
    """OneFlow's own launcher may sleep for 10 s at the start, and so may ranks that are started one by one."""
    return {
        "by hand": by_hand("recipes/row_parallel.py", (0, None), (1, None)),
        "one LOCAL_RANK": by_hand(HELLO, (0, "0"), (1, "0")),
        "LOCAL_RANK again": by_hand(HELLO, (0, "0"), (1, "1"), (2, "0"), (3, "1")),
        "eager": official(2, "recipes/data_parallel.py"),
        "graph": official(4, "recipes/hybrid_parallel.py", "--graph"),
        "unknown option": official(2, "recipes/data_parallel.py", "--graf"),
        "too few ranks": official(2, "recipes/hybrid_parallel.py"),
        "proxy": official(2, "recipes/row_parallel.py", http_proxy=PROXY, https_proxy=PROXY, no_grpc_proxy=","),
    }


def of_the_recipe(out):
    """The lines that a recipe printed; the launcher's own come before them or, where it buffers them, behind."""
    return [line for line in out.splitlines() if "local shapes" in line or "single device" in line]


@pytest.mark.parametrize("name", ["eager", "graph", "proxy"])
def test_recipe_says_that_it_is_right(early, name):
    job = early[name].wait()
    assert job.code == 0, job.err
    assert of_the_recipe(job.out)[-1].endswith("on a single device") and job.all_gone()


def test_what_is_printed_is_the_same_as_through_launch(early):
    shown = blocks(ENGLISH, "text")[0]
    assert of_the_recipe(early["eager"].wait().out) == [line.split("] ", 1)[1] for line in shown.splitlines()]


@pytest.mark.parametrize(
    "name, words",
    [("unknown option", "unrecognized arguments: --graf"), ("too few ranks", "RuntimeError: ")],
)
def test_wrong_start_fails_and_does_not_hang(early, name, words):
    job = early[name].wait()
    assert job.code != 0 and words in job.err and job.all_gone(), job.err


def test_ranks_started_one_by_one(early):
    jobs = [job.wait() for job in early["by hand"]]
    assert [job.code for job in jobs] == [0, 0] and "on a single device" in jobs[0].out


@pytest.mark.parametrize("name", ["one LOCAL_RANK", "LOCAL_RANK again"])
def test_local_rank_that_leaves_a_rank_without_its_shard_is_found(early, name):
    """Ranks of one address that share a LOCAL_RANK: OneFlow goes on, and hello_ranks.py says so."""
    jobs = [job.wait() for job in early[name]]
    assert all(job.code != 0 for job in jobs) and all(job.all_gone() for job in jobs)
    assert any("LOCAL_RANK" in job.err for job in jobs), jobs[-1].err


def test_plain_python():
    job = Run(sys.executable, "recipes/single_device.py", "--graph").wait()
    assert job.code == 0 and "on a single device" in job.out
