"""A pool of ranks: one process group that lives through many cases, since starting one takes about a second.

`Pool(4).call("file.py:function", ...)` calls the function on each of 4 ranks and returns what they returned, by rank. A
case that raises, dies or hangs fails by itself, as PoolError with the rank's traceback; the next call gets fresh ranks.
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
GRACE = 0.5  # seconds that the other ranks get to answer once one has failed


class PoolError(Exception):
    """A call failed; the text says on which rank and how.

    rank: that rank; signal: what it died of, or None; hung: whether the time for an answer was over.
    """

    def __init__(self, rank, text, signal=None, hung=False):
        super().__init__(text)
        self.rank, self.signal, self.hung = rank, signal, hung


def send(connection, value):
    """Write one pickled value, its length first, to a socket."""
    data = pickle.dumps(value, protocol=4)
    connection.sendall(struct.pack("!Q", len(data)) + data)


def receive(connection):
    """Read one value that `send` wrote. Raises EOFError if the other side is gone."""
    return pickle.loads(_read(connection, struct.unpack("!Q", _read(connection, 8))[0]))


def _read(connection, size):
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Pool:
    """Ranks 0 to world_size - 1, on this host if not told otherwise. Close it, or use it as a context manager."""

    def __init__(self, world_size, timeout=60.0, repeat=False, variables=None, bind=True, hosts=None):
        """timeout: seconds after which a call without an answer counts as hung.

        repeat: make a call once more, on fresh ranks, if a rank died of SIGSEGV. OneFlow 0.9.0 does that by itself,
        about once in a thousand calls; what crashes for a reason crashes again.
        variables: what the ranks have in their environment besides. bind: whether each keeps to its cores.
        hosts: the address of rank 0's host, and for each rank the words that run a command on its host.
        """
        self.world_size = world_size
        self.timeout = timeout
        self.repeat = repeat
        self.bind = bind
        self.variables = variables
        self.hosts = hosts
        self.repeated = []  # the calls that were made once more
        self.ranks = None
        self.starts = 0  # how often ranks were started, the first time included

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the ranks, if any run."""
        if self.ranks:
            self.selector.close()
            for connection in self.connections:
                connection.close()
            self.ranks.end(grace=0)
            for log in self.logs:
                log.close()
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
        if self.ranks is None or len(self.ranks.running()) < self.world_size:
            self.close()
            self._start()
        answers = {}
        try:
            for connection in self.connections:
                send(connection, (function, arguments))
            deadline = time.monotonic() + self.timeout
            while len(answers) < self.world_size and time.monotonic() < deadline:
                for key, _ in self.selector.select(max(0, deadline - time.monotonic())):
                    answer = answers[key.data] = receive(key.fileobj)
                    if "error" in answer:
                        deadline = min(deadline, time.monotonic() + GRACE)
        except (EOFError, OSError):  # a rank is gone: its end of the socket is closed, and it ends
            self._until(lambda: any(process.poll() is not None for process in self.ranks.processes))
        except BaseException:  # what a rank sends cannot be read here: the next call must not get other ranks' answers
            self.close()
            raise
        failed = [rank for rank, answer in answers.items() if "error" in answer]
        if len(answers) == self.world_size and not failed:
            return [answers[rank]["result"] for rank in range(self.world_size)]
        error = self._error(function, answers, failed)
        self.close()
        raise error

    def _start(self):
        pairs = [socket.socketpair() for _ in range(self.world_size)]
        self.logs = [tempfile.TemporaryFile() for _ in range(self.world_size)]  # noqa: SIM115
        share, before = NodeRanks(self.world_size), None
        if self.hosts:
            port = 20000 + self.starts % 1000  # nobody else uses the hosts
            share, before = NodeRanks(self.world_size, local=None, address=self.hosts[0], port=port), self.hosts[1]
        self.ranks = Ranks(
            [WORKER],
            share,
            channels=[{"HARNESS_POOL": theirs.fileno()} for _, theirs in pairs],
            variables=self.variables,
            bind=self.bind,
            stdout=self.logs,
            stderr=self.logs,
            before=before,
        )
        for _, theirs in pairs:
            theirs.close()
        self.connections = [ours for ours, _ in pairs]
        self.selector = selectors.DefaultSelector()
        for rank, connection in enumerate(self.connections):
            self.selector.register(connection, selectors.EVENT_READ, rank)
        self.starts += 1

    def _error(self, function, answers, failed):
        died_of = None
        codes = {rank: process.poll() for rank, process in enumerate(self.ranks.processes)}
        dead = sorted((rank for rank in codes if codes[rank] is not None), key=lambda rank: is_consequence(codes[rank]))
        if failed:
            rank, text = failed[0], f"failed:\n{answers[failed[0]]['error']}"
        elif dead:
            rank = dead[0]
            died_of = signal.Signals(-codes[rank]) if codes[rank] < 0 else None
            text = f"died ({died_of.name if died_of else f'exit code {codes[rank]}'}):\n{self._log(rank)}"
        else:
            waiting = [rank for rank in range(self.world_size) if rank not in answers]
            before = [self._size(rank) for rank in waiting]
            self.ranks.show_where()
            self._until(lambda: all(self._size(rank) > size for rank, size in zip(waiting, before)))
            time.sleep(0.1)
            where = "\n".join(f"rank {rank}:\n{self._log(rank)}" for rank in waiting)
            rank, text = waiting[0], f"gave no answer in {self.timeout:g} s; it waits here:\n{where}"
        return PoolError(
            rank, f"{function}: rank {rank} of {self.world_size} {text}", died_of, hung=not failed and not dead
        )

    def _until(self, there, within=5):
        deadline = time.monotonic() + within
        while not there() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _size(self, rank):
        """Bytes that a rank has written to its standard output and error."""
        return os.fstat(self.logs[rank].fileno()).st_size

    def _log(self, rank):
        """The last lines that a rank wrote to its standard output and error."""
        self.logs[rank].seek(0)
        return "\n".join(self.logs[rank].read().decode(errors="replace").splitlines()[-30:])
