"""Set-up of .venv by launch.sh, with real venvs and a real pip, but small stand-ins for the 1.8 GB of packages."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.cases import ROOT
from tests.jobs import Run

PINS = {"oneflow": "0.9.0", "numpy": "1.24.4"}
TOOLS = "awk bash cat cksum cmp cut df dirname env find flock grep head mkdir mv readlink rm sed sort stat tail"
TOOLS += " timeout tr uname xargs"


def wheel(folder, name, version, files):
    """A wheel of pure Python, which pip installs like any other."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for name, version in PINS.items():
        wheel(folder, name, version, {f"{name}/__init__.py": "", f"{name}/_library.so": "x" * 1000})
    return folder


@pytest.fixture
def checkout(tmp_path, wheels):
    """A fresh clone with small requirements: a function that runs its launch.sh on a script that only says hello."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "harness", clone / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "launch.sh", clone)
    (clone / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in PINS.items()))
    (clone / "hello.py").write_text("print('hello')\n")
    variables = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHON": sys.executable,
    }

    def start(**changes):
        changed = {**variables, **changes}
        command = changed.pop("command", [clone / "launch.sh", "-n", "1", "hello.py"])
        return Run(*command, cwd=clone, **changed)

    start.path = clone
    return start


def only_tools(folder, *more):
    """A PATH with the programs that launch.sh needs, and no Python but those given."""
    folder.mkdir()
    for tool in TOOLS.split():
        (folder / tool).symlink_to(shutil.which(tool))
    for program in more:
        shutil.copy(program, folder)
    return str(folder)


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def whole(clone):
    """What launch.sh itself thinks of the clone's .venv."""
    test = 'here=$1; source "$here/harness/environment.sh"; environment_is_whole'
    return subprocess.run(["bash", "-c", test, "bash", str(clone)]).returncode == 0


def test_first_run_sets_up_the_second_does_not_and_damage_heals(checkout):
    first = checkout().wait()
    assert (first.code, first.out.splitlines()[-1]) == (0, "hello"), first.err
    assert "setting up .venv with" in first.err and "about 1.8 GB to download" in first.err
    second = checkout().wait()
    assert (second.code, second.out, second.err) == (0, "hello\n", "")

    venv = checkout.path / ".venv"
    [packages] = venv.glob("lib/python3*/site-packages")
    (packages / "mine.py").write_text("")  # what a user adds is no damage
    assert whole(checkout.path)
    damages = {
        "a library cut short": (packages / "oneflow" / "_library.so", lambda path: path.write_text("x")),
        "a package removed": (packages / "numpy" / "__init__.py", Path.unlink),
        "pip's record of a version": (next(packages.glob("numpy-*.dist-info")) / "RECORD", Path.unlink),
        "set-up not finished": (venv / "made", Path.unlink),
        "other requirements": (checkout.path / "requirements.txt", lambda path: path.write_text("oneflow==0.9.1\n")),
        "a Python that is gone": (venv / "bin" / "python", lambda path: (path.unlink(), path.symlink_to("/gone"))),
    }
    for what, (path, damage) in damages.items():
        if path.is_symlink():
            target = os.readlink(path)
            damage(path)
            assert not whole(checkout.path), what
            path.unlink()
            path.symlink_to(target)
        else:
            content = path.read_bytes()
            damage(path)
            assert not whole(checkout.path), what
            path.write_bytes(content)
        assert whole(checkout.path), what

    (packages / "numpy" / "__init__.py").unlink()
    healed = checkout().wait()
    assert (healed.code, healed.out.splitlines()[-1]) == (0, "hello") and "setting up .venv" in healed.err
    assert whole(checkout.path)


def test_set_up_that_was_killed_is_begun_anew(checkout):
    job = checkout()
    deadline = time.monotonic() + 30
    while not (checkout.path / ".venv" / "bin").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in job.alive():
        os.kill(pid, signal.SIGKILL)
    job.wait()
    assert (checkout.path / ".venv").exists() and not whole(checkout.path)
    again = checkout().wait()
    assert (again.code, again.out.splitlines()[-1]) == (0, "hello"), again.err


def test_two_first_runs_at_once(checkout):
    jobs = [checkout(), checkout()]
    errors = "".join(job.wait().err for job in jobs)
    assert [(job.code, job.out.splitlines()[-1]) for job in jobs] == [(0, "hello")] * 2, errors
    assert errors.count("setting up .venv with") == 1
    assert errors.count("another launch.sh is setting up .venv; waiting for it") == 1


def test_python_is_found_behind_one_that_does_not_run(checkout, tmp_path):
    path = only_tools(tmp_path / "bin", program(tmp_path / "python3.10", "echo 'pyenv: not active' >&2; exit 127"))
    home = tmp_path / "home"
    good = home / ".pyenv" / "versions" / "3.10.99" / "bin"
    good.mkdir(parents=True)
    program(good / "python3", f'exec "{sys.executable}" "$@"')
    job = checkout(PATH=path, HOME=str(home), PYTHON=None, PYENV_ROOT=None).wait()
    assert (job.code, job.out.splitlines()[-1]) == (0, "hello"), job.err
    assert f"with {good / 'python3'} (3." in job.err


@pytest.fixture
def no_python(tmp_path):
    """An environment without any Python that would do."""
    newer = program(tmp_path / "python3", "echo is CPython 3.12.1")
    home = tmp_path / "home"
    home.mkdir()
    path = only_tools(tmp_path / "bin", newer)
    return {"PATH": path, "HOME": str(home), "PYTHON": None, "PYENV_ROOT": None, "CONDA_PREFIX": None}


def test_no_python_says_what_to_do(checkout, no_python):
    job = checkout(**no_python).wait()
    assert (job.code, job.out) == (2, "")
    lines = job.err.splitlines()
    assert lines[0] == (
        "launch.sh: no Python 3.8, 3.9 or 3.10 found, and OneFlow 0.9.0 exists for no newer one; "
        "install one and run this again:"
    )
    assert any("uv python install 3.10" in line for line in lines)
    assert any(line.endswith("/bin/python3: is CPython 3.12.1") for line in lines)


def test_uv_is_asked_for_a_python_where_there_is_none(checkout, no_python, tmp_path):
    answer = f'[[ "$1 $2" == "python find" ]] && echo "{sys.executable}"; exit 0'
    program(Path(no_python["PATH"]) / "uv", answer)
    job = checkout(**no_python).wait()
    assert (job.code, job.out.splitlines()[-1]) == (0, "hello"), job.err
    assert "asking uv for one" in job.err


def refused(job, text):
    assert (job.code, job.out) == (2, ""), job.err
    assert [line for line in job.err.splitlines() if line.startswith("launch.sh: ")][-1].count(text) == 1, job.err
    assert "Traceback" not in job.err
    assert job.all_gone(within=1)


def test_named_python_that_will_not_do(checkout, tmp_path):
    newer = program(tmp_path / "python3.12", "echo is CPython 3.12.1")
    refused(checkout(PYTHON=str(newer)).wait(), f"PYTHON={newer} is CPython 3.12.1; name a Python 3.8, 3.9 or 3.10")
    refused(checkout(PYTHON="/no/such").wait(), "PYTHON=/no/such: no such program")


def test_judgement_of_the_newer_pythons_of_this_machine():
    judge = 'source "$1/harness/environment.sh"; judge "$2"'
    for version in ("3.11", "3.12", "3.13"):
        for python in [
            *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"),
            Path(f"/usr/bin/python{version}"),
        ]:
            if python.exists():
                verdict = subprocess.check_output(["bash", "-c", judge, "bash", ROOT, python], text=True)
                assert verdict.startswith(f"is CPython {version}."), python


def test_other_system(checkout, tmp_path):
    path = only_tools(tmp_path / "bin")
    (tmp_path / "bin" / "uname").unlink()
    program(tmp_path / "bin" / "uname", "[[ $1 == -s ]] && echo Darwin || echo arm64")
    refused(checkout(PATH=path).wait(), "OneFlow 0.9.0 exists for Linux on x86_64 only; this is Darwin arm64")


def test_no_network(checkout):
    job = checkout(PIP_NO_INDEX=None, PIP_FIND_LINKS=None, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0")
    refused(job.wait(), "no package index was reached: check the network")
    assert not (checkout.path / ".venv").exists()


def test_package_that_does_not_exist(checkout):
    (checkout.path / "requirements.txt").write_text("oneflow==0.9.0\nno-such-package==1.0\n")
    refused(checkout().wait(), "pip failed: No matching distribution found for no-such-package==1.0")


def test_too_little_room_is_known_before_the_download(checkout, tmp_path):
    path = only_tools(tmp_path / "bin")
    (tmp_path / "bin" / "df").unlink()
    program(tmp_path / "bin" / "df", "echo Filesystem 1024-blocks Used Available; echo disk 9000000 8000000 1024000")
    refused(checkout(PATH=path).wait(), "set-up needs 6 GB at ")


def test_disk_that_fills_up_during_set_up(checkout, tmp_path):
    """On a small disk of its own, in a mount namespace; df is made to promise more than there is."""
    big = tmp_path / "big"
    big.mkdir()
    for name, version in PINS.items():
        wheel(big, name, version, {f"{name}/__init__.py": "", f"{name}/_library.so": "x" * (90 << 20)})
    path = only_tools(tmp_path / "bin")
    (tmp_path / "bin" / "df").unlink()
    program(tmp_path / "bin" / "df", "echo Filesystem 1024-blocks Used Available; echo disk 9000000 1000 8000000")
    for tool in ("cp", "mount", "unshare"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = f"""mount -t tmpfs -o size=100m tmpfs "{disk}" && cp -r "{checkout.path}/." "{disk}" && cd "{disk}" || exit 1
        ./launch.sh -n 1 hello.py; code=$?; test ! -e .venv || echo LEFT; exit $code"""
    command = ["unshare", "--map-root-user", "--mount", "bash", "-c", inside]
    job = checkout(command=command, PATH=path, PIP_FIND_LINKS=str(big)).wait()
    refused(job, "the disk is full: set-up needs 6 GB at ")


def test_requirements_name_everything_that_is_installed():
    """The environment that runs this test holds what requirements.txt names: nothing more, nothing less."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line[:1].isalpha())
    plain = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    found = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in metadata.distributions()}
    found.pop("pip")
    assert found == plain
    check = subprocess.run([sys.executable, "-m", "pip", "check"], stdout=subprocess.PIPE, text=True)
    assert (check.returncode, check.stdout) == (0, "No broken requirements found.\n")
