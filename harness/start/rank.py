"""What runs inside every rank: `python harness/start/rank.py SCRIPT [ARG ...]` runs SCRIPT as `__main__`, protected.

OneFlow 0.9.0 leaves a job hanging when one rank alone raises or exits with an error, so this wrapper ends such a rank
at once. It also waits for rank 0 before OneFlow looks for it (a rank that comes too early sleeps for 10 s), marks each
line of output with the rank, and dies with its parent. It imports neither OneFlow nor anything else of ours.
"""

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback

BROKEN_PIPE = 128 + signal.SIGPIPE
LONGEST_LINE = 1 << 16  # letters of a line that is written in one piece
LINE_END = "(?<=\n)|(?<=\r)(?!\n|\\Z)"
ERRORS = []  # what ended the script: its traceback keeps graphs alive, and one that is freed waits for the other ranks


def die_with_parent():
    """Ask Linux to kill this process when the process that started it dies."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("HARNESS_PARENT", os.getppid())):
        os._exit(1)


def load_blas():
    """Give OneFlow's matmuls a current OpenBLAS: its calls bind to the functions that were loaded for all before it."""
    library = os.path.join(sys.prefix, "lib", "libopenblas.so")
    if os.environ.get("COOKBOOK_BLAS") != "builtin":
        try:
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        except OSError as error:
            if os.environ["RANK"] == "0":
                print(f"launch.sh: OneFlow computes with its own, older OpenBLAS: {error}", file=sys.stderr)


class WaitForRank0:
    """An import hook: the import of OneFlow waits until rank 0 listens on MASTER_ADDR:MASTER_PORT.

    It waits at the module that OneFlow 0.9.0 imports just before it looks for rank 0, three quarters into its import.
    """

    def find_spec(self, name, path=None, target=None):
        if name == "oneflow.framework.env_util" and os.environ.get("RANK") != "0":  # as the script may have set it
            sys.meta_path.remove(self)
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            while True:
                try:
                    socket.create_connection(address, timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.01)
        return None


class MarkedLines(io.TextIOBase):
    """Standard output, each whole line behind a mark and in one write, so that lines of ranks do not mix.

    Those of more than PIPE_BUF bytes may, where the reader of a pipe is slow. A carriage return ends a line as well: a
    progress bar is shown while it grows. Without a mark nobody else writes there, and a part of a line goes out when it
    is flushed.
    """

    def __init__(self, stream, mark, unread=lambda: None):
        """unread: called when nobody reads any more, before this process ends."""
        self.stream, self.mark, self.unread = stream, mark, unread
        self.rest, self.length = [], 0  # what is behind the end of the last line, in the pieces in which it came
        self.lock = threading.RLock()
        os.register_at_fork(after_in_child=lambda: setattr(self, "lock", threading.RLock()))

    encoding = property(lambda self: self.stream.encoding)
    buffer = property(lambda self: self.stream.buffer)  # for who writes bytes: they go out without a mark

    def __getattr__(self, name):
        return getattr(self.stream, name)  # reconfigure, line_buffering and the like

    def writable(self):
        return True

    def isatty(self):
        return self.stream.isatty()

    def fileno(self):
        return self.stream.fileno()

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if not text:  # as print(..., end="") writes behind what it prints
            return 0
        with self.lock:
            self.rest.append(text)
            self.length += len(text)
            if "\n" not in text and "\r" not in text and self.length < LONGEST_LINE:
                return len(text)
            *lines, rest = re.split(LINE_END, "".join(self.rest))
            if len(rest) >= LONGEST_LINE:
                lines, rest = [*lines, rest + "\n"], ""
            self.rest, self.length = [rest], len(rest)
            together = b""  # so much goes into a pipe in one piece
            for line in lines:
                data = self._encoded(self.mark + line)
                if together and len(together) + len(data) > select.PIPE_BUF:
                    self._emit(together)
                    together = b""
                together += data
            self._emit(together)
        return len(text)

    def flush(self):
        with self.lock:
            if not self.mark or self.rest and self.rest[-1].endswith("\r"):
                self.finish("")

    def finish(self, end="\n"):
        with self.lock:
            rest, self.rest, self.length = "".join(self.rest), [], 0
            if rest:
                self._emit(self._encoded(f"{self.mark}{rest}{end}"))

    def _encoded(self, text):
        return text.encode(self.stream.encoding or "utf-8", "replace")

    def _emit(self, data):
        try:
            while data:
                data = data[os.write(self.stream.fileno(), data) :]
        except BrokenPipeError:  # the reader, `head` say, has had enough
            self.unread()
            os._exit(BROKEN_PIPE)


class Report:
    """How this rank ended, for the launcher: one line of JSON down the pipe that it gave us."""

    def __init__(self):
        self.descriptor, self.pid = int(os.environ.pop("HARNESS_REPORT", "-1")), os.getpid()

    def send(self, text="", **facts):
        if self.descriptor >= 0 and os.getpid() == self.pid:  # not a process that the script has forked
            facts.update(time=time.time(), text=text[-32000:])
            os.write(self.descriptor, (json.dumps(facts) + "\n").encode())
        elif text:
            print(text, file=sys.stderr)


def traceback_of(error):
    """The traceback as Python prints it, without the frames of this wrapper."""
    entry = error.__traceback__
    while entry and entry.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        entry = entry.tb_next
    return "".join(traceback.format_exception(type(error), error, entry)).rstrip()


def run(script, out):
    """Run a script as `python script` would; returns its exit code and the text that belongs to it.

    out: the standard output that it begins with.
    """
    messages = []
    print_message = argparse.ArgumentParser._print_message

    def keep(parser, message, file=None):
        """Every rank refuses the same bad option, so the text goes into the report, of which the launcher shows one."""
        if file in (None, sys.stdout, sys.stderr):
            messages.append(message)
        else:
            print_message(parser, message, file)

    argparse.ArgumentParser._print_message = keep
    try:
        runpy.run_path(os.path.abspath(script), run_name="__main__")
    except SystemExit as stop:
        ERRORS.append(stop)
        if stop.code is None or isinstance(stop.code, int):
            code, text = stop.code or 0, "".join(messages[-1:]).rstrip()  # of a usage and an error the error
        else:
            code, text = 1, str(stop.code)
    except BaseException as error:
        ERRORS.append(error)
        code, text = 1, traceback_of(error)
    else:
        code, text = 0, "".join(messages).rstrip()
    if code == 0 and text and os.environ["RANK"] == "0":  # --help
        out.stream.write(text + "\n")
        out.stream.flush()
    return code, (text if code else "")


def main():
    die_with_parent()
    # On SIGUSR1, when the time limit is reached, every rank shows the line at which it waits.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    report, rank = Report(), os.environ["RANK"]
    mark = os.environ.pop("HARNESS_MARK", f"[{rank}] " if os.environ["WORLD_SIZE"] != "1" else "")
    out = MarkedLines(sys.stdout, mark, lambda: report.send(unread=True))
    sys.stdout = sys.__stdout__ = out  # the second is what scripts put back that had another there
    atexit.register(out.finish)  # for what threads, and others at the exit, write behind the end of the script
    load_blas()
    sys.meta_path.insert(0, WaitForRank0())
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    code, text = run(script, out)
    for stream in {sys.stdout, sys.stderr} - {out}:  # the script may have put others there
        with contextlib.suppress(Exception):
            stream.flush()
    try:
        out.finish()
    except OSError as error:  # such as a full disk
        code, text = code or 1, text or traceback_of(error)
    report.send(text, code=code)
    if code:
        os._exit(code)


if __name__ == "__main__":
    main()
