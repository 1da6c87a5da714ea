"""Linters have nothing to say: of the Python code, the shell scripts and the workflow of GitHub Actions."""

import subprocess

import pytest

from tests.cases import ROOT
from tests.linters import linter

COMMANDS = (
    "ruff check .",
    "ruff format --check .",
    "shellcheck --external-sources launch.sh .ci/run",
    "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/tests.yml",
)
BAD_WORKFLOWS = {  # what is wrong -> the text and what stands in its place
    "unknown key": ("timeout-minutes:", "timeout_minutes:"),
    "job without a machine": ("    runs-on: ubuntu-22.04\n", ""),
    "step that does nothing": ("run: ./launch.sh test\n", "ran: ./launch.sh test\n"),
}


def lint(command, **options):
    name, *arguments = command.split()
    return subprocess.run(
        [linter(name), *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_linter_has_nothing_to_say(command):
    done = lint(command, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("what", BAD_WORKFLOWS)
def test_linter_refuses_a_bad_workflow(what, tmp_path):
    right = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    good, bad = BAD_WORKFLOWS[what]
    assert good in right
    (tmp_path / "tests.yml").write_text(right.replace(good, bad))
    done = lint(f"{COMMANDS[-1].rpartition(' ')[0]} {tmp_path / 'tests.yml'}", timeout=300)
    assert done.returncode, "the linter found nothing"


def test_workflow_calls_what_users_and_ci_call():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    commands = ("run: ./launch.sh recipes/data_parallel.py\n", "run: ./launch.sh test\n", "run: bash .ci/run\n")
    assert all(command in workflow for command in commands)
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("./launch.sh test --all")
