"""What the ranks of a node write: line by line, each behind the mark of its rank, to the terminal and into the logs."""

import contextlib
import json
import os
import re
import select
import selectors
import sys
import time

LONGEST_LINE = 1 << 16  # bytes of a line that is shown in one piece
# How glog begins the line of an error that ends the process.
FATAL = re.compile(rb"F\d{8} \d\d:\d\d:\d\d\.\d{6} +\d+ \S+:\d+\] ")
NOISE = (b"libibverbs not available",)  # OneFlow says so on every host without InfiniBand


def encoded(text):
    """Bytes of a text that may have what is no letter, such as a name of a file in another encoding."""
    return text.encode(errors="backslashreplace")


def write(stream, data):
    """Write to our own output in whole lines, each piece so short that the lines of ranks do not come in between.

    Raises BrokenPipeError where nobody reads any more.
    """
    while data:
        piece = data[: data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF]
        try:
            data = data[os.write(stream.fileno(), piece) :]
        except BrokenPipeError:
            raise
        except OSError:  # such as a full disk
            return


def say(text):
    """Write a line of the launcher itself to standard error."""
    write(sys.stderr, encoded(f"launch.sh: {text}\n"))


class Lines:
    """Cuts what comes from a pipe into lines. A carriage return ends a line as well: progress bars use it."""

    def __init__(self, longest=LONGEST_LINE):
        self.rest, self.longest = bytearray(), longest

    def add(self, data):
        """The lines that end in `data`, with their ends; what is behind the last is kept, unless it is very long."""
        complete = self.rest.endswith(b"\r")  # only the next byte tells a carriage return from the end of a line
        self.rest += data
        if not (complete or b"\n" in data or b"\r" in data or len(self.rest) >= self.longest):
            return []
        lines = bytes(self.rest).splitlines(keepends=True)
        last = b"" if lines[-1].endswith(b"\n") else lines.pop()
        if len(last) >= self.longest:
            lines.append(last + b"\n")
            last = b""
        self.rest = bytearray(last)
        return lines


class Output:
    """The pipes from the ranks of one attempt. Lists are indexed by local rank; close it at the end.

    writing: {"stderr", "report", "stdout"}: for each rank the end of the pipe that it writes to; without logs a rank
    writes to our own standard output, and there are no pipes for it.
    reports: what the wrapper of each rank said of its end, {} if nothing.
    """

    def __init__(self, count, mark, logs=None):
        """mark: a function from a local rank to what stands before its lines; logs: a Logs, or None."""
        self.mark, self.logs = mark, logs
        self.reports = [{} for _ in range(count)]
        self.last_words = [[] for _ in range(count)]  # what each wrote from a fatal error of OneFlow on
        self.silent = False  # the job has ended: what still comes goes into the logs alone
        self.selector, self.writing, self.sources = selectors.DefaultSelector(), {}, []
        takers = {"stderr": self._stderr, "report": self._report, **({"stdout": self._stdout} if logs else {})}
        for kind, taker in takers.items():
            self.writing[kind] = []
            for rank in range(count):
                read, written = os.pipe()
                os.set_blocking(read, False)
                lines = Lines(float("inf")) if kind == "report" else Lines()
                self.sources.append((taker, rank, lines))
                self.selector.register(read, selectors.EVENT_READ, self.sources[-1])
                self.writing[kind].append(written)

    def started(self):
        """The ranks have their ends of the pipes: close ours."""
        for ends in self.writing.values():
            for end in ends:
                os.close(end)

    def close(self):
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.selector.close()

    def take(self, seconds):
        """Wait up to `seconds` for output, then pass on what there is; of what has no end, a good part."""
        for _ in range(16):  # each of all that a pipe holds
            ready = self.selector.select(seconds)
            for key, _ in ready:
                taker, rank, lines = key.data
                data = os.read(key.fd, 65536)
                if data:
                    taker(rank, lines, data)
                else:
                    self.selector.unregister(key.fd)
                    os.close(key.fd)
            if not ready or not self.selector.get_map():
                if seconds and not self.selector.get_map():
                    time.sleep(seconds)
                return
            seconds = 0

    def take_last(self):
        """Pass on all that there is, last lines without an end too."""
        self.take(0)
        for taker, rank, lines in self.sources:
            if lines.rest:
                taker(rank, lines, b"\n")

    def show_fatal(self, rank, text):
        """Show why a rank failed: the fatal error of OneFlow that was held back, and the traceback."""
        lines = [self.mark(rank) + encoded(line) + b"\n" for line in text.splitlines()]
        write(sys.stderr, b"".join(self.last_words[rank] + lines))
        self.last_words[rank] = []

    def show_held_back(self):
        """Show the fatal errors that no failure explains."""
        for rank in range(len(self.reports)):
            self.show_fatal(rank, "")

    def _shown(self, rank):
        return not self.silent and (not self.logs or rank == 0)

    def _stderr(self, rank, lines, data):
        if self.logs:
            self.logs.write(rank, data)
        shown = []
        for line in lines.add(data):
            if self.last_words[rank] or FATAL.match(line):  # it may only follow from the death of another rank
                self.last_words[rank].append(self.mark(rank) + line)
            elif self._shown(rank) and not line.startswith(NOISE):
                shown.append(self.mark(rank) + line)
        write(sys.stderr, b"".join(shown))

    def _stdout(self, rank, lines, data):
        self.logs.write(rank, data)
        marked = b"".join(self.mark(rank) + line for line in lines.add(data))
        if self._shown(rank):
            write(sys.stdout, marked)

    def _report(self, rank, lines, data):
        for line in lines.add(data):
            with contextlib.suppress(ValueError):
                self.reports[rank] = json.loads(line)
