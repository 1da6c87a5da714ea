"""Start the ranks of one job on this host, and end them all, whatever happens."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

RANK = str(Path(__file__).with_name("rank.py"))


class PortTaken(Exception):
    """The port that ranks are to meet on is held by another program, or this host cannot be reached by itself."""


def reserve_port(port=0):
    """A bound socket that does not listen; keep it open as long as the job runs.

    OneFlow binds its port with SO_REUSEPORT, so two jobs on one port both start and swap their ranks. A socket that
    stays bound, with the same option, keeps the kernel from giving the port to others, and rank 0 can still use it.
    Port 0 means any free port. Raises PortTaken.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:  # without SO_REUSEPORT at first, so that another job's port is refused
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("0.0.0.0", port))
    except OSError as error:
        reserved.close()
        raise PortTaken(f"port {port}: {error.strerror}; leave out --master_port to get a free one") from None
    with socket.socket() as probe:
        probe.settimeout(5)
        where = "127.0.0.1", reserved.getsockname()[1]
        error = probe.connect_ex(where)
        if error not in (0, errno.ECONNREFUSED):  # nobody listens there yet
            reserved.close()
            raise PortTaken("ranks cannot meet at {}:{}: {}; is the loopback up?".format(*where, os.strerror(error)))
    return reserved


def cores_of(rank, world_size, cores=None):
    """The cores that a rank has to itself, or shares where there are fewer than ranks.

    OneFlow's scheduling thread never sleeps while work is under way. Free to move, those of two ranks on two cores took
    a core from the thread that computes: a step of data parallel took 1.8 times as long as bound.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    each = max(1, len(cores) // world_size)
    return [cores[(rank * each + i) % len(cores)] for i in range(each)]


@dataclass
class NodeRanks:
    """The ranks of a job that run on this node, and where all ranks meet."""

    world_size: int
    count: int = 0  # of ranks here; 0: all
    first: int = 0  # the lowest rank here
    local: Optional[int] = 0  # its LOCAL_RANK: how many ranks other nodes have at this very address; None: unset
    before: int = 0  # how many ranks of lower nodes share its cores
    beside: int = 0  # how many ranks of all nodes do; 0: those that run here
    address: str = "127.0.0.1"  # of rank 0
    port: int = 0  # of rank 0; 0: a free one, if rank 0 is here

    def __post_init__(self):
        self.count = self.count or self.world_size
        self.beside = self.beside or self.count

    def cores(self, i):
        """The cores of the i-th rank here."""
        return cores_of(self.before + i, self.beside)


def environment(i, here, port, base=None):
    """The environment of the i-th rank on this node; what the user has set himself stays as it is."""
    variables = dict(os.environ if base is None else base)
    variables.update(MASTER_ADDR=here.address, MASTER_PORT=str(port), WORLD_SIZE=str(here.world_size))
    variables.update(RANK=str(here.first + i), HARNESS_PARENT=str(os.getpid()))
    variables.pop("LOCAL_RANK", None)
    if here.local is not None:
        variables["LOCAL_RANK"] = str(here.local + i)
    variables.setdefault("OMP_NUM_THREADS", str(len(here.cores(i))))
    variables.setdefault("GLOG_minloglevel", "3")  # without it OneFlow warns of missing GPU drivers
    variables["no_grpc_proxy"] = ","  # matches every address: ranks do not meet through an http_proxy
    return variables


def is_consequence(code):
    """Whether an exit code looks like OneFlow's answer to the death of another rank, which is to abort."""
    return code == -signal.SIGABRT


class Ranks:
    """The processes of one job. Use it as a context manager: on leaving it, every process is gone."""

    def __init__(self, command, here, channels=None, variables=None, bind=True, stdout=None, stderr=None, before=None):
        """Start `python harness/start/rank.py *command` for each rank of a NodeRanks. Lists are indexed by local rank.

        channels: for each rank a dict of environment variable -> file descriptor to hand over.
        variables: what all of them have in their environment besides.
        bind: whether each keeps to its cores; see cores_of.
        stdout, stderr: for each rank what subprocess.Popen takes; None inherits ours.
        before: for each rank the words in front of its command, such as those that run it elsewhere.
        """
        self.port = None if here.port else reserve_port()
        port = here.port or self.port.getsockname()[1]
        self.processes, self.job = [], uuid.uuid4().hex
        try:
            for rank in range(here.count):
                own = {**environment(rank, here, port), "HARNESS_JOB": self.job, **(variables or {})}
                handed = channels[rank] if channels else {}
                own.update({name: str(descriptor) for name, descriptor in handed.items()})
                self.processes.append(
                    subprocess.Popen(
                        [*(before[rank] if before else []), sys.executable, "-u", RANK, *command],
                        env=own,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout[rank] if stdout else None,
                        stderr=stderr[rank] if stderr else None,
                        pass_fds=list(handed.values()),
                        start_new_session=True,  # a group of its own, so that its children end with it
                    )
                )
                if bind:
                    with contextlib.suppress(OSError):  # it has ended already
                        os.sched_setaffinity(self.processes[-1].pid, here.cores(rank))
        except BaseException:
            self.end(grace=0)
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def running(self):
        """The ranks that have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def state(self, rank):
        """What a rank that has not ended does, in words."""
        with contextlib.suppress(OSError), open(f"/proc/{self.processes[rank].pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] in "Tt":
                return "is stopped (SIGSTOP, or a debugger)"
        return "is running"

    def show_where(self):
        """Ask each rank that runs for the line at which it is, on its standard error.

        Not what it has started, nor a rank that does not listen yet: SIGUSR1 would end these.
        """
        for rank in self.running():
            process = self.processes[rank]
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/status") as status:
                [caught] = (line.split()[1] for line in status if line.startswith("SigCgt:"))
                if int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
                    process.send_signal(signal.SIGUSR1)

    def end(self, grace=1.0):
        """End every rank: SIGTERM, `grace` seconds, SIGKILL. Returns when all are gone."""
        if grace and self.running():
            for rank in self.running():
                self._signal_group(rank, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self.running() and time.monotonic() < deadline:
                time.sleep(0.01)
        for rank, process in enumerate(self.processes):
            self._signal_group(rank, signal.SIGKILL)  # also what an ended rank has left behind
            process.wait()
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.port:
            self.port.close()

    def _left(self):
        """What ranks have started in sessions of their own, and their children."""
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if entry.name.isdecimal():
                    with open(f"/proc/{entry.name}/environ", "rb") as file:
                        if f"HARNESS_JOB={self.job}".encode() in file.read().split(b"\0"):
                            yield int(entry.name)

    def _signal_group(self, rank, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[rank].pid, number)
