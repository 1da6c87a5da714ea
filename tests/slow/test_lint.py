"""Linters have nothing to say: of the Python code, the shell scripts and the workflow of GitHub Actions."""

import subprocess

import pytest

from tests.cases import ROOT
from tests.environments import linter

COMMANDS = (
    "ruff check .",
    "ruff format --check .",
    "shellcheck --external-sources launch.sh .ci/run",
    "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/pages.yml",
    "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/tests.yml",
)


def lint(command):
    name, *arguments = command.split()
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([linter(name), *arguments], cwd=ROOT, timeout=300, **output)


@pytest.mark.parametrize("command", COMMANDS)
def test_linter_has_nothing_to_say(command):
    done = lint(command)
    assert done.returncode == 0, done.stdout


def test_linter_refuses_a_bad_workflow(tmp_path):
    right = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert "timeout-minutes:" in right
    (tmp_path / "tests.yml").write_text(right.replace("timeout-minutes:", "timeout_minutes:"))
    done = lint(f"{COMMANDS[-1].rpartition(' ')[0]} {tmp_path / 'tests.yml'}")
    assert done.returncode, "the linter found nothing"


def test_workflow_calls_what_users_and_ci_call():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    for words in ("recipes/data_parallel.py", "test", "test --all"):
        assert f"run: ./launch.sh {words}\n" in workflow
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("./launch.sh test --all")
