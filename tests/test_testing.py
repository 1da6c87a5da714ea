"""What is offered for tests of a user's own: the example of docs/testing.md, right and with one SBP changed."""

import pytest

from harness.jobs.run import LAUNCH, Run
from tests.cases import ROOT
from tests.markdown import blocks

PAGE = ROOT / "docs" / "testing.md"


def run_example(folder, program):
    (folder / "test_mine.py").write_text(program)
    [command] = [block.strip() for block in blocks(PAGE, "bash")]
    return Run("bash", "-c", command.replace("./launch.sh", LAUNCH), cwd=folder).wait()


@pytest.fixture
def program():
    [found] = blocks(PAGE, "python")
    assert len(found.splitlines()) <= 20
    return found


def test_example_passes_on_two_and_on_four_ranks(tmp_path, program):
    job = run_example(tmp_path, program)
    assert job.code == 0 and "2 passed" in job.out, job.out


def test_example_with_a_split_turned_to_broadcast_names_tensor_rank_expected_and_found(tmp_path, program):
    changed = program.replace("placement=ranks, sbp=flow.sbp.split(1)", "placement=ranks, sbp=flow.sbp.broadcast")
    assert changed != program
    job = run_example(tmp_path, changed)
    [shown] = blocks(PAGE, "text")
    assert job.code == 1 and "2 failed" in job.out
    assert all(line in job.out for line in shown.splitlines()), job.out
