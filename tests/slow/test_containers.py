"""docs/containers.md: its image is built with Podman, and a job runs, is limited and is stopped in containers.

No registry is used: this machine's files make a stand-in for the base image python:3.10-slim-bookworm, and containers
see the .venv of this checkout. Podman writes into a folder of its own, and its networks are in a namespace.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cases import ROOT
from tests.environments import apt_install, linter
from tests.hosts import NO_HOSTS
from tests.jobs import EQUAL, MARK, MET, PLAIN, SLEEPS, Run, ended
from tests.markdown import blocks, commands_of

PAGE = ROOT / "docs" / "containers.md"
FILES = {path.name: path.read_text() for path in PAGE.with_suffix("").iterdir()}
RUNS = [line for text in blocks(PAGE, "bash") for line in commands_of(text) if line.startswith("docker run --rm ")]
BUILD, OWN_SCRIPT = "docker build --file docs/containers/Dockerfile --tag cookbook:1 .", "cookbook:1 -n 2 mine.py"
PACKAGES = {"podman": "podman", "runc": "runc", "/usr/lib/podman/netavark": "netavark", "iptables": "iptables"}
VENV = (ROOT / ".venv").resolve()
PATH = os.pathsep.join((os.environ["PATH"], "/usr/local/sbin", "/usr/sbin", "/sbin"))
NAMESPACES = "ip link set lo up && mount -t tmpfs none /run && echo ready && exec sleep infinity"
# docker, as a user types it, is podman in these namespaces. `build` has the host's network, to reach a package index.
SHIM = """#!/bin/sh
verb=$1 net=--net
shift
case $verb in
    build) net= && set -- --network=host --ulimit nofile=4096:4096 --volume {venv}:/cookbook/.venv:ro "$@" ;;
    run) set -- --cpu-shares=16384 --read-only-tmpfs=false --env {mark} --volume {venv}:/cookbook/.venv:ro "$@" ;;
esac
exec nsenter --target {keeper} --mount $net sh -c 'cd "$0" && exec podman "$@"' "$PWD" "$verb" "$@"
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/state"\n'
SETTINGS = """
[containers]
base_hosts_file = "none"
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]

[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
static_dir = "{folder}/images/libpod"
tmp_dir = "{folder}/state/libpod"
volume_path = "{folder}/images/volumes"

[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
# The packages that the real base image has in addition to a minimal Debian.
ADDED = "apt ca-certificates libbz2-1.0 libffi8 liblzma5 libncursesw6 libreadline8 libsqlite3-0 libssl3 netbase zlib1g"
PYTHON, VERSION = Path(sys.base_prefix), "python{}.{}".format(*sys.version_info)

installs = pytest.mark.installs("Podman, as root on Debian 12")


def write_base_image(path):
    """Write a tar with the required packages of Debian, ADDED and what these need, and the Python of .venv."""
    entries = {}  # by name: Podman takes no name twice

    def first(entry):
        return entry if entries.setdefault(entry.name, entry) is entry else None

    with tarfile.open(path, "w") as tar:
        for folder in ("bin", "sbin", "lib", "lib64"):  # links into /usr
            tar.add(f"/{folder}", recursive=False, filter=first)
        for name in ("passwd", "group"):
            tar.add(f"/usr/share/base-passwd/{name}.master", f"etc/{name}", filter=first)
        for parent in [*reversed(PYTHON.parents[:-1]), PYTHON, PYTHON / "bin", PYTHON / "lib"]:
            folder = tarfile.TarInfo(str(parent)[1:])
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755  # for the user of the image
            if first(folder):
                tar.addfile(folder)
        left_out = [str(PYTHON / "lib" / VERSION / name)[1:] for name in ("test", "site-packages")]
        tar.add(PYTHON / "lib" / VERSION, filter=lambda entry: None if entry.name in left_out else first(entry))
        for file in (PYTHON / "bin" / VERSION, *PYTHON.glob("lib/libpython*.so*")):
            tar.add(file, filter=first)
        for file in ("/usr/bin/awk", "/etc/alternatives/awk", *sorted(set(files_of_packages()))):
            tar.add(file, recursive=False, filter=first)


def files_of_packages():
    """The files of the packages of this machine: the required ones, ADDED, and what they need; /bin/X is /usr/bin/X."""
    fields = r"${Package}\t${Priority}\t${Pre-Depends}, ${Depends}\n"
    text = subprocess.check_output(["dpkg-query", "--show", f"--showformat={fields}"], text=True)
    rows = [line.split("\t") for line in text.splitlines()]
    needs = {name: re.findall(r"(?:^|[,|] *)([\w.+-]+)", depends) for name, _, depends in rows}
    names, wanted = set(), [name for name, priority, _ in rows if priority == "required"] + ADDED.split()
    while wanted:
        name = wanted.pop()
        if name in needs and name not in names:
            names.add(name)
            wanted += needs[name]
    for path in subprocess.check_output(["dpkg-query", "--listfiles", *names], text=True).splitlines():
        if path.startswith("/") and path != "/." and os.path.lexists(path) and not path.startswith("/usr/share/doc/"):
            yield os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


class Docker:
    """Podman in namespaces of its own; a context manager. `docker(script)` is the Run of a script of bash."""

    def __init__(self, folder):
        self.folder = folder
        settings = {"CONTAINERS_CONF": folder / "containers.conf", "CONTAINERS_STORAGE_CONF": folder / "storage.conf"}
        self.variables = {
            "PATH": f"{folder}/bin{os.pathsep}{PATH}",
            **{key: str(path) for key, path in settings.items()},
        }

    def __enter__(self):
        command = ["unshare", "--mount", "--net", "sh", "-euc", NAMESPACES]
        self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.keeper.stdout.readline() != "ready\n":
            self._end()
            pytest.skip(NO_HOSTS)
        (self.folder / "storage.conf").write_text(STORAGE.format(folder=self.folder))
        (self.folder / "containers.conf").write_text(SETTINGS.format(folder=self.folder))
        shim = self.folder / "bin" / "docker"
        shim.parent.mkdir()
        shim.write_text(SHIM.format(keeper=self.keeper.pid, mark=MARK, venv=VENV))
        shim.chmod(0o755)
        return self

    def __exit__(self, *_):
        self("docker rm --all --force --time 0").wait()
        self._end()
        shutil.rmtree(self.folder)

    def __call__(self, script, cwd=ROOT):
        return Run("bash", "-euc", script, cwd=cwd, **self.variables)

    def _end(self):
        """With the last process in them, the namespaces end, and with them all mounts."""
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdout.close()


@pytest.fixture(scope="module")
def docker(tmp_path_factory):
    """Docker with the image of the page, built as the page says."""
    missing = sorted({package for name, package in PACKAGES.items() if not shutil.which(name, path=PATH)})
    if missing:
        apt_install(missing)
    clone = tmp_path_factory.mktemp("clone") / "cookbook"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "shared"))
    with Docker(tmp_path_factory.mktemp("docker")) as docker:
        write_base_image(docker.folder / "base.tar")
        base = re.match("FROM (.*)", FILES["Dockerfile"])[1]
        script = f"docker import {docker.folder}/base.tar docker.io/library/{base}; cd {clone}; {BUILD}"
        run = docker(script).wait(1800)
        assert run.code == 0, run.out + run.err
        yield docker


def own_script(tmp_path, options, arguments, text):
    """The command of the page that runs a user's script, mine.py with this text, with options of docker."""
    tmp_path.chmod(0o755)  # for the user of the image
    (tmp_path / "mine.py").write_text(text)
    [command] = [line for line in RUNS if line.endswith(OWN_SCRIPT)]
    return command.replace("--rm", f"--rm {options}").replace(OWN_SCRIPT, f"cookbook:1 {arguments} mine.py")


@installs
@pytest.mark.parametrize("command", [line for line in RUNS if "--read-only" in line or "hybrid" in line])
def test_a_job_of_the_page_runs(docker, command):
    [run] = ended([docker(command)])
    assert (run.code, run.err) == (0, "") and run.out.count(EQUAL) == 1, run.out + run.err


@installs
def test_ranks_share_the_cores_that_the_container_may_use(docker, tmp_path):
    text = f"{PLAIN}print(os.getuid(), len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
    [run] = ended([docker(own_script(tmp_path, "--cpus 1", "-n 2", text), tmp_path)])
    assert sorted(run.out.splitlines()) == ["[0] 1000 1 1", "[1] 1000 1 1"], run.out + run.err


@installs
def test_docker_stop_ends_the_job(docker, tmp_path):
    run = docker(own_script(tmp_path, "--name stopped", "-n 2", f"{MET}{SLEEPS}\n"), tmp_path).until("ready", times=2)
    assert docker("docker stop --time 100 stopped").wait().code == 0
    assert ended([run]) and run.code == 143 and run.err.endswith("launch.sh: SIGTERM: every rank is ended\n")


@pytest.mark.installs("linters")
def test_names_in_the_manifest_agree():
    read = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
    text = subprocess.check_output([linter("python"), "-c", read], input=FILES["train.yaml"], text=True)
    objects = {item["kind"]: item for item in json.loads(text)}
    service, claim, job = (objects[kind] for kind in ("Service", "PersistentVolumeClaim", "Job"))
    spec = job["spec"]["template"]["spec"]
    [container], [volume] = spec["containers"], spec["volumes"]
    command = container["args"][0]
    assert spec["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert f"--master_addr {job['metadata']['name']}-0.{spec['subdomain']} " in command
    assert f"--nnodes {job['spec']['completions']} " in command
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert f"--checkpoint-dir {container['volumeMounts'][0]['mountPath']} " in command
    assert f"USER {spec['securityContext']['runAsUser']}\n" in FILES["Dockerfile"]


@pytest.mark.installs("linters")
def test_files_pass_their_linters(tmp_path):
    (tmp_path / "train.yaml").write_text(FILES["train.yaml"])
    (tmp_path / "Dockerfile").write_text(FILES["Dockerfile"])
    for command in ("kubernetes-validate --kubernetes-version 1.37 --strict train.yaml", "hadolint Dockerfile"):
        program, *arguments = command.split()
        run = Run(linter(program), *arguments, cwd=tmp_path).wait()
        assert run.code == 0, run.out + run.err


def test_set_up_in_the_dockerfile(tmp_path):
    """The instruction that makes .venv, in a folder with no more than the Dockerfile has copied until then."""
    lines = FILES["Dockerfile"].replace("\\\n", "").splitlines()
    [number] = [k for k, line in enumerate(lines) if line.startswith("RUN ") and "ensure_environment" in line]
    for line in lines[:number]:
        if line.startswith("COPY "):
            *sources, target = [word for word in line.split()[1:] if not word.startswith("--")]
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                shutil.copy(str(ROOT / source), str(tmp_path / target))
    command = json.loads(lines[number][len("RUN ") :])
    run = Run(*command, cwd=tmp_path, HOME=str(tmp_path), PYTHON="/nowhere/python").wait()
    assert run.code == 2 and run.err.startswith("launch.sh: PYTHON=/nowhere/python: no such program"), run.err
