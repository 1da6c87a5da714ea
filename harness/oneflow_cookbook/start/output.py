"""The output of the ranks of a launcher: read from pipes, and written to the terminal and the logs line by line.

Only the launcher writes to the terminal, so lines of different ranks never mix.
"""

import json
import os
import re
import runpy
import selectors
import sys
import time
from dataclasses import dataclass
from typing import Optional

# the start of a glog message about an error that ends the process
FATAL = re.compile(rb"F\d{8} \d\d:\d\d:\d\d\.\d{6} +\d+ \S+:\d+\] ")
# what faulthandler adds to the calls of the user's script: our own calls below them, and a list of modules
BELOW = re.compile(
    rb'  File "(.*/oneflow_cookbook/start/rank\.py|%s)", line \d+ in |Extension modules: .*\(total: \d+\)$'
    % re.escape(os.fsencode(runpy.__file__))
)
TRACE = re.compile(rb"Stack \(most |  File |  \.\.\.|  <no Python frame>")  # the start of each line of faulthandler
# from a process of a rank, such as a worker of a DataLoader, that could not send what it has put into a queue
LOST = re.compile(rb'  File ".*/multiprocessing/queues\.py", line \d+, in _feed')
NO_ROOM = b"/ipc/shared_memory.cpp"  # where OneFlow found no room in /dev/shm
NOISE = (b"libibverbs not available",)  # OneFlow warns of it on every host without InfiniBand
PIPE_SIZE = 65536  # bytes that a pipe of Linux holds


def encoded(text):
    """Encode a text, even with a file name that is not UTF-8."""
    return text.encode(errors="backslashreplace")


def write(stream, data):
    """Write bytes to our standard output or error; returns False if its reader has closed it."""
    try:
        while data:
            data = data[os.write(stream.fileno(), data) :]
    except BrokenPipeError:
        return False
    return True


def say(text):
    """Write a line of the launcher itself to standard error."""
    write(sys.stderr, encoded(f"launch.sh: {text}\n"))


@dataclass
class Report:
    """What rank.py reported when its script ended; code is None before that."""

    code: Optional[int] = None
    text: str = ""  # a traceback, or what argparse printed
    refused: bool = False  # whether argparse in the script refused its arguments
    time: float = float("inf")


@dataclass
class Waiting:
    """What a rank waits for at `import oneflow`, and since when, by time.monotonic()."""

    begin: float
    text: str


class Lines:
    """Splits the data of a pipe into lines. A carriage return ends a line as well, as in progress bars."""

    def __init__(self):
        self.rest = bytearray()  # the last line, still incomplete

    def add(self, data):
        """Returns the lines that are complete now."""
        self.rest += data
        if b"\n" not in data and b"\r" not in data:
            return []
        lines = self.rest.splitlines(keepends=True)
        self.rest = bytearray() if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        return lines


class RankOutput:
    """The pipes from the ranks of one attempt. Lists are indexed by local rank.

    writing: {"stdout", "stderr", "pipes": for each rank the end of the pipe that it writes to}; "pipes" is for reports.
    reports: the Report of each rank.
    """

    def __init__(self, count, prefix, logs):
        """count: number of ranks. prefix: a function from a local rank to the prefix of its lines.

        logs: for each rank a file for its output, or []; with logs, the terminal shows only the first rank.
        """
        self.prefix, self.logs = prefix, logs
        self.reports = [Report() for _ in range(count)]
        # lines from a fatal error on; held back, as it may be a side effect of another rank's failure
        self.fatal = [[] for _ in range(count)]
        self.waiting = {}  # rank -> Waiting
        self.lost = {}  # rank -> whether /dev/shm had no room, if something was lost that a process of the rank sent
        self.closed = False  # whether the reader of our standard output or error has closed it
        self.on_terminal = True
        self.printed = time.monotonic()  # when a rank last wrote, other than stacks for the launcher
        self.selector = selectors.DefaultSelector()
        self.pipes, self.writing = [], {}
        for kind, handle in (("stdout", self._stdout), ("stderr", self._stderr), ("pipes", self._report)):
            self.writing[kind] = []
            for rank in range(count):
                reading, writing = os.pipe()
                self.pipes.append((handle, rank, Lines()))
                self.selector.register(reading, selectors.EVENT_READ, self.pipes[-1])
                self.writing[kind].append(writing)

    def close_writing(self):
        """Call it when the ranks have started, so that a pipe ends with its rank."""
        for ends in self.writing.values():
            for end in ends:
                os.close(end)

    def close(self):
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.selector.close()

    def read(self, seconds):
        """Wait up to `seconds` for output, then pass on what each pipe holds."""
        for key, _ in self.selector.select(seconds):
            handle, rank, lines = key.data
            data = os.read(key.fd, PIPE_SIZE)
            if data:
                handle(rank, lines, data)
            else:
                self.selector.unregister(key.fd)
                os.close(key.fd)

    def read_rest(self):
        """Pass on the rest of what ended ranks wrote, even an incomplete last line."""
        self.read(0)
        for handle, rank, lines in self.pipes:
            if lines.rest and handle != self._report:
                handle(rank, lines, b"\n")

    def show_error(self, rank, text=""):
        """Show why a rank failed: OneFlow's fatal error, if any, and its traceback, `text`."""
        lines = [encoded(line) + b"\n" for line in text.splitlines()]
        prefixed = [self.prefix(rank) + line for line in self.fatal[rank] + lines]
        self.fatal[rank] = []
        write(sys.stderr, b"".join(prefixed))

    def _show(self, stream, rank, lines):
        if lines and self.on_terminal and (rank == 0 or not self.logs):
            prefixed = b"".join(self.prefix(rank) + line for line in lines)
            self.closed = not write(stream, prefixed) or self.closed

    def _lines(self, rank, lines, data):
        """The lines that are complete now; also writes them to the logs."""
        complete = lines.add(data)
        if not all(TRACE.match(line) for line in [*complete, lines.rest] if line):
            self.printed = time.monotonic()
        if self.logs:
            self.logs[rank].write(b"".join(complete))
        return complete

    def _stdout(self, rank, lines, data):
        complete = self._lines(rank, lines, data)
        # A single rank has no prefix, so part of a line may be shown at once.
        self._show(sys.stdout, rank, complete if self.prefix(rank) else [data])

    def _stderr(self, rank, lines, data):
        shown = []
        for line in self._lines(rank, lines, data):
            if LOST.match(line) or NO_ROOM in line and rank in self.lost:
                self.lost[rank] = NO_ROOM in line or self.lost.get(rank, False)
            if BELOW.match(line) or line.startswith(NOISE):
                continue
            if self.fatal[rank] or FATAL.match(line):
                self.fatal[rank].append(line)
            else:
                shown.append(line)
        self._show(sys.stderr, rank, shown)

    def _report(self, rank, lines, data):
        for line in lines.add(data):
            message = json.loads(line)
            if "code" in message:
                self.reports[rank] = Report(**message)
                continue
            waiting = self.waiting.pop(rank, Waiting(time.monotonic(), ""))
            if message["waits_for"]:
                self.waiting[rank] = Waiting(waiting.begin, message["waits_for"])
