"""The rank processes of one job on this node: their port, cores and environment, their start and their end."""

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

from harness.start.options import BadInput

RANK = str(Path(__file__).with_name("rank.py"))


def reserve_port(port=0):
    """A bound socket that does not listen; keep it open as long as the job runs. Port 0: any free one.

    OneFlow binds its port with SO_REUSEPORT, so two jobs on one port both start and swap their ranks. A socket that
    stays bound, with the same option, keeps the kernel from giving the port to others, and rank 0 can still use it.
    Raises BadInput if another program uses the port.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:  # without SO_REUSEPORT, so that another job's port is refused
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("0.0.0.0", port))
    except OSError as error:
        reserved.close()
        raise BadInput(f"port {port}: {error.strerror}; leave out --master_port to get a free one") from None
    with socket.socket() as probe:
        probe.settimeout(5)
        error = probe.connect_ex(("127.0.0.1", reserved.getsockname()[1]))
    if error not in (0, errno.ECONNREFUSED):  # nobody listens there yet
        reserved.close()
        raise BadInput(f"ranks cannot meet at 127.0.0.1: {os.strerror(error)}; is the loopback interface up?")
    return reserved


def cores_of(rank, world_size, cores=None):
    """The cores that a rank is bound to; ranks share a core where there are more ranks than cores.

    OneFlow's scheduling thread never sleeps while work is under way. Unbound, it takes time from the computing threads
    of other ranks: a step of data parallel on two ranks and two cores took 1.8 times as long.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    each = max(1, len(cores) // world_size)
    return [cores[(rank * each + i) % len(cores)] for i in range(each)]


@dataclass
class NodeRanks:
    """The ranks of a job that run on this node, and where all ranks meet."""

    world_size: int
    count: int = 0  # number of ranks on this node; 0: all
    first: int = 0  # the lowest of them
    local_rank: Optional[int] = 0  # its LOCAL_RANK, which counts the ranks at this node's address; None: unset
    core_slot: int = 0  # its place among the ranks that share this node's cores
    core_slots: int = 0  # number of these; 0: the ranks of this node
    address: str = "127.0.0.1"  # of rank 0
    port: int = 0  # of rank 0; 0: a free one, if rank 0 is on this node

    def __post_init__(self):
        self.count = self.count or self.world_size
        self.core_slots = self.core_slots or self.count

    def cores(self, i):
        """The cores of local rank i."""
        return cores_of(self.core_slot + i, self.core_slots)


def environment(i, node, port, base=None):
    """The environment of local rank i of a NodeRanks. Settings of the user's, such as OMP_NUM_THREADS, are kept."""
    variables = dict(os.environ if base is None else base)
    variables.update(MASTER_ADDR=node.address, MASTER_PORT=str(port), WORLD_SIZE=str(node.world_size))
    variables.update(RANK=str(node.first + i), HARNESS_PARENT=str(os.getpid()))
    variables.pop("LOCAL_RANK", None)
    if node.local_rank is not None:
        variables["LOCAL_RANK"] = str(node.local_rank + i)
    variables.setdefault("OMP_NUM_THREADS", str(len(node.cores(i))))
    variables.setdefault("GLOG_minloglevel", "3")  # without it OneFlow warns of missing GPU drivers
    variables["no_grpc_proxy"] = ","  # matches every address: ranks do not meet through an http_proxy
    return variables


def is_consequence(code):
    """Whether an exit code looks like OneFlow's answer to the death of another rank, which is to abort."""
    return code == -signal.SIGABRT


class Ranks:
    """The processes of one job on this node; a context manager that ends them. Lists are indexed by local rank."""

    def __init__(self, command, node, channels=None, variables=None, bind=True, stdout=None, stderr=None, hosts=None):
        """Start `python harness/start/rank.py *command` for each rank of a NodeRanks.

        channels: for each rank a dict of environment variable -> file descriptor to inherit.
        variables: more environment variables, for all ranks.
        bind: whether to bind each rank to its cores.
        stdout, stderr: for each rank what subprocess.Popen takes; by default ours.
        hosts: for each rank the words that run a command on its host; by default all run on this one.
        """
        self.reserved = None if node.port else reserve_port()
        port = node.port or self.reserved.getsockname()[1]
        self.processes, self.job = [], uuid.uuid4().hex
        try:
            for rank in range(node.count):
                inherited = channels[rank] if channels else {}
                own = {**environment(rank, node, port), "HARNESS_JOB": self.job, **(variables or {})}
                own.update({name: str(descriptor) for name, descriptor in inherited.items()})
                process = subprocess.Popen(
                    [*(hosts[rank] if hosts else []), sys.executable, RANK, *command],
                    env=own,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout[rank] if stdout else None,
                    stderr=stderr[rank] if stderr else None,
                    pass_fds=list(inherited.values()),
                    start_new_session=True,  # its children share its process group, and are ended with it
                )
                self.processes.append(process)
                if bind:
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(process.pid, node.cores(rank))
        except BaseException:
            self.end(grace=0)
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def exit_codes(self):
        """The exit codes of the ranks that have ended, by local rank; -N: killed by signal N."""
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def running(self):
        """The ranks that have not ended."""
        ended = self.exit_codes()
        return [rank for rank in range(len(self.processes)) if rank not in ended]

    def is_stopped(self, rank):
        """Whether SIGSTOP or a debugger has stopped a rank."""
        with contextlib.suppress(OSError), open(f"/proc/{self.processes[rank].pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    def dump_tracebacks(self):
        """Ask each rank that runs to show, on its standard error, the line at which it is.

        Skips ranks without a handler for SIGUSR1, which the signal would end: those that have only just started.
        """
        for rank in self.running():
            process = self.processes[rank]
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/status") as status:
                [caught] = (line.split()[1] for line in status if line.startswith("SigCgt:"))
                if int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
                    process.send_signal(signal.SIGUSR1)

    def end(self, grace=1.0):
        """End every rank: SIGTERM, `grace` seconds, SIGKILL. Returns when all are gone, and what they started too."""
        if grace:
            for rank in self.running():
                self._signal_group(rank, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self.running() and time.monotonic() < deadline:
                time.sleep(0.01)
        for rank, process in enumerate(self.processes):
            self._signal_group(rank, signal.SIGKILL)
            process.wait()
        for pid in self._descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.reserved:
            self.reserved.close()

    def _descendants(self):
        """What ranks have started in sessions of their own: found by HARNESS_JOB, which they inherit."""
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if entry.name.isdecimal():
                    with open(f"/proc/{entry.name}/environ", "rb") as file:
                        if f"HARNESS_JOB={self.job}".encode() in file.read().split(b"\0"):
                            yield int(entry.name)

    def _signal_group(self, rank, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[rank].pid, number)
