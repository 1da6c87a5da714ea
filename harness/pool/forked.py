"""Ranks of a pool that are forked from a process that has imported most of OneFlow: that takes a rank 1 s of a core.

As a script it is that process: it runs rank.py and worker.py until OneFlow is about to connect, and forks there, by
glibc's _Fork(). That calls no handlers: after fork(), OneFlow takes a process for a worker of a DataLoader, and a graph
dies in its second call.
"""

import array
import ctypes
import importlib.util
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANK = HERE.parent / "start" / "rank.py"
CONTROL = "FORKED_RANKS"  # the variable with the file descriptor of the server's socket
LARGEST = 2**20  # bytes of a message: the environment of a rank
POSSIBLE = hasattr(ctypes.CDLL(None), "_Fork")  # glibc 2.34 and newer


def serve(control, pipe):
    """Fork a rank for each message, and report its exit code; returns in the ranks. pipe: the place of their own."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([control, awake], [], [])
        if awake in ready:
            os.read(awake, LARGEST)
            for pid, code in ended():
                control.send(json.dumps([pid, code]).encode())
        if control in ready:
            message, ancillary, _, _ = control.recvmsg(LARGEST, socket.CMSG_SPACE(8))
            if not message:
                os._exit(0)
            descriptors = array.array("i", ancillary[0][2])
            pid = ctypes.PyDLL(None)._Fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                become_rank(pipe, *descriptors, **json.loads(message))
                return
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(json.dumps([pid, None]).encode())


def ended():
    """Yield the id and the exit code of each process that has ended; -N: killed by signal N."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    except ChildProcessError:
        return


def become_rank(place, pipe, log, environment, cores, nice):
    """What a new process of a rank has: its session, environment, cores, output, and its own random numbers."""
    rank.die_with_parent()
    os.setsid()
    os.sched_setaffinity(0, cores)
    os.nice(nice)
    for old, new in ((pipe, place), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.modules["numpy"].random.seed()


class Fork:
    """An import hook: OneFlow is imported up to the module with which it connects."""

    def find_spec(self, name, path=None, target=None):
        if name == "oneflow.framework.env_util":
            sys.meta_path.remove(self)
            serve(socket.socket(fileno=int(os.environ.pop(CONTROL))), int(os.environ.pop("FORKED_PIPE")))
            for finder in list(sys.meta_path):  # that of rank.py, which waits for rank 0
                if type(finder).__name__ == "WaitForRank0":
                    finder.find_spec(name)
        return None


class ForkServer:
    """The process from which ranks are forked, and what it has said of them."""

    def __init__(self, environment):
        """environment: of a rank 0, with OMP_NUM_THREADS 1."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lock, self.codes = threading.Lock(), {}
        pipe = os.open(os.devnull, os.O_RDWR)
        numbers = {CONTROL: str(theirs.fileno()), "FORKED_PIPE": str(pipe), "HARNESS_POOL": str(pipe)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(HERE / "worker.py")],
            env={**environment, **numbers},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), pipe],
            start_new_session=True,
        )
        theirs.close()
        os.close(pipe)

    def start(self, environment, cores, pipe, log):
        """The process of a new rank."""
        message = {"environment": environment, "cores": cores, "nice": os.getpriority(os.PRIO_PROCESS, 0)}
        message["nice"] -= os.getpriority(os.PRIO_PROCESS, self.process.pid)
        descriptors = array.array("i", [pipe, log.fileno()])
        with self.lock:
            self.control.sendmsg([json.dumps(message).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            while True:
                pid, code = self._receive()
                if code is None:
                    return ForkedProcess(self, pid)

    def _receive(self):
        message = self.control.recv(LARGEST)
        assert message, "the process from which ranks are forked has died"
        pid, code = json.loads(message)
        if code is not None:
            self.codes[pid] = code
        return pid, code

    def code(self, pid):
        """The exit code of a rank; None: it runs."""
        with self.lock:
            while select.select([self.control], [], [], 0)[0]:
                self._receive()
        return self.codes.get(pid)


class ForkedProcess:
    """The process of a rank: the part of subprocess.Popen that RankProcesses uses."""

    def __init__(self, server, pid):
        self.server, self.pid = server, pid

    def poll(self):
        return self.server.code(self.pid)

    def wait(self):
        while self.poll() is None:
            time.sleep(0.005)

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)


@lru_cache(maxsize=None)
def fork_server():
    """That of this process; it dies with it."""
    from harness.start.ranks import RankAssignment

    return ForkServer({**RankAssignment(1, 0).environment(0), "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.meta_path.insert(0, Fork())
    spec = importlib.util.spec_from_file_location("rank", RANK)
    rank = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rank)
    rank.main()
