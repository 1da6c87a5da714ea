"""Set-up of .venv by launch.sh, with real venvs and a real pip, but small stand-ins for the 1.8 GB of packages."""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cases import ROOT
from tests.jobs import Run

NO_NAMESPACE = 77  # exit code
PINS = {"oneflow": "0.9.0", "numpy": "1.24.4"}
TOOLS = "awk bash cat cksum cut df dirname env find flock grep head mkdir mv readlink rm sed sort stat tail"
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


def make_wheels(folder):
    for name, version in PINS.items():
        wheel(folder, name, version, {f"{name}/__init__.py": "", f"{name}/_library.so": "x" * 1000})
    return folder


class Clone:
    """A fresh clone with small requirements, whose launch.sh runs on a script that only says hello."""

    def __init__(self, folder, wheels):
        self.path = folder / "a clone"
        self.wheels = wheels
        shutil.copytree(ROOT / "harness", self.path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "launch.sh", self.path)
        pins = "".join(f"{name}=={version}\n" for name, version in PINS.items())
        (self.path / "requirements.txt").write_text(pins)
        (self.path / "hello.py").write_text("print('hello')\n")

    def start(self, command=("./launch.sh", "-n", "1", "hello.py"), **changes):
        """Begin a run; changes are made to the environment, where None takes a variable away."""
        variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        return Run(*command, cwd=self.path, **{**variables, "PYTHON": sys.executable, **changes})


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path, make_wheels(tmp_path))


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
    test = 'here=$1; source "$here/harness/start/environment.sh"; environment_is_whole'
    return subprocess.run(["bash", "-c", test, "bash", str(clone)]).returncode == 0


def test_half_made_is_begun_anew_then_starts_at_once_and_damage_is_seen(clone):
    def begun(what):
        job, deadline = clone.start(), time.monotonic() + 30
        while not (clone.path / ".venv" / what).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return job

    for stage in ("bin", "tmp"):  # the venv is made, pip is about to run
        interrupted = begun(stage)
        interrupted.process.terminate()
        assert interrupted.all_gone(within=30)  # pip's set-up, which venv has begun, ends by itself
        assert interrupted.wait().code == 130 and "set-up was interrupted; run this again" in interrupted.err
        assert not (clone.path / ".venv").exists()
    killed = begun("bin")
    killed.kill()
    killed.wait()
    assert (clone.path / ".venv").exists() and not whole(clone.path)
    first = clone.start().wait()
    assert (first.code, first.out.splitlines()[-1]) == (0, "hello"), first.err
    assert "setting up .venv with" in first.err and "about 1.8 GB to download" in first.err
    second = clone.start().wait()
    assert (second.code, second.out, second.err) == (0, "hello\n", "")

    venv = clone.path / ".venv"
    [packages] = venv.glob("lib/python3*/site-packages")
    (packages / "mine.py").write_text("")  # what a user adds is no damage
    assert whole(clone.path)
    damages = {
        "a library cut short": (packages / "oneflow" / "_library.so", lambda path: path.write_text("x")),
        "a package removed": (packages / "numpy" / "__init__.py", Path.unlink),
        "pip's record of a version": (next(packages.glob("numpy-*.dist-info")) / "RECORD", Path.unlink),
        "set-up not finished": (venv / "made", Path.unlink),
        "other requirements": (clone.path / "requirements.txt", lambda path: path.write_text("oneflow==0.9.1\n")),
        "a Python that is gone": (venv / "bin" / "python", lambda path: (path.unlink(), path.symlink_to("/gone"))),
        "a Python that fails": (venv / "bin" / "python", lambda path: (path.unlink(), path.symlink_to("/bin/false"))),
    }
    for what, (path, damage) in damages.items():
        if path.is_symlink():
            target = os.readlink(path)
            damage(path)
            assert not whole(clone.path), what
            path.unlink()
            path.symlink_to(target)
        else:
            content = path.read_bytes()
            damage(path)
            assert not whole(clone.path), what
            path.write_bytes(content)
        assert whole(clone.path), what


def without_python(folder):
    """What to change in the environment so that no Python will be found that would do."""
    newer = program(folder / "python3", "echo is CPython 3.12.1")
    (folder / "home").mkdir()
    path = only_tools(folder / "bin", newer)
    return {"PATH": path, "HOME": str(folder / "home"), "PYTHON": None, "PYENV_ROOT": None, "CONDA_PREFIX": None}


def no_network(folder, wheels):
    index = "http://127.0.0.1:9/simple"
    return Clone(folder, wheels).start(PIP_NO_INDEX=None, PIP_FIND_LINKS=None, PIP_INDEX_URL=index, PIP_RETRIES="0")


def no_such_package(folder, wheels):
    clone = Clone(folder, wheels)
    (clone.path / "requirements.txt").write_text("oneflow==0.9.0\nno-such-package==1.0\n")
    return clone.start()


def disk_that_fills_up(folder, wheels):
    """A small disk of its own, in a mount namespace, and a df that promises more than there is."""
    for name, version in PINS.items():
        wheel(folder, name, version, {f"{name}/__init__.py": "", f"{name}/_library.so": "x" * (90 << 20)})
    path = only_tools(folder / "bin")
    promise(folder / "bin", kilobytes=8_000_000)
    for tool in ("cp", "mount", "unshare"):
        (folder / "bin" / tool).symlink_to(shutil.which(tool))
    disk, clone = folder / "disk", Clone(folder, folder)
    disk.mkdir()
    inside = f"""mount -t tmpfs -o size=100m tmpfs "{disk}" || exit {NO_NAMESPACE}
        cp -r "{clone.path}/." "{disk}" && cd "{disk}" || exit 1
        ./launch.sh -n 1 hello.py; code=$?; test ! -e .venv || echo LEFT; exit $code"""
    unshare = (
        f"unshare --map-root-user --mount bash -c 'exit 0' && exec unshare --map-root-user --mount bash -c '{inside}'"
    )
    return clone.start(["bash", "-c", f"{unshare}; exit {NO_NAMESPACE}"], PATH=path)


def promise(folder, kilobytes):
    """A df that says that so much is free."""
    (folder / "df").unlink()
    program(folder / "df", f"echo Filesystem 1024-blocks Used Available; echo disk 9000000 1000 {kilobytes}")


def early_jobs(tmp_path_factory):
    """Set-ups take seconds, on one core each."""
    wheels = make_wheels(tmp_path_factory.mktemp("wheels"))
    jobs = {
        start.__name__: start(tmp_path_factory.mktemp("early"), wheels)
        for start in (no_network, no_such_package, disk_that_fills_up)
    }
    clone = Clone(tmp_path_factory.mktemp("two"), wheels)
    return {**jobs, "one of two": clone.start(), "the other of two": clone.start()}


def found_python(clone, changes):
    """The Python that launch.sh would take, and what it says meanwhile."""
    command = 'here=$PWD; source harness/start/environment.sh; find_python; echo "$python"'
    job = clone.start(["bash", "-euo", "pipefail", "-c", command], **changes).wait()
    assert job.code == 0, job.err
    return job.out.strip(), job.err


def test_python_behind_one_that_does_not_run(clone, tmp_path):
    changes = without_python(tmp_path)
    program(tmp_path / "bin" / "python3.10", "echo 'pyenv: not active' >&2; exit 127")
    good = tmp_path / "home" / ".pyenv" / "versions" / "3.10.99" / "bin"
    good.mkdir(parents=True)
    program(good / "python3", f'exec "{sys.executable}" "$@"')
    assert found_python(clone, changes) == (str(good / "python3"), "")


def test_python_from_uv_where_there_is_none(clone, tmp_path):
    changes = without_python(tmp_path)
    program(tmp_path / "bin" / "uv", f'[[ "$1 $2" == "python find" ]] && echo "{sys.executable}"; exit 0')
    asked = "launch.sh: no Python 3.8, 3.9 or 3.10 here; asking uv for one\n"
    assert found_python(clone, changes) == (sys.executable, asked)


def test_two_first_runs_at_once(early):
    jobs = [early["one of two"].wait(), early["the other of two"].wait()]
    errors = "".join(job.err for job in jobs)
    assert [(job.code, job.out.splitlines()[-1]) for job in jobs] == [(0, "hello")] * 2, errors
    assert errors.count("setting up .venv with") == 1
    assert errors.count("another launch.sh is setting up .venv; waiting for it") == 1


@pytest.mark.parametrize(
    "start, text",
    [
        ("no_network", "no package index was reached: check the network"),
        ("no_such_package", "pip failed: No matching distribution found for no-such-package==1.0"),
        ("disk_that_fills_up", "the disk is full: set-up needs 6 GB at "),
    ],
)
def test_set_up_that_cannot_end_well_leaves_nothing(early, start, text):
    job = early[start].wait()
    if job.code == NO_NAMESPACE:
        pytest.skip("a disk of its own needs a mount namespace, which this machine does not give")
    refused(job, text)
    assert not (early[start].cwd / ".venv").exists()


def test_no_python_says_what_to_do(clone, tmp_path):
    job = clone.start(**without_python(tmp_path)).wait()
    assert (job.code, job.out) == (2, "")
    lines = job.err.splitlines()
    assert lines[0] == (
        "launch.sh: no Python 3.8, 3.9 or 3.10 found, and OneFlow 0.9.0 exists for no newer one; "
        "install one and run this again:"
    )
    assert any("uv python install 3.10" in line for line in lines)
    assert any(line.endswith("/bin/python3: is CPython 3.12.1") for line in lines)


def refused(job, text):
    assert (job.code, job.out) == (2, ""), job.err
    assert [line for line in job.err.splitlines() if line.startswith("launch.sh: ")][-1].count(text) == 1, job.err
    assert "Traceback" not in job.err
    assert job.all_gone(within=1)


def test_named_python_that_will_not_do(clone, tmp_path):
    newer = program(tmp_path / "python3.12", "echo is CPython 3.12.1")
    refused(clone.start(PYTHON=str(newer)).wait(), f"PYTHON={newer} is CPython 3.12.1; name a Python 3.8, 3.9 or 3.10")
    refused(clone.start(PYTHON="/no/such").wait(), "PYTHON=/no/such: no such program")


def test_judgement_of_the_newer_pythons_of_this_machine():
    judge = 'source "$1/harness/start/environment.sh"; judge "$2"'
    for version in ("3.11", "3.12", "3.13"):
        for python in [
            *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"),
            Path(f"/usr/bin/python{version}"),
        ]:
            if python.exists():
                verdict = subprocess.check_output(["bash", "-c", judge, "bash", ROOT, python], text=True)
                assert verdict.startswith(f"is CPython {version}."), python


def test_other_system(clone, tmp_path):
    path = only_tools(tmp_path / "bin")
    (tmp_path / "bin" / "uname").unlink()
    program(tmp_path / "bin" / "uname", "[[ $1 == -s ]] && echo Darwin || echo arm64")
    refused(clone.start(PATH=path).wait(), "OneFlow 0.9.0 exists for Linux on x86_64 only; this is Darwin arm64")


def test_too_little_room_is_known_before_the_download(clone, tmp_path):
    path = only_tools(tmp_path / "bin")
    promise(tmp_path / "bin", kilobytes=1_024_000)
    refused(clone.start(PATH=path).wait(), "set-up needs 6 GB at ")


def test_requirements_pin_everything_that_is_installed_with_them():
    """Each pinned version is the one that is here, and whatever a pinned package needs is pinned too."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {plain(line.split("==")[0]): line.split("==")[1] for line in lines if line[:1].isalpha()}
    for name, version in pinned.items():
        assert metadata.version(name) == version
        for needed in map(Requirement, metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert plain(needed.name) in pinned, f"{name} needs {needed}"
                assert needed.specifier.contains(pinned[plain(needed.name)]), f"{name} needs {needed}"


def plain(name):
    return name.lower().replace("_", "-")
