"""The recipes under OneFlow's own launcher, and as plain Python. They run while other tests do: see conftest.py."""

import sys

import pytest

from tests.jobs import Run, official, repeated
from tests.markdown import ENGLISH, blocks

RIGHT = {
    "eager": (2, "recipes/data_parallel.py"),
    "graph": (4, "recipes/hybrid_parallel.py", "--graph"),
}


def early_jobs(tmp_path_factory):
    """OneFlow's own launcher may sleep for 10 s at the start."""
    return {
        **{name: official(*arguments) for name, arguments in RIGHT.items()},
        "unknown option": official(2, "recipes/data_parallel.py", "--graf"),
        "too few ranks": official(2, "recipes/hybrid_parallel.py"),
    }


def waited_for(early, name):
    """The job at its end. Once more if it hangs: in OneFlow 0.9.0 a rank rarely does as it exits, in ~RpcServer."""
    try:
        return early[name].wait(60)
    except AssertionError:
        repeated.append(" ".join(map(str, RIGHT[name])))
        early[name] = official(*RIGHT[name])
        return early[name].wait()


@pytest.mark.parametrize("name", RIGHT)
def test_recipe_says_that_it_is_right(early, name):
    job = waited_for(early, name)
    assert job.code == 0, job.err
    assert " on a single device" in job.out and job.all_gone()


def test_what_is_printed_is_the_same_as_through_launch(early):
    """That launcher does not keep lines apart: a rank may write between the pieces of another rank's print."""
    lines = [line.split("] ", 1)[1] for line in blocks(ENGLISH, "text")[0].splitlines() if ") of (" in line]
    out = waited_for(early, "eager").out
    assert {line: out.count(line) for line in lines} == {line: lines.count(line) for line in lines}


@pytest.mark.parametrize(
    "name, words",
    [("unknown option", "unrecognized arguments: --graf"), ("too few ranks", "RuntimeError: ")],
)
def test_wrong_start_fails_and_does_not_hang(early, name, words):
    job = early[name].wait()
    assert job.code != 0 and words in job.err and job.all_gone(), job.err


def test_plain_python():
    job = Run(sys.executable, "recipes/single_device.py", "--graph").wait()
    assert job.code == 0 and job.out.endswith("out equals x @ w in numpy\n")
