"""The rank processes of a launcher: their port, cores and environment, their start and their end."""

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

from oneflow_cookbook.start.cores import cores_of
from oneflow_cookbook.start.errors import UsageError

RANK = str(Path(__file__).with_name("rank.py"))
TRACE_SIGNALS = {signal.SIGUSR1, signal.SIGRTMAX}  # at these a rank shows its current line; see rank.py


def reserve_port(port=0):
    """A socket bound to `port`, or to any free port if 0; keep it open, without listening, as long as the job runs.

    OneFlow binds its port with SO_REUSEPORT, so two jobs on the same port both start and mix their ranks. Our socket
    has the same option: the kernel gives the port to no other program, and rank 0 can still use it. Raises UsageError
    if another program uses the port, or if ranks cannot meet.
    """
    check_loopback()
    reserved = socket.socket()
    try:
        if port:  # without SO_REUSEPORT, so that another job's port is refused
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("0.0.0.0", port))
    except OSError as error:
        reserved.close()
        raise UsageError(f"port {port}: {error.strerror}; choose a different --master_port") from None
    return reserved


def check_loopback():
    """Raises UsageError if processes of this host cannot connect to each other: ranks would wait forever."""
    with socket.socket() as unused, socket.socket() as probe:
        unused.bind(("0.0.0.0", 0))
        probe.settimeout(5)
        error = probe.connect_ex(("127.0.0.1", unused.getsockname()[1]))
    if error not in (0, errno.ECONNREFUSED):  # refused: reachable, though nobody listens there
        raise UsageError(f"ranks cannot meet at 127.0.0.1: {os.strerror(error)}; is the loopback interface up?")


@dataclass
class RankAssignment:
    """Which ranks of a job this launcher starts, on which cores, and where all ranks meet."""

    world_size: int
    port: int  # of rank 0
    nproc_per_node: int = 0  # ranks of this launcher; 0: all
    first: int = 0  # the lowest of these ranks
    local_rank: Optional[int] = 0  # its LOCAL_RANK; None: leave it unset, and OneFlow numbers the ranks of a host
    cores: Optional[list] = None  # of each of these ranks; None: they share all cores evenly
    address: str = "127.0.0.1"  # of rank 0
    reads: bool = False  # whether the rank, the only one, has our standard input; the others have none

    def __post_init__(self):
        self.nproc_per_node = self.nproc_per_node or self.world_size
        self.cores = self.cores or [cores_of(i, self.nproc_per_node) for i in range(self.nproc_per_node)]

    def environment(self, i):
        """The environment variables of local rank i. What the user has set, such as OMP_NUM_THREADS, stays."""
        variables = {"OMP_NUM_THREADS": str(len(self.cores[i])), "GLOG_minloglevel": "3"}
        # Threads that wait by spinning take the cores that OneFlow needs: docs/performance.md.
        variables["OPENBLAS_THREAD_TIMEOUT"] = "18"  # in powers of two of cycles
        if self.world_size == 1:  # several ranks compute while they send
            variables["ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"] = "0"
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that GPUs have the numbers of nvidia-smi
        variables.update(os.environ)
        variables.update(MASTER_ADDR=self.address, MASTER_PORT=str(self.port), WORLD_SIZE=str(self.world_size))
        variables.update(RANK=str(self.first + i), HARNESS_PARENT=str(os.getpid()))
        variables.pop("LOCAL_RANK", None)
        if self.local_rank is not None:
            variables["LOCAL_RANK"] = str(self.local_rank + i)
        variables["no_grpc_proxy"] = ","  # matches every address, so that ranks do not connect through an http_proxy
        return variables

    def command(self, i, script):
        """The command that runs a script, with its arguments, as local rank i."""
        return [sys.executable, RANK, *script]


def is_consequence(code):
    """Whether an exit code looks like OneFlow's reaction to the death of another rank, which is to abort."""
    return code == -signal.SIGABRT


class RankProcess(subprocess.Popen):
    """The process of a rank. Only `wait` reaps it: until then no other process can get its id, or that of its group."""

    def poll(self):
        """The exit code; None: it runs; -N: killed by signal N."""
        if self.returncode is not None:
            return self.returncode
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return end and (end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


class RankProcesses:
    """The processes of these ranks; a context manager that ends them. Lists are indexed by local rank."""

    def __init__(self, script, assignment, stdout, stderr, pipes, name="HARNESS_REPORT", variables=None):
        """Start a script, a list of its path and arguments, as each rank of a RankAssignment.

        stdout, stderr: for each rank what subprocess.Popen takes.
        pipes: for each rank a file descriptor that it inherits; name: of the environment variable for its number.
        variables: more environment variables for all ranks, or None.
        """
        self.processes, self.job = [], uuid.uuid4().hex
        signal.pthread_sigmask(signal.SIG_BLOCK, TRACE_SIGNALS)  # a rank unblocks them when it can handle them
        try:
            for rank in range(assignment.nproc_per_node):
                own = {"HARNESS_JOB": self.job, name: str(pipes[rank])}
                process = RankProcess(
                    assignment.command(rank, script),
                    env={**assignment.environment(rank), **own, **(variables or {})},
                    stdin=None if assignment.reads else subprocess.DEVNULL,
                    stdout=stdout[rank],
                    stderr=stderr[rank],
                    pass_fds=[pipes[rank]],
                    start_new_session=True,  # its children share its process group, and end with it
                )
                self.processes.append(process)
                os.sched_setaffinity(process.pid, assignment.cores[rank])
        except BaseException:
            self.end(grace=0)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, TRACE_SIGNALS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def exit_codes(self):
        """The exit codes of the ranks that have ended, by local rank; -N: killed by signal N."""
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def state(self, rank):
        """What a rank does, in words."""
        if self.processes[rank].poll() is not None:
            return "has ended"
        with open(f"/proc/{self.processes[rank].pid}/stat", encoding="utf-8", errors="replace") as stat:
            stopped = stat.read().rpartition(")")[2].split()[0] in "Tt"
        return "is stopped (SIGSTOP, or a debugger)" if stopped else "is running"

    def dump_tracebacks(self, signum=signal.SIGRTMAX):
        """Ask each running rank to show its current line on its standard error."""
        for process in self.processes:
            process.send_signal(signum)  # has no effect if the process has ended

    def ask_to_end(self):
        """Send SIGTERM to each rank, but not to its children: the workers of a DataLoader must not end before it."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # a stopped process would not notice

    def end(self, grace=1.0):
        """End every rank: SIGTERM, `grace` seconds, SIGKILL. Returns when they and their descendants are gone."""
        if grace:
            self._signal_groups(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while len(self.exit_codes()) < len(self.processes) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._signal_groups(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        deadline = time.monotonic() + 5  # a process that waits for a disk outlives even SIGKILL
        while self._kill_descendants() and time.monotonic() < deadline:
            time.sleep(0.01)  # a process that is just starting has no environment yet: look again

    def _kill_descendants(self):
        """Kill processes that ranks have started in new sessions; returns whether there were any."""
        pids = list(self._descendants())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def _descendants(self):
        """Yield the ids of these processes, which inherit HARNESS_JOB."""
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if f"HARNESS_JOB={self.job}".encode() in environment.split(b"\0"):
                    yield int(pid)

    def _signal_groups(self, signum):
        for process in self.processes:
            if process.returncode is None:  # else it was reaped, and another process may have its id
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
