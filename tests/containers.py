"""Docker for the tests: Podman, which needs no daemon, with images, containers and networks of its own.

All that it writes is in one folder, and its networks are in a namespace of their own. Needs root and, where a package
is missing, apt-get.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.jobs.hosts import NO_HOSTS
from harness.jobs.run import MARK, Run
from tests import base_image
from tests.cases import ROOT
from tests.environments import apt_install

PROGRAMS = {  # program -> the package of Debian that has it
    "podman": "podman",
    "runc": "runc",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "iptables": "iptables",
    "ip": "iproute2",
}
VENV = (ROOT / ".venv").resolve()
PATH = os.pathsep.join((os.environ["PATH"], "/usr/local/sbin", "/usr/sbin", "/sbin"))
NAMESPACES = "ip link set lo up && mount -t tmpfs none /run && echo ready && exec sleep infinity"
# docker, as a user types it, is podman in these namespaces. `build` has the host's network, to reach a package index.
# Without more shares, all processes of a container together have as much of a busy machine as one process outside.
SHIM = """#!/bin/sh
verb=$1 net=--net
shift
case $verb in
    build) net= && set -- --network=host --ulimit nofile=4096:4096 {mounts} "$@" ;;
    run) set -- --cpu-shares=16384 --read-only-tmpfs=false --env {mark} {mounts} "$@" ;;
esac
exec nsenter --target {keeper} --mount $net sh -c 'cd "$0" && exec podman "$@"' "$PWD" "$verb" "$@"
"""
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/state"
"""
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


def install():
    """Install the packages that are missing."""
    missing = sorted({package for name, package in PROGRAMS.items() if not shutil.which(name, path=PATH)})
    if missing:
        apt_install(missing)


class Docker:
    """A context manager. whole: whether images get a .venv of their own; else they all see the one of this checkout."""

    def __init__(self, folder, whole=False):
        self.folder, self.whole = Path(folder), whole
        self.variables = {
            "PATH": f"{self.folder}/bin{os.pathsep}{PATH}",
            "CONTAINERS_CONF": f"{self.folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.folder}/storage.conf",
        }

    def __enter__(self):
        command = ["unshare", "--mount", "--net", "sh", "-euc", NAMESPACES]
        self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.keeper.stdout.readline() != "ready\n":
            self._end()
            pytest.skip(NO_HOSTS)
        self._write("storage.conf", STORAGE.format(folder=self.folder))
        self._write("containers.conf", SETTINGS.format(folder=self.folder))
        mounts = "" if self.whole else f"--volume {VENV}:/cookbook/.venv:ro"
        shim = SHIM.format(keeper=self.keeper.pid, mark=MARK, mounts=mounts)
        self._write("bin/docker", shim).chmod(0o755)
        return self

    def __exit__(self, *_):
        self("docker rm --all --force --time 0")
        self._end()
        shutil.rmtree(self.folder)

    def __call__(self, script, cwd=ROOT, **variables):
        """The Run of a script of bash, as a user types it; returns at its end."""
        return self.start(script, cwd, **variables).wait()

    def start(self, script, cwd=ROOT, **variables):
        return Run("bash", "-euc", script, cwd=cwd, **{**self.variables, **variables})

    def asked(self, script):
        """What a script prints, which must end well."""
        run = self(script)
        assert run.code == 0, f"{script}: {run.err}"
        return run.out.strip()

    def make_base(self):
        """Make the stand-in for the base image."""
        path = self.folder / "base.tar"
        base_image.write(path)
        self.asked(f"docker import {path} {base_image.NAME}")
        path.unlink()

    def _write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def _end(self):
        """With the last process in them, the namespaces end, and with them all mounts."""
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdout.close()
