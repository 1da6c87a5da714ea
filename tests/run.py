"""Start a whole job as a user does, read what it says, and look at the processes that it leaves."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from harness.start.recipe import ROOT

LAUNCH = str(ROOT / "launch.sh")
LONG = 300  # seconds for what takes few: only what hangs, or is left behind, takes longer
LIMIT = 2 * LONG  # of launch.sh, so that a job ends too when the process that waits for it has been killed
NO_JOB = ("list", "show", "bytes", "shell", "plan", "test", "docs", "bench", "meshes", "mutate", "--help")
MARK = "COOKBOOK_TEST_JOB"
NO_LIBIBVERBS = "libibverbs not available, ibv_fork_init skipped"
WAITS = re.compile(r"^launch\.sh: waiting for .*\n", flags=re.MULTILINE)
OTHERS = ("PYTEST_", "OMP_", "GLOG_", "SLURM_", "OMPI_")  # what surrounds the tests and is not for the jobs
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}


def wait_until(there, what, seconds=LONG, pause=0.02):
    """Wait until there() holds; AssertionError if it does not in time, which says `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(pause)


def marked(mark, command=b""):
    """The processes (no zombies) that have this in their environment, and these bytes in their command."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended in between
            if mark.encode() in (entry / "environ").read_bytes() and command in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


class Run:
    """A job in a session of its own; every process of it carries a mark in its environment, by which it is found.

    variables: what is changed in the environment; None takes a variable away.
    """

    def __init__(self, *command, cwd=ROOT, **variables):
        self.mark = uuid.uuid4().hex
        self.cwd = Path(cwd)
        environment = {**CLEAN, MARK: self.mark, **variables}
        self.read = {"stdout": b"", "stderr": b""}  # by until()
        command = [str(part) for part in command]
        where = command.index(LAUNCH) + 1 if LAUNCH in command else len(command)
        if command[where:] and command[where] not in NO_JOB:
            command[where:where] = ["--timeout", str(LIMIT)]  # if there is another one, the last counts
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout=LONG):
        """Wait for the end; set out, err, waited, code; return self. AssertionError, all killed, if it hangs.

        err is without the line that OneFlow writes on a host which has no libibverbs; launch.sh leaves it out itself.
        And without those by which a launcher says for whom it waits, where that takes long: these are in waited.
        """
        if hasattr(self, "code"):
            return self
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            self.kill()
            said = (self.read["stderr"] + (error.stderr or b"")).decode(errors="replace")
            raise AssertionError(f"{' '.join(self.process.args)} did not end in {timeout} s:\n{said}") from None
        self.out, err = self._text("stdout") + out, self._text("stderr") + err
        self.waited = "".join(WAITS.findall(err))
        self.err = re.sub(f"^{NO_LIBIBVERBS}\n", "", WAITS.sub("", err), flags=re.MULTILINE)
        self.code = self.process.returncode
        return self

    def _text(self, stream):
        return self.read[stream].decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")

    def until(self, text, times=1, stream="stdout"):
        """Read until so many lines hold `text`; return self. AssertionError if they do not come."""
        descriptor, deadline = getattr(self.process, stream).fileno(), time.monotonic() + LONG
        while sum(text in line for line in self._text(stream).splitlines(True) if line.endswith("\n")) < times:
            if not select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0]:
                self.kill()
                raise AssertionError(f"{text!r} did not come in {LONG} s: {self.wait().out}{self.err}")
            data = os.read(descriptor, 65536)
            assert data, f"{text!r} never came: {self.wait().out}{self.err}"
            self.read[stream] += data
        return self

    def signal(self, number):
        """Send a signal to the process that was started; return self."""
        self.process.send_signal(number)
        return self

    def alive(self, command=b""):
        """The processes of this job that run, with these bytes in their command."""
        return marked(f"{MARK}={self.mark}", command)

    def ranks(self):
        """Those of them that are ranks."""
        return self.alive(b"harness/start/rank.py")

    def kill(self):
        """Kill all that is left, those too that are started meanwhile."""
        for _ in range(100):
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):  # it has ended in between
                    os.kill(pid, signal.SIGKILL)
            if self.all_gone(within=0.1):
                break

    def all_gone(self, within=60):
        """Whether no process of the job is left after at most `within` seconds."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.alive(), "the end of all processes", within)
        return not self.alive()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
