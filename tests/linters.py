"""Linters, pinned, in an environment of their own: OneFlow needs older versions of what they import."""

import subprocess
import sys

from tests.cases import ROOT

REQUIREMENTS = ROOT / "tests" / "requirements-linters.txt"
HOME = ROOT / ".venv-linters"


class NotInstalled(Exception):
    """The linters cannot be installed; the text is what pip said."""


def linter(name):
    """The path of a linter. Installs all of them at first. Raises NotInstalled."""
    made = HOME / "made"
    if not made.exists() or made.read_text() != REQUIREMENTS.read_text():
        pip = [str(HOME / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(HOME)],
            [*pip, "install", "--only-binary", ":all:", "-r", str(REQUIREMENTS)],
        ):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
            if done.returncode:
                raise NotInstalled(f"{' '.join(command)}\n{done.stdout[-3000:]}")
        made.write_text(REQUIREMENTS.read_text())
    return str(HOME / "bin" / name)
