"""Tools of tests: Debian's packages, and Python's, pinned, each kind in an environment of its own.

Of its own, as OneFlow needs older versions of what they import.
"""

import os
import subprocess
import sys

from tests.cases import ROOT


def apt_install(packages):
    """Install these packages of Debian or Ubuntu, of which some are missing. Needs root."""
    assert os.geteuid() == 0, f"only root can install {' and '.join(packages)}"
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        command = ["apt-get", "--quiet", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300", *words]
        variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=True, timeout=600)


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
