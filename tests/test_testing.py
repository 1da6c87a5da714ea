"""What is offered for tests of a user's own: the example of docs/testing.md, right and with one SBP changed."""

import re

import pytest

from harness.jobs.run import LAUNCH, Run
from tests.cases import ROOT
from tests.markdown import blocks

PAGE = ROOT / "docs" / "testing.md"


def run_example(folder, program):
    (folder / "test_mine.py").write_text(program)
    [command] = [block.strip() for block in blocks(PAGE, "bash")]
    return Run("bash", "-c", command.replace("./launch.sh", LAUNCH), cwd=folder).wait()


FAILS = """
import oneflow as flow
from beside import layer
from harness.testing import on_ranks

@on_ranks(2)
def test_shapes():
    ranks = flow.placement.all("cpu")
    x = flow.ones(4, 5, placement=ranks, sbp=flow.sbp.split(0))
    return {"out": (layer(x, flow.ones(6, 8, placement=ranks, sbp=flow.sbp.broadcast)), flow.sbp.split(0), 0)}
"""


def test_failure_begins_with_the_test_s_own_line_in_a_module_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("import oneflow as flow\n\ndef layer(x, w):\n    return flow.matmul(x, w)\n")
    (tmp_path / "test_fails.py").write_text(FAILS)
    job = Run(LAUNCH, "test", "test_fails.py", cwd=tmp_path).wait()
    assert job.code == 1
    shown = job.out[job.out.index("test_shapes[2]") :].splitlines()[1:7]
    assert re.fullmatch(r"rank [01] of 2 failed:", shown[0]) and shown[1].startswith("Traceback")
    assert "test_fails.py" in shown[2] and "layer(x" in shown[3] and "beside.py" in shown[4], shown
    assert "Deprecat" not in job.out and "worker.py" not in job.out


@pytest.fixture
def program():
    [found] = blocks(PAGE, "python")
    assert len(found.splitlines()) <= 20
    return found


def test_example_passes_on_two_three_and_four_ranks(tmp_path, program):
    job = run_example(tmp_path, program)
    assert job.code == 0 and "3 passed" in job.out, job.out


def test_example_without_its_split_names_tensor_rank_expected_and_found(tmp_path, program):
    forgotten = ".to_global(sbp=S(0))"
    assert f"`{forgotten}`" in PAGE.read_text()
    changed = program.replace(forgotten, "")
    assert changed != program
    job = run_example(tmp_path, changed)
    [shown] = blocks(PAGE, "text")
    assert job.code == 1 and "3 failed" in job.out
    assert all(line in job.out for line in shown.splitlines()), job.out
