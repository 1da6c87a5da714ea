"""A pool of ranks: processes that run many calls, because starting a job takes about a second.

`Pool(4).call("file.py:function", ...)` calls the function on each of 4 ranks and returns a list of the results by
rank. In this order:

1. `_start` starts worker.py as each rank, with a pipe. Each answers (None, None) once OneFlow has connected the ranks.
2. `call` sends (function, arguments, sys.path) to all ranks. Each answers (result, None) or (None, traceback).
3. Ranks live on, and 2 comes again. When the pool closes its end of the pipes, they end.
4. If a rank raises, dies or does not answer in time, the pool ends all ranks, and the call raises PoolError with the
   traceback of that rank, or with where it waits. The next call begins at 1.
"""

import contextlib
import math
import os
import re
import signal
import sys
import tempfile
import time
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from oneflow_cookbook.start.ranks import RankAssignment, RankProcesses, is_consequence, reserve_port

WORKER = str(Path(__file__).with_name("worker.py"))
LONGEST_WAIT = 1e6  # seconds: poll() takes less than 2**31 milliseconds
LARGE = 2**30  # bytes of resident memory: ranks are replaced when one has more
START_TIMEOUT = 300  # seconds until new ranks are connected; on a busy machine that may take a minute


def resident(pid):
    """The bytes of resident memory of a process; 0 if it has ended."""
    if not Path(f"/proc/{pid}").exists():
        return 0
    return int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PoolError(Exception):
    """A call failed; the message has the rank and the reason.

    rank: that rank; signal: the signal that killed it, or None; hung: whether it did not answer in time; answers:
    {rank: result} of the ranks that answered; waiting: {rank: traceback} of those that hung.
    """

    def __init__(self, rank, text, signal=None, hung=False, waiting=None):
        super().__init__(text)
        self.rank, self.signal, self.hung = rank, signal, hung
        self.answers, self.waiting = {}, waiting or {}


class CallCancelled(Exception):
    """A signal handler may raise it to end a call early; the call then fails as if its time were over."""


class Pool:
    """Ranks 0 to world_size - 1. Close it, or use it as a context manager."""

    def __init__(self, world_size, timeout=60.0, repeat=False, variables=None, place=RankAssignment):
        """timeout: seconds after which a call counts as hung, 0: no limit; the start of the ranks is not counted.

        repeat: whether calls may run twice and on different processes: a call runs again if a rank died of SIGSEGV,
        which OneFlow 0.9.0 rarely causes, and the ranks are replaced when a rank uses more memory than LARGE.
        variables: more environment variables of the ranks.
        place: a function from world_size and a port to a RankAssignment; by default all ranks run on this host.
        """
        self.world_size, self.timeout, self.repeat = world_size, timeout or math.inf, repeat
        self.variables, self.place = variables, place
        self.repeated = []  # the functions of repeated calls
        self.starts = 0  # how often ranks were started
        self.ranks = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the ranks, if they run."""
        if self.ranks:
            self.ranks.end(grace=0)
            for file in [self.port, *self.connections, *self.logs]:
                file.close()
            self.ranks = None

    def time_left(self, result):
        """The seconds that the other ranks get once a rank has answered with this result; None: no other limit."""
        return None

    def call(self, function, **arguments):
        """Call `function`, "path/to/file.py:name", with keyword arguments on all ranks; returns the results by rank.

        Starts the ranks if none run. Raises PoolError.
        """
        try:
            return self._call(function, arguments)
        except PoolError as error:
            if not self.repeat or error.signal != signal.SIGSEGV:
                raise
            self.repeated.append(function)
            return self._call(function, arguments)

    def begin(self, function, **arguments):
        """Begin a call, while other pools run theirs; `results` returns its results. Raises PoolError."""
        self._start_if_needed()
        self.begun = function
        with contextlib.suppress(OSError):  # a rank is ending, which `results` notices
            for connection in self.connections:
                connection.send((function, arguments, sys.path))

    def results(self):
        """The results, by rank, of the call that has begun. Raises PoolError."""
        return self._answers(self.begun, self.timeout)

    def _start_if_needed(self):
        if self.ranks is None or self.ranks.exit_codes():
            self.close()
            self._start()
            self._answers("the start", START_TIMEOUT)

    def _call(self, function, arguments):
        self._start_if_needed()
        results = self._answers(function, self.timeout, (function, arguments, sys.path))
        if self.repeat and any(resident(process.pid) > LARGE for process in self.ranks.processes):
            self.close()  # a rank never frees its graphs
        return results

    def _start(self):
        self.connections, theirs = zip(*(Pipe() for _ in range(self.world_size)))
        self.logs = [tempfile.TemporaryFile() for _ in theirs]  # noqa: SIM115
        self.port = reserve_port()
        pipes = [connection.fileno() for connection in theirs]
        assignment = self.place(self.world_size, self.port.getsockname()[1])
        self.ranks = RankProcesses(
            [WORKER], assignment, self.logs, self.logs, pipes, name="HARNESS_POOL", variables=self.variables
        )
        for connection in theirs:
            connection.close()
        self.starts += 1

    def _answers(self, what, timeout, request=None):
        """The answers to a request by rank; without a request, wait until the ranks are connected. Raises PoolError."""
        answers, failure, deadline = {}, None, time.monotonic() + timeout
        try:
            for connection in self.connections if request else ():
                connection.send(request)
            while len(answers) < self.world_size and not failure and time.monotonic() < deadline:
                seconds = min(LONGEST_WAIT, max(0, deadline - time.monotonic()))
                for connection in wait(self.connections, seconds):
                    rank = self.connections.index(connection)
                    answers[rank], traceback = connection.recv()
                    left = self.time_left(answers[rank])
                    if traceback:
                        failure = rank, traceback
                    elif left is not None:
                        deadline = min(deadline, time.monotonic() + left)
        except CallCancelled:
            pass
        except (EOFError, OSError):  # a rank has closed its socket: it is ending
            self._wait_until(self.ranks.exit_codes)
        except BaseException:  # Ctrl-C, or an answer that cannot be unpickled; the other ranks may still answer
            self.close()
            raise
        if len(answers) == self.world_size and not failure:
            return [answers[rank] for rank in range(self.world_size)]
        waiting = [rank for rank in range(self.world_size) if rank not in answers]
        error = self._error(what, timeout, failure, waiting)
        error.answers = {} if failure else answers
        self.close()
        raise error

    def _error(self, what, timeout, failure, waiting):
        """The PoolError of a call. failure: (rank that raised, its traceback); waiting: ranks without an answer."""
        codes = self.ranks.exit_codes()
        died_of, tracebacks = None, {}
        if failure:
            rank, traceback = failure
            text = f"failed:\n{traceback}"
        elif codes:
            rank = min(codes, key=lambda rank: is_consequence(codes[rank]))
            died_of = signal.Signals(-codes[rank]) if codes[rank] < 0 else None
            text = f"died ({died_of.name if died_of else f'exit code {codes[rank]}'}):\n{self._log(rank)}"
        else:
            rank = waiting[0]
            before = [self._log(rank) for rank in waiting]
            self.ranks.dump_tracebacks()
            self._wait_until(lambda: all(self._is_traced(rank, log) for rank, log in zip(waiting, before)))
            tracebacks = {rank: self._log(rank) for rank in waiting}
            logs = "\n".join(f"rank {rank}:\n{log}" for rank, log in tracebacks.items())
            text = f"gave no answer in {timeout:g} s; it waits here:\n{logs}"
        words = f"{what}: rank {rank} of {self.world_size} {text}"
        return PoolError(rank, words, died_of, hung=not failure and not codes, waiting=tracebacks)

    def _is_traced(self, rank, before):
        """Whether the log of a rank ends with a new traceback."""
        log = self._log(rank)
        return log != before and 'rank.py"' in log.rpartition("\n")[2]

    def _wait_until(self, condition):
        deadline = time.monotonic() + 5
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _log(self, rank):
        """The last lines of a rank's standard output and error, without the calls inside OneFlow."""
        # reopened, as reading self.logs would move the rank's offset
        log = Path(f"/proc/self/fd/{self.logs[rank].fileno()}")
        text = log.read_text("utf-8", "replace")
        return "\n".join([line for line in text.splitlines() if not re.match(" {4}@ +0x[0-9a-f]+ ", line)][-40:])


@contextlib.contextmanager
def pool_cache(make=Pool):
    """A function from a world size to its pool, created by `make` at the first call; closes all pools at the end."""
    with contextlib.ExitStack() as stack:
        yield lru_cache(maxsize=None)(lambda world_size: stack.enter_context(make(world_size)))
