"""Install what tests need: packages of Debian, and Python programs in an environment beside OneFlow's."""

import os
import shutil
import subprocess
import sys

from tests.cases import ROOT

PEERS = ROOT / ".venv-peers" / "bin"  # PyTorch and JAX


def apt_install(packages):
    """Install these packages of Debian or Ubuntu. Needs root."""
    assert os.geteuid() == 0, f"only root can install {' and '.join(packages)}"
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        command = ["apt-get", "--quiet", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300", *words]
        variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=True, timeout=600)


def programs(name):
    """The folder of programs of .venv-NAME; installed from tests/requirements-NAME.txt if it is missing or outdated."""
    requirements, home = ROOT / "tests" / f"requirements-{name}.txt", ROOT / f".venv-{name}"
    installed = home / "installed"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(home)],
            [*pip, "install", "--only-binary", ":all:", "-r", str(requirements)],
        ):
            subprocess.run(command, check=True, timeout=600)
        installed.write_text(requirements.read_text())
    return home / "bin"


def peers():
    """The folder of programs of .venv-peers: PyTorch and JAX. Installed if it is missing.

    They need a newer Python than OneFlow; None where there is none.
    """
    requirements = ROOT / "benchmarks" / "requirements-peers.txt"
    if not (PEERS / "torchrun").exists():
        names = [f"python3.{minor}" for minor in range(11, 15)]
        newer = next((path for path in map(shutil.which, names) if path and runs(path)), None)
        if newer is None:
            return None
        for command in (
            [newer, "-m", "venv", "--clear", str(PEERS.parent)],
            [str(PEERS / "pip"), "install", "--only-binary", ":all:", "-r", str(requirements)],
        ):
            subprocess.run(command, check=True, timeout=1800)
    return PEERS


def runs(python):
    """Whether this Python runs: the shims of pyenv fail where their version is not active."""
    return subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0


def linter(name):
    """The path of a linter."""
    return str(programs("linters") / name)
