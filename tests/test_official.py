"""The recipes under OneFlow's own launcher, and as plain Python. They run while other tests do: see conftest.py."""

import re
import sys

import pytest

from tests.cases import ROOT
from tests.jobs import Run, official, without_rounding

PROXY = "http://127.0.0.1:9"
BROKEN = "raise RuntimeError('This package is a placeholder. Please install oneflow')"


def early_jobs(tmp_path_factory):
    """OneFlow's own launcher may sleep for 10 s at the start."""
    return {
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
