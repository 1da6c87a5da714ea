"""Set-up of .venv by launch.sh: a real uv, real environments, and small stand-ins for the 1.8 GB of packages."""

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from oneflow_cookbook.start import packages
from tests.cases import ROOT
from tests.jobs import Run, wait_until

NO_NAMESPACE = 77  # exit code
PYTHON = Path(sys._base_executable).resolve()  # as uv does not count the Python of an environment
PINS = {"oneflow": "0.9.0", "numpy": "1.24.4"}
TOOLS = "awk bash cat cksum df dirname env find flock grep head mkdir mv readlink rm sed tail timeout uname"
NOWHERE = "http://127.0.0.1:9"


def wheel(folder, name, version, files):
    """A wheel of pure Python, which is installed like any other."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            entry = zipfile.ZipInfo(inside)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED)
        archive.writestr(f"{info}/RECORD", "".join(f"{inside},,\n" for inside in [*files, f"{info}/RECORD"]))
    return path


@contextlib.contextmanager
def index(folder, wheels):
    """The address of a package index with these wheels."""
    for path in wheels:
        page = folder / "simple" / path.name.split("-")[0]
        page.mkdir(parents=True)
        shutil.copy(path, page)
        (page / "index.html").write_text(f'<a href="../{page.name}/{path.name}">{path.name}</a>')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()


def stand_ins(folder, size=1000):
    folder.mkdir(exist_ok=True)
    pins = PINS.items()
    return [wheel(folder, *pin, {f"{pin[0]}/__init__.py": "", f"{pin[0]}/_library.so": "x" * size}) for pin in pins]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    with index(folder / "served", stand_ins(folder)) as address:
        yield address


@pytest.fixture(scope="session")
def uv(tmp_path_factory):
    """The uv that made our own .venv, or the one that launch.sh would fetch."""
    program = shutil.which("uv") or shutil.which("uv", path=ROOT / ".venv-uv" / "bin")
    if not program:
        folder = tmp_path_factory.mktemp("uv") / "there"
        packages.fetch(str(folder))
        program = str(folder / "bin" / "uv")
    return program


class Clone:
    """A fresh clone with small requirements, whose launch.sh runs a recipe that only says hello.

    uv is on its PATH, in the folder `bin` beside it. Clones in one folder share uv's cache.
    """

    def __init__(self, folder, uv, address, name='it\'s a "clone"\n[1] of $HOME'):
        self.path, self.folder, self.bin, self.address = folder / name, folder, folder / "bin", address
        shutil.copytree(ROOT / "harness", self.path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "launch.sh", self.path)
        pins = "".join(f"{name}=={version}\n" for name, version in PINS.items())
        (self.path / "requirements.txt").write_text(pins)
        (self.path / "recipes").mkdir()
        (self.path / "recipes" / "hello.py").write_text("WORLD_SIZES = (1,)\nprint('hello')\n")
        if not self.bin.exists():
            self.bin.mkdir()
            (self.bin / "uv").symlink_to(uv)

    def start(self, command=("./launch.sh", "hello"), **changes):
        """Begin a run; changes: of environment variables, None removes one."""
        variables = {name: None for name in os.environ if name.startswith(("UV_", "PIP_"))}
        variables.update(PIP_INDEX_URL=self.address, PIP_CONFIG_FILE=os.devnull)
        variables.update(UV_CACHE_DIR=str(self.folder / "cache"), UV_HTTP_RETRIES="0", COOKBOOK_BLAS="builtin")
        variables.update(PYTHON=str(PYTHON), PATH=f"{self.bin}:{os.environ['PATH']}")
        return Run(*command, cwd=self.path, **{**variables, **changes})

    def only_tools(self):
        """A PATH with the programs that launch.sh needs, uv and no Python."""
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        return str(self.bin)

    def replace(self, name, text):
        """Put a bash script in the place of a program on the PATH."""
        path = self.bin / name
        if path.is_symlink():
            path.unlink()
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def whole(self):
        """Whether launch.sh finds the clone's .venv whole."""
        test = 'here=$1; source "$here/harness/oneflow_cookbook/start/environment.sh"; environment_is_whole'
        return subprocess.run(["bash", "-c", test, "bash", str(self.path)]).returncode == 0


@pytest.fixture
def clone(tmp_path, uv, address):
    return Clone(tmp_path, uv, address)


def said_hello(job):
    assert (job.wait().code, job.out.splitlines()[-1:]) == (0, ["hello"]), job.err
    return job.err


def refused(job, text):
    assert (job.wait().code, job.out) == (2, ""), job.err
    assert [line for line in job.err.splitlines() if line.startswith("launch.sh: ")][-1].count(text) == 1, job.err
    assert "Traceback" not in job.err
    assert job.all_gone()


def test_interrupted_is_begun_anew_then_starts_at_once(clone, uv):
    begun = clone.folder / "begun"
    for step in ("venv", "pip install"):
        waits = f'[[ $* != "{step} "*"--python "* ]] || {{ touch "{begun}"; exec sleep 900; }}'
        clone.replace("uv", f'{waits}\nexec "{uv}" "$@"')
        interrupted = clone.start()
        wait_until(begun.exists, step)
        interrupted.process.terminate()
        assert interrupted.all_gone()
        assert interrupted.wait().code == 130 and "set-up was interrupted; run this again" in interrupted.err
        assert not (clone.path / ".venv").exists()
        begun.unlink()
    killed = clone.start()
    wait_until(begun.exists, "pip install")
    killed.kill()
    assert (clone.path / ".venv").exists() and not clone.whole()
    clone.replace("uv", f'exec "{uv}" "$@"')
    first = said_hello(clone.start())
    assert f"launch.sh: setting up .venv with {PYTHON}\n" in first and "about 1.8 GB to download" in first
    assert said_hello(clone.start()) == ""


def test_damage_is_seen_and_repaired(clone):
    said_hello(clone.start(PYTHONDONTWRITEBYTECODE="1"))  # as in many images
    venv = clone.path / ".venv"
    [packages] = venv.glob("lib/python3*/site-packages")
    assert list((packages / "oneflow" / "__pycache__").glob("__init__.*.pyc"))  # else each rank would compile it again
    (packages / "mine.py").write_text("")  # what a user adds is no damage
    assert clone.whole()
    damages = {
        "a package removed": (packages / "numpy" / "__init__.py", Path.unlink),
        "the record of a version": (next(packages.glob("numpy-*.dist-info")) / "RECORD", Path.unlink),
        "set-up not finished": (venv / "made", Path.unlink),
        "other requirements": (clone.path / "requirements.txt", lambda path: path.write_text("oneflow==0.9.1\n")),
        "a Python that is gone": (venv / "bin" / "python", lambda path: (path.unlink(), path.symlink_to("/gone"))),
        "a Python that fails": (venv / "bin" / "python", lambda path: (path.unlink(), path.symlink_to("/bin/false"))),
    }
    for what, (path, damage) in damages.items():
        copy = path.with_name("copy")
        shutil.copy2(path, copy, follow_symlinks=False)
        damage(path)
        assert not clone.whole(), what
        copy.replace(path)
        assert clone.whole(), what
    library = packages / "oneflow" / "_library.so"
    library.write_text("cut short")  # in uv's cache too, of which it is a link
    assert not clone.whole()
    said_hello(clone.start())
    assert library.read_text() == "x" * 1000 and clone.whole()


def test_ranks_get_none_of_the_settings_of_the_set_up(clone):
    """Such as the password of an index, which pip's settings may have."""
    (clone.path / "recipes" / "hello.py").write_text("import os\nWORLD_SIZES = (1,)\nprint(*sorted(os.environ))\n")
    (clone.folder / "pip.conf").write_text(
        f"[global]\nindex-url = {clone.address.replace('//', '//me:secret@')}\nextra-index-url = {clone.address}\n"
        f"find-links = {clone.folder}\ntrusted-host = 127.0.0.1\nproxy = {NOWHERE}\ncert = {os.devnull}\ntimeout = 7\n"
    )
    changes = {"PIP_INDEX_URL": None, "PIP_CONFIG_FILE": str(clone.folder / "pip.conf"), "no_proxy": "127.0.0.1"}
    first, second = (clone.start(**changes).wait() for _ in range(2))
    assert "launch.sh: ready: .venv took" in first.err and second.err == "" and "RANK" in second.out
    assert first.out == second.out


def test_second_clone_needs_no_network(tmp_path, uv):
    with index(tmp_path / "index", stand_ins(tmp_path / "wheels")) as address:
        clone = Clone(tmp_path, uv, address)
        said_hello(clone.start())
    second = Clone(tmp_path, uv, address, "second clone")
    assert "to download" not in said_hello(second.start())
    library = ".venv/lib/python3*/site-packages/numpy/_library.so"
    [first_copy], [second_copy] = clone.path.glob(library), second.path.glob(library)
    assert first_copy.samefile(second_copy)


def test_first_runs_that_come_meanwhile_wait(clone):
    holder = Run("flock", clone.path / ".venv.lock", "sleep", "900")
    try:
        wait_until((clone.path / ".venv.lock").exists, "the lock")
        jobs = [clone.start(), clone.start()]
        for job in jobs:
            job.until("another launch.sh is setting up .venv; waiting for it", stream="stderr")
    finally:
        holder.kill()
    errors = "".join(said_hello(job) for job in jobs)
    assert errors.count("setting up .venv with") == 1


# Why there is no environment -> programs that are replaced, what is changed in the environment, the message.
REFUSED = {
    "no network": ({}, {"PIP_INDEX_URL": NOWHERE}, "uv failed, see above"),
    "another system": (
        {"uname": "[[ $1 == -s ]] && echo Darwin || echo arm64"},
        {},
        "OneFlow 0.9.0 exists for Linux on x86_64 only; this is Darwin arm64",
    ),
    "too new a Python": (
        {"python3.12": "echo CPython 3.12.1"},
        {"PYTHON": "python3.12"},
        "PYTHON=python3.12 is CPython 3.12.1; name a Python 3.8, 3.9 or 3.10",
    ),
    "no such Python": ({}, {"PYTHON": "/no/such"}, "PYTHON=/no/such: no such program"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_set_up_that_cannot_be_is_refused(clone, why):
    programs, variables, text = REFUSED[why]
    for name, script in programs.items():
        clone.replace(name, script)
    refused(clone.start(**variables), text)
    assert not (clone.path / ".venv").exists()


def test_disk_that_fills_up(clone):
    disk = clone.folder / "disk"
    disk.mkdir()
    inside = f"""mount -t tmpfs -o size=100m tmpfs "{disk}" || exit {NO_NAMESPACE}
        cp -r . "{disk}" && cd "{disk}" || exit 1
        ./launch.sh hello; code=$?; test ! -e .venv || echo LEFT; exit $code"""
    unshare = "unshare --map-root-user --mount bash -c"
    command = f"{unshare} 'exit 0' && exec {unshare} '{inside}'; exit {NO_NAMESPACE}"
    with index(clone.folder / "index", stand_ins(clone.folder / "wheels", size=90 << 20)) as address:
        job = clone.start(["bash", "-c", command], UV_CACHE_DIR=str(disk / "cache"), PIP_INDEX_URL=address).wait()
    if job.code == NO_NAMESPACE:
        pytest.skip("a disk of its own needs a mount namespace, which this machine does not give")
    refused(job, "uv failed, see above")
    assert "No space left on device" in job.err


def test_each_setting_of_pip_becomes_one_of_uv(tmp_path, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    for name in ("ALL_PROXY", "SSL_CERT_FILE", "SSL_CLIENT_CERT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://first/simple\nextra-index-url =\n    https://second/simple\n    https://third/simple\n"
        "proxy = http://proxy:3128\ncert = /a cert.pem\ntimeout = 7\n[install]\nindex-url = https://fourth/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "first")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "9")  # what is set for uv stays
    packages.print_settings()
    assert set(capsys.readouterr().out.splitlines()[1:]) == {
        "local -x UV_DEFAULT_INDEX=https://fourth/simple",
        "local -x UV_INDEX='https://second/simple https://third/simple'",
        "local -x UV_FIND_LINKS=/a,/b",
        "local -x UV_INSECURE_HOST=first",
        "local -x ALL_PROXY=http://proxy:3128",
        "local -x SSL_CERT_FILE='/a cert.pem'",
        "local -x UV_HTTP_RETRIES=1",
        "command+=(--no-index)",
    }


def wheel_of_uv(folder, uv):
    """A stand-in for uv's wheel, whose program calls the real one."""
    script = f'#!/bin/bash\nexec "{uv}" "$@"\n'
    return wheel(folder, "uv", packages.UV, {f"uv-{packages.UV}.data/scripts/uv": script})


def test_uv_comes_by_pip_where_there_is_none(clone, uv):
    clone.replace("uv", "exit 127")  # on PATH, but it does not run
    stand_ins(clone.folder / "wheels")
    wheel_of_uv(clone.folder / "wheels", uv)
    said_hello(clone.start(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(clone.folder / "wheels")))
    assert (clone.path / ".venv-uv" / "bin" / "uv").exists()


@pytest.mark.parametrize("known", [True, False])
def test_uv_comes_from_the_index_if_it_is_the_one_known(tmp_path, monkeypatch, uv, known):
    path = wheel_of_uv(tmp_path, uv).rename(tmp_path / packages.WHEEL)
    if known:
        monkeypatch.setattr(packages, "SHA256", packages.hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    with index(tmp_path / "index", [path]) as address:
        monkeypatch.setenv("PIP_INDEX_URL", address)
        if known:
            packages.from_index(str(tmp_path / "there"))
            fetched = tmp_path / "there" / "bin" / "uv"
            assert subprocess.check_output([fetched, "--version"]) == subprocess.check_output([uv, "--version"])
        else:
            with pytest.raises(ValueError, match="unexpected checksum"):
                packages.from_index(str(tmp_path / "there"))


def without_python(clone):
    """What to change in the environment so that there is no suitable Python."""
    clone.replace("python3", "echo 'pyenv: not active' >&2; exit 127")
    (clone.folder / "home").mkdir()
    changes = {"PATH": clone.only_tools(), "HOME": str(clone.folder / "home")}
    return {**changes, **dict.fromkeys(("PYTHON", "PYENV_ROOT", "CONDA_PREFIX", "XDG_DATA_HOME"))}


def test_python_behind_one_that_does_not_run(clone):
    changes = without_python(clone)
    good = clone.folder / "home" / ".pyenv" / "versions" / "3.10.99" / "bin"
    good.mkdir(parents=True)
    (good / "python3").symlink_to(PYTHON)
    assert f"setting up .venv with {good}/python3\n" in said_hello(clone.start(**changes))


def test_python_that_uv_fetches(clone, uv):
    changes = without_python(clone)
    clone.replace(
        "uv",
        f"""case $* in
            "python install 3.10") : >"{clone.folder}/fetched"; exit ;;
            "python find "*) [[ -e "{clone.folder}/fetched" ]] && echo "{PYTHON}"; exit ;;
        esac
        exec "{uv}" "$@" """,
    )
    assert "launch.sh: no Python 3.8, 3.9 or 3.10 here; uv fetches one\n" in said_hello(clone.start(**changes))


def test_no_python_says_what_to_do(clone):
    job = clone.start(**without_python(clone), UV_PYTHON_INSTALL_MIRROR=NOWHERE)
    refused(job, "OneFlow 0.9.0 exists for Python 3.8 to 3.10 only, and uv could not fetch one, see above")
    assert "\n  pyenv install 3.10\n" in job.err


def test_requirements_pin_everything_that_is_installed_with_them():
    """Each pinned version is installed here, and whatever a pinned package needs is pinned too."""
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
