"""Start whole jobs through launch.sh or OneFlow's own launcher, and look at the processes that they leave."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.cases import ROOT

LAUNCH = str(ROOT / "launch.sh")
MARK = "COOKBOOK_TEST_JOB"
NO_LIBIBVERBS = "libibverbs not available, ibv_fork_init skipped"
OTHERS = ("PYTEST_", "OMP_", "GLOG_", "SLURM_", "OMPI_")  # what surrounds the tests and is not for the jobs
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}


class Run:
    """A job in a session of its own; every process of it carries a mark in its environment, by which it is found.

    variables: what is changed in the environment; None takes a variable away.
    """

    def __init__(self, *command, cwd=ROOT, **variables):
        self.mark = uuid.uuid4().hex
        self.cwd = Path(cwd)
        environment = {**CLEAN, MARK: self.mark, **variables}
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout=90):
        """Wait for the end, set out, err, code and seconds, return self. TimeoutExpired, all killed, if it hangs.

        err is without the line that OneFlow writes on a host which has no libibverbs; launch.sh leaves it out itself.
        """
        if hasattr(self, "code"):
            return self
        try:
            self.out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
        self.err = re.sub(f"^{NO_LIBIBVERBS}\n", "", err, flags=re.MULTILINE)
        self.code, self.seconds = self.process.returncode, time.monotonic() - self.begin
        return self

    def until(self, text):
        """Read standard output until a line holds `text`."""
        for line in self.process.stdout:
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came: {self.process.stderr.read()}")

    def alive(self):
        """The processes of this job that run (a zombie does not)."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def ranks(self):
        """Those of them that are ranks."""
        found = []
        for pid in self.alive():
            with contextlib.suppress(OSError):  # it has ended in between
                if b"harness/rank.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def all_gone(self, within=5):
        """Whether no process of the job is left after at most `within` seconds."""
        deadline = time.monotonic() + within
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive()


def ended(runs):
    """All of them, at their end, with nothing left."""
    for run in runs:
        run.wait()
    assert all(run.all_gone() for run in runs)
    return runs


def without_rounding(text):
    """What a recipe printed but for the size of the rounding, which hangs on the kernels that the CPU has."""
    return re.sub(r"(largest difference) [\d.]+e-0[78]\b", r"\1 ROUNDING", text)


def launch(*arguments, **options):
    """./launch.sh with these arguments, from start to end."""
    return Run(LAUNCH, *arguments, **options).wait()


def official(n, *arguments, **options):
    """OneFlow's own launcher, which starts a script's ranks, on a port of its own; returns at once."""
    command = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", n, "--master_port", free_port()]
    return Run(*command, *arguments, **options)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
