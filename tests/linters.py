"""Linters, pinned, in an environment of their own: OneFlow needs older versions of what they import."""

import subprocess
import sys

from tests.cases import ROOT

REQUIREMENTS = ROOT / "tests" / "requirements-linters.txt"
HOME = ROOT / ".venv-linters"


def linter(name):
    """The path of a linter. Installs all of them at first."""
    made = HOME / "made"
    if not made.exists() or made.read_text() != REQUIREMENTS.read_text():
        pip = [str(HOME / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(HOME)],
            [*pip, "install", "--only-binary", ":all:", "-r", str(REQUIREMENTS)],
        ):
            subprocess.run(command, check=True, timeout=600)
        made.write_text(REQUIREMENTS.read_text())
    return str(HOME / "bin" / name)
