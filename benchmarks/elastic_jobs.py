"""Jobs of elastic_training.py, on one host or on two, each a network namespace with an address of its own."""

import contextlib
import os
import re
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Sequence

from harness.jobs.hosts import Hosts
from harness.jobs.run import LAUNCH, Run
from tests.cases import ROOT

ELASTIC = ROOT / "recipes" / "starting" / "elastic_training.py"
STEPS, EVERY = 60, 6
RANKS = {1: 2, 2: 4}  # number of hosts -> of ranks
ENDS = 300  # seconds after which a job that nobody disturbs counts as hung
WRAPPER = """import os, runpy, signal, sys


def fault(signum, frame):
    if os.environ["FAULT"] == "raise":
        raise RuntimeError("injected")
    sys.exit(int(os.environ["FAULT"]))


signal.signal(signal.SIGUSR2, fault)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Setting:
    """How a job differs from a plain one."""

    timeout: float = ENDS  # of launch.sh, in seconds
    max_restarts: int = 0
    on_signal: str = ""  # what a rank does on SIGUSR2: raise, or exit with a code
    nodes: Optional[Sequence] = None  # the hosts on which it is started at once; None: all
    before: Sequence = ()  # words before launch.sh, on each host
    port: int = 0  # where it meets; 0: any free one
    scripts: dict = field(default_factory=dict)  # node -> a script in place of the recipe
    steps: int = STEPS
    more: dict = field(default_factory=dict)  # node -> more arguments of the script


def is_checkpoint(path):
    return path.name.isdecimal()


def newest(checkpoints):
    """The step of the newest checkpoint in a folder, 0 if there is none."""
    return max((int(path.name) for path in checkpoints.glob("*") if is_checkpoint(path)), default=0)


def bits(checkpoints):
    """The tensors in the checkpoint of the last step, byte by byte; none if it is not there."""
    return sorted(path.read_bytes() for path in (checkpoints / str(STEPS)).glob("*/out"))


class Job:
    """A job from the checkpoints in a folder; it starts at once."""

    def __init__(self, hosts: Hosts, num_hosts: int, graph: bool, folder: Path, setting: Optional[Setting] = None):
        self.hosts, self.num_hosts, self.graph, self.folder = hosts, num_hosts, graph, folder
        self.setting = setting = setting or Setting()
        self.ranks_each = RANKS[num_hosts] // num_hosts
        self.checkpoints, self.work, self.temporary = folder / "checkpoints", folder / "work", folder / "temporary"
        self.work.mkdir(exist_ok=True)
        self.temporary.mkdir(exist_ok=True)
        self.port = setting.port or next(hosts.ports)
        self.runs, self.lines, self.readers = {}, {}, []  # lines: by node, (when, what it said)
        self.begun = time.monotonic()
        for node in range(num_hosts) if setting.nodes is None else setting.nodes:
            self.start(node)

    def start(self, node):
        """Start launch.sh on a host."""
        command = [*self.hosts.on(node), "env", "-C", self.work, *self.setting.before, LAUNCH, *self._options(node)]
        script, variables = self._script(node)
        self.runs[node] = Run(*command, *script, TMPDIR=str(self.temporary), **variables)
        self.lines[node] = []
        for stream in (self.runs[node].process.stdout, self.runs[node].process.stderr):
            reader = threading.Thread(target=self._read, args=(stream, self.lines[node]), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _options(self, node):
        setting = self.setting
        options = ["-n", self.ranks_each, "--timeout", setting.timeout, "--max-restarts", setting.max_restarts]
        if self.num_hosts > 1:
            options += ["--nnodes", self.num_hosts, "--node_rank", node, "--master_addr", self.hosts.addresses[0]]
        return [*options, "--master_port", self.port]

    def _script(self, node):
        """The script and its arguments, and the environment variables that it needs."""
        script, variables = [self.setting.scripts.get(node, ELASTIC)], {}
        if self.setting.on_signal:
            wrapper = self.folder / "wrapper.py"
            wrapper.write_text(WRAPPER)
            script, variables = [wrapper, ELASTIC], {"FAULT": self.setting.on_signal}
        script += ["--checkpoint-dir", self.checkpoints, "--steps", self.setting.steps, "--save-every", EVERY]
        return [*script, *["--graph"] * self.graph, *self.setting.more.get(node, ())], variables

    def _read(self, stream, lines):
        for line in stream:
            lines.append((time.monotonic(), line.rstrip("\n")))

    def said(self, node):
        return "\n".join(line for _, line in self.lines[node])

    def when(self, words):
        """When a launcher said these words for the first time, the last of those that did; None if none did."""
        times = [[when for when, line in lines if words in line] for lines in self.lines.values()]
        return max((some[0] for some in times if some), default=None)

    def goes_on(self):
        return any(run.process.poll() is None for run in self.runs.values())

    def well(self):
        """Whether all launchers ended with 0."""
        return all(run.process.poll() == 0 for run in self.runs.values())

    def wait(self, seconds=ENDS):
        """Until all launchers have ended; False if they do not in that time."""
        deadline = time.monotonic() + seconds
        for run in self.runs.values():
            try:
                run.process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
            except BaseException:
                self.kill()
                raise
            finally:
                self.ended = time.monotonic()
        for reader in self.readers:
            reader.join(2)
        return True

    def left(self):
        """How many processes are left; they are ended."""
        left = sum(len(run.alive()) for run in self.runs.values() if not run.all_gone())
        self.kill()
        return left

    def kill(self):
        for run in self.runs.values():
            run.kill()

    def ranks(self):
        """{rank: its process} of all that run."""
        found = {}
        for pid in (pid for run in self.runs.values() for pid in run.ranks()):
            with contextlib.suppress(OSError):
                rank = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
                if rank:
                    found[int(rank.group(1))] = pid
        return found

    def launchers(self, node):
        """The processes of launch.sh on a host, once its ranks are there; before that bash makes them ready."""
        run = self.runs[node]
        while run.process.poll() is None and not run.ranks():
            time.sleep(0.01)
        ranks = run.ranks()
        return set(run.alive()) - set(ranks) if run.process.poll() is None else set()


def signal_process(pid, signum):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
        return True
    return False
