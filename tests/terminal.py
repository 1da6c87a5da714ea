"""Type into launch.sh as somebody at a terminal does, and read what appears there."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import time
import uuid

from tests.run import CLEAN, LAUNCH, LONG, MARK, marked, wait_until

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[>=]|\x07|\r")


class Terminal:
    """./launch.sh with these arguments in a terminal of its own; a context manager that leaves nothing running."""

    def __init__(self, *arguments, **variables):
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        environment = {**CLEAN, "TERM": "xterm", "COLUMNS": "120", **variables, name: value}
        self.shown, self.code = "", None
        self.pid, self.end = pty.fork()
        if not self.pid:
            os.execve(LAUNCH, [LAUNCH, *map(str, arguments)], environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hang_up()
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def read(self, seconds=0.05):
        """Read what has appeared; returns False if the program has closed the terminal."""
        while self.end is not None and select.select([self.end], [], [], seconds)[0]:
            try:
                data = os.read(self.end, 65536)
            except OSError:
                return False
            if not data:
                return False
            self.shown += ESCAPES.sub("", data.decode(errors="replace"))
        return True

    def until(self, text, after=0):
        """Wait until a text appears behind this place of what is shown; returns the place behind it."""
        deadline = time.monotonic() + LONG
        while text not in self.shown[after:]:
            assert self.read() or text in self.shown[after:], f"ended without {text!r}:\n{self.shown}"
            assert time.monotonic() < deadline, f"{text!r} did not come in {LONG} s:\n{self.shown}"
        return self.shown.index(text, after) + len(text)

    def type(self, text):
        """Type a line at the prompt, and wait for the next one; returns what it showed."""
        here = len(self.shown)
        self.press(text + "\n")
        end = self.until(">>> ", here)
        return self.shown[here : end - len(">>> ")].partition("\n")[2]

    def press(self, keys):
        os.write(self.end, keys.encode())

    def hang_up(self):
        """Close the terminal, as somebody who closes its window."""
        if self.end is not None:
            os.close(self.end)
            self.end = None

    def wait(self):
        """Wait for the end of the program; returns its exit code."""
        if self.code is None:

            def ended():
                self.read(0)
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.code = os.waitstatus_to_exitcode(status)
                return pid

            wait_until(ended, "the end of launch.sh")
        return self.code

    def processes(self, command=b""):
        """The processes of this job that run, with these bytes in their command."""
        return marked(self.mark, command)

    def leaves_nothing(self):
        """Whether every process has ended, or ends soon."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), "the end of all processes", 60)
        return not self.processes()


def piped(text, *arguments, **variables):
    """launch.sh with these arguments, at its end, with a text as its input, and with nothing left."""
    mark = uuid.uuid4().hex
    command = [LAUNCH, *map(str, arguments)]
    environment = {**CLEAN, **variables, MARK: mark}
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=LONG)
    wait_until(lambda: not marked(f"{MARK}={mark}"), "the end of all processes", 60)
    return done
