"""Tools of tests, pinned, each kind in an environment of its own: OneFlow needs older versions of what they import."""

import subprocess
import sys

from tests.cases import ROOT


def programs(name):
    """The folder of programs of .venv-NAME, which is installed at first from tests/requirements-NAME.txt."""
    requirements, home = ROOT / "tests" / f"requirements-{name}.txt", ROOT / f".venv-{name}"
    made = home / "made"
    if not made.exists() or made.read_text() != requirements.read_text():
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(home)],
            [*pip, "install", "--only-binary", ":all:", "-r", str(requirements)],
        ):
            subprocess.run(command, check=True, timeout=600)
        made.write_text(requirements.read_text())
    return home / "bin"
