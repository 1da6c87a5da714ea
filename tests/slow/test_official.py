"""The recipes under OneFlow's own launcher, and as plain Python. They run while other tests do: see conftest.py."""

import re
import sys

import pytest

from tests.cases import ROOT
from tests.jobs import Run, free_port, official, without_rounding

PROXY = "http://127.0.0.1:9"
BROKEN = "raise RuntimeError('This package is a placeholder. Please install oneflow')"


def by_hand(*ranks):
    """A job whose ranks are started one by one, each given as (number, local number or None, more arguments)."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(ranks))}
    where.update(GLOG_minloglevel="3", OMP_NUM_THREADS="1")
    return [
        Run(sys.executable, "recipes/row_parallel.py", *more, RANK=str(rank), LOCAL_RANK=local, **where)
        for rank, local, *more in ranks
    ]


def early_jobs(tmp_path_factory):
    """OneFlow's own launcher may sleep for 10 s at the start, and so may ranks that are started one by one."""
    return {
        "by hand": by_hand((0, None), (1, None)),
        "one LOCAL_RANK": by_hand((0, "0"), (1, "0")),
        "LOCAL_RANK again": by_hand((0, "0"), (1, "1"), (2, "0"), (3, "1")),
        "of two jobs": by_hand((0, None), (1, None, "--seed", 7)),
        "eager": official(2, "recipes/data_parallel.py"),
        "graph": official(4, "recipes/hybrid_parallel.py", "--graph"),
        "refused": official(2, "recipes/data_parallel.py", "--batch", 1),
        "proxy": official(2, "recipes/row_parallel.py", http_proxy=PROXY, https_proxy=PROXY),
    }


def of_the_recipe(out):
    """The lines that a recipe printed; the launcher's own come before them or, where it buffers them, behind."""
    return [line for line in out.splitlines() if line.startswith(("rank ", "equal to "))]


@pytest.mark.parametrize("name, n", [("eager", 2), ("graph", 4), ("proxy", 2)])
def test_recipe_says_that_it_is_right(early, name, n):
    job = early[name].wait()
    assert job.code == 0, job.err
    lines = of_the_recipe(job.out)
    assert lines[-1].startswith("equal to the single-device values: largest difference ")
    ranks = [line.split(":")[0] for line in lines[:-1]]
    assert ranks == sorted(ranks) and set(ranks) == {f"rank {rank}" for rank in range(n)}
    assert job.all_gone()


def test_what_is_printed_is_the_same_as_through_launch(early):
    shown = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL).group(1)
    lines = [line.split("] ", 1)[1] for line in without_rounding(shown).splitlines()]
    assert of_the_recipe(without_rounding(early["eager"].wait().out)) == lines


def test_refusal_comes_before_any_rank_blocks(early):
    job = early["refused"].wait()
    assert job.code != 0
    assert "data_parallel.py: --batch 1 does not fit on 2 ranks: type --batch 2" in job.err
    assert job.all_gone()


def test_ranks_started_one_by_one(early):
    jobs = [job.wait() for job in early["by hand"]]
    assert [job.code for job in jobs] == [0, 0] and "equal to the single-device values" in jobs[0].out


def test_ranks_of_two_jobs_that_have_met_say_so(early):
    """What happens to two jobs on one port: each has a rank of the other, and every rank would say that all is well."""
    for job in early["of two jobs"]:
        job.wait()
        words = "ranks of two jobs have met: start all with the same options, each job on a MASTER_PORT of its own"
        assert (job.code, job.out, job.err) == (2, "", f"row_parallel.py: {words}\n")


@pytest.mark.parametrize("name, wrong", [("one LOCAL_RANK", {1: "0"}), ("LOCAL_RANK again", {2: "0", 3: "1"})])
def test_local_rank_that_leaves_a_rank_without_its_shard_is_found(early, name, wrong):
    for rank, job in enumerate(early[name]):
        job.wait()
        assert job.code != 0 and job.out == "" and job.all_gone()
        if rank in wrong:
            holds = f"rank {rank} holds [] in place of [{rank}]: unset LOCAL_RANK, it is {wrong[rank]}"
            assert (job.code, job.err) == (2, f"row_parallel.py: {holds}\n")


def test_plain_python():
    job = Run(sys.executable, "recipes/single_device.py", "--graph").wait()
    assert job.code == 0 and "equal to the single-device values" in job.out
    job = Run(sys.executable, "recipes/data_parallel.py").wait()
    assert job.code == 2
    assert job.err.endswith("data_parallel.py: cannot run on 1 ranks: type -n 2, or --nproc_per_node 2\n")


@pytest.mark.parametrize("content", [BROKEN, "raise ImportError('Unable to import Numpy array')"])
def test_oneflow_that_cannot_be_imported(content, tmp_path):
    """What Python 3.11 and newer get from pip; numpy 2; missing CUDA libraries."""
    (tmp_path / "oneflow.py").write_text(content)
    job = Run(sys.executable, ROOT / "recipes" / "data_parallel.py", cwd=tmp_path, PYTHONPATH=str(tmp_path)).wait()
    assert job.code == 2
    assert len(job.err.splitlines()) == 1 and "it needs Python 3.8-3.10 and requirements.txt" in job.err
