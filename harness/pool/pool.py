"""A pool of ranks: processes that run one call after another, since starting a job takes about a second.

`Pool(4).call("file.py:function", ...)` calls the function on each of 4 ranks and returns the results by rank. A call in
which a rank raises, dies or hangs fails with a PoolError that has the rank's traceback; the next call gets fresh ranks.
"""

import os
import pickle
import selectors
import signal
import socket
import struct
import tempfile
import time
from pathlib import Path

from harness.start.ranks import NodeRanks, Ranks, is_consequence

WORKER = str(Path(__file__).with_name("worker.py"))
GRACE = 0.5  # seconds in which other ranks may still answer once one has failed


class PoolError(Exception):
    """A call failed; the text says on which rank and how.

    rank: that rank; signal: what killed it, or None; hung: whether it gave no answer in time.
    """

    def __init__(self, rank, text, signal=None, hung=False):
        super().__init__(text)
        self.rank, self.signal, self.hung = rank, signal, hung


def send(connection, value):
    """Write one pickled value, its length first, to a socket."""
    data = pickle.dumps(value, protocol=4)
    connection.sendall(struct.pack("!Q", len(data)) + data)


def receive(connection):
    """Read one value that `send` wrote. Raises EOFError if the other side has closed the socket."""
    return pickle.loads(_read(connection, struct.unpack("!Q", _read(connection, 8))[0]))


def _read(connection, size):
    parts = []
    while size:
        parts.append(connection.recv(min(size, 1 << 20)))
        if not parts[-1]:
            raise EOFError
        size -= len(parts[-1])
    return b"".join(parts)


class Pool:
    """Ranks 0 to world_size - 1. Close it, or use it as a context manager."""

    def __init__(self, world_size, timeout=60.0, repeat=False, variables=None, bind=True, hosts=None):
        """timeout: seconds after which a call counts as hung.

        repeat: whether to repeat a call once, on fresh ranks, if a rank died of SIGSEGV, as OneFlow 0.9.0 rarely does.
        variables: more environment variables of the ranks. bind: whether to bind each rank to its cores.
        hosts: the address of rank 0, and for each rank the words that run a command on its host.
        """
        self.world_size, self.timeout, self.repeat = world_size, timeout, repeat
        self.variables, self.bind, self.hosts = variables, bind, hosts
        self.repeated = []  # the functions of repeated calls
        self.starts = 0  # how often ranks were started
        self.ranks = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the ranks, if any run."""
        if self.ranks:
            self.selector.close()
            self.ranks.end(grace=0)
            for file in self.connections + self.logs:
                file.close()
            self.ranks = None

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

    def _call(self, function, arguments):
        if self.ranks is None or self.ranks.exit_codes():
            self.close()
            self._start()
        answers, deadline = {}, time.monotonic() + self.timeout
        try:
            for connection in self.connections:
                send(connection, (function, arguments))
            while len(answers) < self.world_size and time.monotonic() < deadline:
                for key, _ in self.selector.select(max(0, deadline - time.monotonic())):
                    answer = answers[key.data] = receive(key.fileobj)
                    if "error" in answer:
                        deadline = min(deadline, time.monotonic() + GRACE)
        except (EOFError, OSError):  # a rank has closed its socket: it is about to end
            self._wait_until(self.ranks.exit_codes)
        except BaseException:  # Ctrl-C, or an answer that cannot be unpickled: later answers belong to this call
            self.close()
            raise
        if len(answers) == self.world_size and not any("error" in answer for answer in answers.values()):
            return [answers[rank]["result"] for rank in range(self.world_size)]
        error = self._error(function, answers)
        self.close()
        raise error

    def _start(self):
        pairs = [socket.socketpair() for _ in range(self.world_size)]
        self.connections = [ours for ours, _ in pairs]
        self.logs = [tempfile.TemporaryFile() for _ in pairs]  # noqa: SIM115
        node, hosts = NodeRanks(self.world_size), None
        if self.hosts:
            address, hosts = self.hosts
            port = 20000 + self.starts % 1000  # nothing else uses ports of these hosts
            node = NodeRanks(self.world_size, local_rank=None, address=address, port=port)
        channels = [{"HARNESS_POOL": theirs.fileno()} for _, theirs in pairs]
        output = {"stdout": self.logs, "stderr": self.logs}
        self.ranks = Ranks([WORKER], node, channels, self.variables, self.bind, hosts=hosts, **output)
        self.selector = selectors.DefaultSelector()
        for rank, (ours, theirs) in enumerate(pairs):
            theirs.close()
            self.selector.register(ours, selectors.EVENT_READ, rank)
        self.starts += 1

    def _error(self, function, answers):
        """The PoolError of a call that failed, with what its ranks say."""
        failed = [rank for rank, answer in answers.items() if "error" in answer]
        codes = self.ranks.exit_codes()
        died_of, hung = None, not failed and not codes
        if failed:
            rank = failed[0]
            text = f"failed:\n{answers[rank]['error']}"
        elif codes:
            rank = min(codes, key=lambda rank: is_consequence(codes[rank]))
            died_of = signal.Signals(-codes[rank]) if codes[rank] < 0 else None
            text = f"died ({died_of.name if died_of else f'exit code {codes[rank]}'}):\n{self._log(rank)}"
        else:
            waiting = [rank for rank in range(self.world_size) if rank not in answers]
            rank, before = waiting[0], [self._log_size(rank) for rank in waiting]
            self.ranks.dump_tracebacks()
            self._wait_until(lambda: all(self._log_size(rank) > size for rank, size in zip(waiting, before)))
            time.sleep(0.1)
            where = "\n".join(f"rank {rank}:\n{self._log(rank)}" for rank in waiting)
            text = f"gave no answer in {self.timeout:g} s; it waits here:\n{where}"
        return PoolError(rank, f"{function}: rank {rank} of {self.world_size} {text}", died_of, hung)

    def _wait_until(self, condition, seconds=5):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _log_size(self, rank):
        return os.fstat(self.logs[rank].fileno()).st_size

    def _log(self, rank):
        """The last lines that a rank wrote to its standard output and error."""
        self.logs[rank].seek(0)
        return "\n".join(self.logs[rank].read().decode(errors="replace").splitlines()[-30:])
