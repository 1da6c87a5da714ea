"""The signals that end a command of launch.sh."""

import contextlib
import signal
import sys

from oneflow_cookbook.start.output import say


def heeded(numbers):
    """These signals, but not SIGHUP if it is ignored, as under nohup: the command goes on without its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if number != signal.SIGHUP or not ignored]


def exit_at(*numbers):
    """At each of these signals say so and exit; the pools then end their ranks."""

    def end(number, frame):
        with contextlib.suppress(OSError):  # the terminal is gone
            say(f"{signal.Signals(number).name}: every rank is ended")
        sys.exit(128 + number)

    for number in heeded(numbers):
        signal.signal(number, end)
