"""Ranks of a pool that are forked from a process that has imported most of OneFlow, which costs 1 s of a core.

As a script this is that process: it runs rank.py and worker.py until OneFlow is about to connect, and forks there, by
glibc's _Fork(). That calls no handlers: after fork(), OneFlow takes a process for a worker of a DataLoader, and a graph
dies in its second call. Forked ranks have one hash seed: what depends on the order of a set is the same on all of them.
"""

import array
import contextlib
import ctypes
import importlib.util
import itertools
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANK = HERE.parent / "start" / "rank.py"
CONTROL, PIPE = "FORKED_CONTROL", "FORKED_PIPE"  # variables with file descriptors of the server
ENVIRONMENT = dict(os.environ)  # before OneFlow is imported, which adds to it
LARGEST = 2**18  # bytes of a message: the environment of a rank
START_TIMEOUT = 300  # seconds until the server has imported OneFlow
POSSIBLE = hasattr(ctypes.CDLL(None), "_Fork")  # glibc 2.34 and newer


def serve(control, place):
    """Fork a rank for each message, and report its exit code; returns in the ranks. place: where a rank has its pipe.

    The messages have the number of the rank: {"number", "environment", "cores", "folder", "nice"} is answered by
    {"number", "pid"} or {"number", "error"}, and {"number", "code"} follows when it has ended. It keeps its id until
    {"number", "reap"} comes.
    """
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG is sent when a thread ends; this process ends with its socket
    numbers, zombies = {}, {}  # process id -> number of the rank, and for those that have ended the other way round
    while True:
        ready, _, _ = select.select([control, awake], [], [])
        if awake in ready:
            os.read(awake, LARGEST)
            for pid, code in list(ended(numbers)):
                number = numbers.pop(pid)
                zombies[number] = pid
                control.send(json.dumps({"number": number, "code": code}).encode())
        if control not in ready:
            continue
        message, ancillary, _, _ = control.recvmsg(LARGEST, socket.CMSG_SPACE(8))
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "reap" in request:
            os.waitpid(zombies.pop(request["number"]), 0)
            continue
        descriptors = array.array("i", ancillary[0][2])
        number, threads = request.pop("number"), len(os.listdir("/proc/self/task"))
        pid = ctypes.PyDLL(None)._Fork() if threads == 1 else -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (awake, wake):
                os.close(descriptor)
            control.close()
            become_rank(place, *descriptors, **request)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            numbers[pid] = number
            answer = {"pid": pid}
        else:
            answer = {"error": f"no rank could be forked from a process with {threads} threads"}
        control.send(json.dumps({"number": number, **answer}).encode())


def ended(pids):
    """Yield the id and the exit code of each of these children that has ended; -N: killed by signal N. Reaps none."""
    for pid in pids:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end:
            yield pid, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def become_rank(place, pipe, log, environment, cores, folder, nice):
    """Take what a new process of a rank has: output, session, environment, cores, its own random numbers."""
    for old, new in ((log, 1), (log, 2), (pipe, place)):
        os.dup2(old, new)
    for descriptor in (pipe, log):
        os.close(descriptor)
    rank.die_with_parent()
    os.setsid()
    os.sched_setaffinity(0, cores)
    os.nice(nice)
    os.chdir(folder)
    added = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    os.environ.clear()
    os.environ.update({**added, **environment})
    random.seed()
    sys.modules["numpy"].random.seed()


class Fork:
    """An import hook: OneFlow is imported up to the module with which it connects."""

    def find_spec(self, name, path=None, target=None):
        if name == "oneflow.framework.env_util":
            sys.meta_path.remove(self)
            serve(socket.socket(fileno=int(os.environ.pop(CONTROL))), int(os.environ.pop(PIPE)))
            for finder in list(sys.meta_path):
                if isinstance(finder, rank.WaitForRank0):
                    finder.find_spec(name)
        return None


class ForkServer:
    """The process from which ranks are forked, and what it has said of them."""

    def __init__(self, environment):
        """environment: of a rank 0."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(START_TIMEOUT)
        self.lock, self.numbers, self.answers, self.codes = threading.Lock(), itertools.count(), {}, {}
        place = os.open(os.devnull, os.O_RDWR)
        variables = {CONTROL: str(theirs.fileno()), PIPE: str(place), "HARNESS_POOL": str(place)}
        variables.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(HERE / "worker.py")],
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), place],
            start_new_session=True,
        )
        theirs.close()
        os.close(place)

    def is_alive(self):
        return self.process.poll() is None

    def start(self, environment, cores, pipe, log):
        """A new rank: a ForkedProcess. pipe, log: its connection and its output. Raises OSError."""
        niceness = [os.getpriority(os.PRIO_PROCESS, process) for process in (0, self.process.pid)]
        request = {"environment": environment, "cores": cores, "folder": os.getcwd(), "nice": niceness[0] - niceness[1]}
        with self.lock:
            number = next(self.numbers)
            message = json.dumps({"number": number, **request}).encode()
            descriptors = array.array("i", [pipe, log.fileno()])
            self.control.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            while number not in self.answers:
                if not self._receive():
                    raise OSError("the process from which ranks are forked has ended")
            answer = self.answers.pop(number)
        if "error" in answer:
            raise OSError(answer["error"])
        return ForkedProcess(self, number, answer["pid"])

    def _receive(self):
        """Take a message; False if the server has ended."""
        try:
            message = self.control.recv(LARGEST)
        except ConnectionError:
            message = b""
        if message:
            answer = json.loads(message)
            to = self.codes if "code" in answer else self.answers
            to[answer["number"]] = answer.get("code", answer)
        return bool(message)

    def code(self, number):
        """The exit code of a rank; None: it runs. Ranks die with the server."""
        with self.lock:
            while select.select([self.control], [], [], 0)[0]:
                if not self._receive():
                    return self.codes.get(number, -signal.SIGKILL)
        return self.codes.get(number)

    def reap(self, number):
        """Let the server reap a rank that has ended."""
        with contextlib.suppress(OSError):  # the server has ended, and with it the rank
            self.control.send(json.dumps({"number": number, "reap": True}).encode())


class ForkedProcess:
    """The process of a rank: the part of RankProcess that RankProcesses uses."""

    def __init__(self, server, number, pid):
        self.server, self.number, self.pid = server, number, pid
        self.reaped = False

    @property
    def returncode(self):
        """None: the process has not been reaped."""
        return None if self.server.is_alive() and not self.reaped else self.poll()

    def poll(self):
        return self.server.code(self.number)

    def wait(self):
        while self.poll() is None:
            time.sleep(0.005)
        if not self.reaped:
            self.reaped = True
            self.server.reap(self.number)

    def send_signal(self, signum):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signum)


SERVERS = []  # the last one is in use


def fork_server(environment):
    """That of this process; a new one if it has ended. environment: of a rank 0."""
    if not (SERVERS and SERVERS[-1].is_alive()):
        SERVERS.append(ForkServer(environment))
    return SERVERS[-1]


if __name__ == "__main__":
    sys.meta_path.insert(0, Fork())
    spec = importlib.util.spec_from_file_location("rank", RANK)
    rank = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rank)
    rank.main()
