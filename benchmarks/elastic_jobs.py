"""Jobs of elastic_training.py, on one host or on two, and what can be done to them at a random moment."""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

from harness.jobs.hosts import Hosts
from harness.jobs.run import LAUNCH, Run, free_port
from tests.cases import ROOT

ELASTIC = ROOT / "recipes" / "starting" / "elastic_training.py"
STEPS, EVERY = 60, 6
RANKS = {1: 2, 2: 4}  # number of hosts -> of ranks
MOMENTS = (0.03, 0.95)  # of the time that an undisturbed job takes
WRAPPER = """import os, runpy, signal, sys


def fault(signum, frame):
    if os.environ["FAULT"] == "raise":
        raise RuntimeError("injected")
    sys.exit(int(os.environ["FAULT"]))


signal.signal(signal.SIGUSR2, fault)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def signal_process(pid, signum):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
        return True
    return False


@dataclass
class Job:
    """A job of elastic_training.py on one host or on two, from the checkpoints in a folder; it starts at once."""

    hosts: Hosts
    num_hosts: int
    graph: bool
    folder: Path
    rng: Optional[random.Random] = None  # draws when and where the fault comes
    fault: Any = None  # a faults.Fault that is to come
    nodes: Optional[list] = None  # the hosts on which it is started; None: all
    before: Sequence = ()  # words before its commands

    def __post_init__(self):
        self.ranks_each = RANKS[self.num_hosts] // self.num_hosts
        self.hit_rank, self.hit_node = None, 0
        self.checkpoints = Path(self.folder, "checkpoints")
        self.runs, self.lines, self.readers = {}, {}, []
        options, (script, variables) = self._options(), self._script()
        for node in range(self.num_hosts) if self.nodes is None else self.nodes:
            on, node_rank = list(self.before), []
            if self.num_hosts > 1:
                on, node_rank = [*self.hosts.on(node), *on], ["--node_rank", node]
            self.runs[node] = Run(*on, LAUNCH, *options, *node_rank, *script, **variables)
            self.lines[node] = []  # (when, what it said)
            self._start_readers(node)

    def _options(self):
        """The options of launch.sh that are the same on each host."""
        options = ["-n", self.ranks_each, "--timeout", self.fault.timeout if self.fault else 120]
        if self.fault and self.fault.restarts:
            options += ["--max-restarts", 2]
        if self.num_hosts > 1:
            options += ["--nnodes", self.num_hosts]
            options += ["--master_addr", self.hosts.addresses[0], "--master_port", free_port()]
        return options

    def _script(self):
        """The script and its arguments, and the environment variables that it needs."""
        script, variables = [ELASTIC], {}
        if self.fault and self.fault.does:
            wrapper = Path(self.folder, "wrapper.py")
            wrapper.write_text(WRAPPER)
            script, variables = [wrapper, ELASTIC], {"FAULT": self.fault.does}
        script += ["--checkpoint-dir", self.checkpoints, "--steps", STEPS, "--save-every", EVERY]
        script += ["--graph"] * self.graph
        return script, variables

    def _start_readers(self, node):
        for stream in (self.runs[node].process.stdout, self.runs[node].process.stderr):
            reader = threading.Thread(target=self._read, args=(stream, self.lines[node]), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _read(self, stream, lines):
        for line in stream:
            lines.append((time.monotonic(), line.rstrip("\n")))

    def said(self, node):
        return "\n".join(line for _, line in self.lines[node])

    def runs_on(self):
        return any(run.process.poll() is None for run in self.runs.values())

    def well(self):
        """Whether all launchers ended with 0."""
        return all(run.process.poll() == 0 for run in self.runs.values())

    def last_bits(self):
        """The tensors in the checkpoint of the last step; none if it is not there."""
        return sorted(path.read_bytes() for path in (self.checkpoints / str(STEPS)).glob("*/out"))

    def newest(self):
        """The step of the newest checkpoint."""
        return max((int(path.name) for path in self.checkpoints.glob("*") if path.name.isdecimal()), default=0)

    def wait(self, seconds):
        """Until all launchers have ended; False if they do not in that time."""
        deadline = time.monotonic() + seconds
        for run in self.runs.values():
            try:
                run.process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
            finally:
                self.ended = time.monotonic()
        for reader in self.readers:
            reader.join(2)
        return True

    def left(self):
        """How many processes are left; they are ended."""
        left = sum(len(run.alive()) for run in self.runs.values() if not run.all_gone())
        for run in self.runs.values():
            run.kill()
        return left

    def ranks(self):
        """{rank: its process} of all that run."""
        found = {}
        for pid in (pid for run in self.runs.values() for pid in run.ranks()):
            with contextlib.suppress(OSError):
                rank = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
                found[int(rank.group(1))] = pid
        return found


def at_some_moment(do):
    def inject(job):
        time.sleep(job.rng.uniform(*MOMENTS) * job.seconds)
        return do(job)

    return inject


def while_it_trains(do):
    """After any checkpoint but the last ones."""

    def inject(job):
        step = job.rng.randrange(EVERY, STEPS // 2, EVERY)
        while job.newest() < step and job.runs_on():
            time.sleep(0.002)
        return do(job)

    return inject


def signal_rank(signum):
    """To any of the ranks."""

    def send(job):
        running = job.ranks()
        if not running:
            return False
        job.hit_rank, pid = job.rng.choice(sorted(running.items()))
        job.hit_node = job.hit_rank // job.ranks_each
        return signal_process(pid, signum)

    return send


def signal_launcher(signum):
    """As a terminal does, or a scheduler: to launch.sh, not to its ranks."""

    def send(job):
        job.hit_node = job.rng.choice(sorted(job.runs))
        run = job.runs[job.hit_node]
        while run.process.poll() is None and not run.ranks():  # before, bash is at work and ends by the signal itself
            time.sleep(0.01)
        ranks = run.ranks()
        for pid in set(run.alive()) - set(ranks) if run.process.poll() is None else ():
            signal_process(pid, signum)
        return run.process.poll() != 0

    return send


def kill_node(job):
    job.hit_node = job.rng.choice(sorted(job.runs))
    there = job.ranks()
    for pid in job.runs[job.hit_node].alive():
        signal_process(pid, signal.SIGKILL)
    return bool(there)


def pull_link(job):
    job.hit_node = 1
    there = job.ranks()
    job.hosts.link(1, "down")
    return bool(there)


def nothing(job):
    return True
