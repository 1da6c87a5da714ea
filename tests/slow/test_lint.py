"""Linters report nothing: of the Python code, the shell scripts and the workflow of GitHub Actions."""

import subprocess

import pytest

from tests.cases import ROOT
from tests.environments import linter
from tests.jobs import LAUNCH, Run

COMMANDS = (
    "ruff check .",
    "ruff format --check .",
    "shellcheck --external-sources launch.sh .ci/run docs/clusters/over_ssh.sh docs/clusters/train.sbatch",
    "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/pages.yml",
    "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/tests.yml",
)


@pytest.mark.installs("linters")
@pytest.mark.parametrize("command", COMMANDS)
def test_linter_reports_nothing(command):
    name, *arguments = command.split()
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([linter(name), *arguments], cwd=ROOT, timeout=300, **output)
    assert done.returncode == 0, done.stdout


def test_workflow_calls_what_users_and_ci_call():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    for words in ("recipes/data_parallel.py", "test", "test --all", "test --all --install"):
        assert f"run: ./launch.sh {words}\n" in workflow
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("./launch.sh test --all --install")


def test_what_is_left_out_without_install_is_said():
    job = Run(LAUNCH, "test", "tests/slow/test_lint.py", "-k", "reports_nothing").wait()
    words = f"{len(COMMANDS)} tests are left out, as they install linters: --install runs them"
    assert words in job.out and "passed" not in job.out, job.out
