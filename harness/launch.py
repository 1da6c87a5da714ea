"""The launcher of one host: starts the ranks of a script, shows their output, and ends them all together."""

import argparse
import difflib
import json
import os
import re
import selectors
import signal
import sys
import time
from pathlib import Path

from harness import recipe
from harness.rank import BROKEN_PIPE
from harness.ranks import PortTaken, Ranks, is_consequence

COMMANDS = ("test", "mutate", "show", "bytes", "docs", "bench")  # what launch.sh does besides running a script
BAD_INPUT = 2
TIME_LIMIT_REACHED = 124
FATAL = re.compile(rb"F\d{8} ")  # how glog begins the line of an error that ends the process
NOISE = (b"libibverbs not available",)  # OneFlow says so on every host without InfiniBand


class BadInput(Exception):
    """What is wrong with the command line and what to type instead, in one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are BadInput."""

    def error(self, message):
        raise BadInput(f"{message}; see ./launch.sh --help")


def parser():
    """The options of launch.sh; their help stands in launch.sh itself, which can show it before Python is set up."""
    options = Parser(prog="launch.sh", add_help=False, allow_abbrev=False)
    options.add_argument("-n", "--nproc_per_node", type=int)
    options.add_argument("--master_port", type=int, default=0)
    options.add_argument("--timeout", type=float, default=600.0)
    options.add_argument("script", nargs="?")
    options.add_argument("arguments", nargs=argparse.REMAINDER)
    return options


def checked(arguments):
    """The parsed command line, with the number of ranks filled in. Raises BadInput."""
    options = parser().parse_args(arguments)
    if options.script is None:
        raise BadInput("name a Python script, such as recipes/data_parallel.py")
    script = Path(options.script)
    if not script.is_file():
        close = recipe.near(script)
        command = difflib.get_close_matches(options.script, COMMANDS, n=1)
        if command and not close:
            raise BadInput(f"{script}: no such file; did you mean ./launch.sh {command[0]}?")
        hint = f"did you mean {close}?" if close else "name a Python script, such as recipes/data_parallel.py"
        raise BadInput(f"{script}: no such file; {hint}")
    try:
        sizes = recipe.world_sizes(script)
    except SyntaxError as error:
        raise BadInput(f"{script}: not a Python script: line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{script}: {error}") from None
    if options.nproc_per_node is None:
        options.nproc_per_node = sizes[0] if sizes else 2
    if options.nproc_per_node < 1:
        raise BadInput(f"-n must be 1 or more, got {options.nproc_per_node}")
    if sizes and options.nproc_per_node not in sizes:
        accepted = f"{sizes[0]} to {sizes[-1]}" if isinstance(sizes, range) else " or ".join(map(str, sizes))
        raise BadInput(f"{script.name} runs on {accepted} ranks, not on {options.nproc_per_node}: type -n {sizes[0]}")
    if not options.timeout >= 0:
        raise BadInput(f"--timeout must be a number of seconds, or 0 for no limit, got {options.timeout:g}")
    if options.master_port and not 1024 <= options.master_port <= 65535:
        raise BadInput(f"--master_port must be from 1024 to 65535, got {options.master_port}")
    return options


class Job:
    """One run of a script on all ranks, watched until it ends. `run` returns the exit code for the shell."""

    def __init__(self, options):
        self.options = options
        self.world_size = options.nproc_per_node
        self.reports = {}  # rank -> what its wrapper said of its end
        self.notes = {}  # rank -> that as bytes, as far as they have come
        self.rest = {}  # rank -> the part of a line of standard error that has no end yet
        self.last_words = {}  # rank -> what it wrote from OneFlow's fatal error on
        self.selector = selectors.DefaultSelector()

    def run(self):
        caught = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: caught.append(number))
        errors = [os.pipe() for _ in range(self.world_size)]
        reports = [os.pipe() for _ in range(self.world_size)]
        with Ranks(
            [self.options.script, *self.options.arguments],
            self.world_size,
            self.options.master_port,
            channels=[{"HARNESS_REPORT": write} for _, write in reports],
            stderr=[write for _, write in errors],
        ) as ranks:
            for rank in range(self.world_size):
                for (read, write), take in ((errors[rank], self.show), (reports[rank], self.note)):
                    os.close(write)
                    os.set_blocking(read, False)
                    self.selector.register(read, selectors.EVENT_READ, (take, rank))
            return self.watch(ranks, caught)

    def watch(self, ranks, caught):
        deadline = time.monotonic() + self.options.timeout if self.options.timeout else float("inf")
        while not caught and time.monotonic() < deadline:
            running = ranks.running()
            self.take_output(0.02)
            codes = {rank: process.returncode for rank, process in enumerate(ranks.processes) if rank not in running}
            failed = [rank for rank in codes if codes[rank]]
            if failed or not running:
                self.take_output(0)
                for rank, rest in self.rest.items():
                    if rest:  # a last line without an end
                        self.show(rank, b"\n")
            if failed:
                first = min(failed, key=lambda rank: (self.time_of_end(rank), is_consequence(codes[rank])))
                return self.tell_failure(first, codes)
            if not running:
                return 0
        if caught:
            say(f"{signal.Signals(caught[0]).name}: ending {len(ranks.running())} ranks")
            return 128 + caught[0]
        return self.tell_time_limit(ranks)

    def take_output(self, seconds):
        """Wait up to `seconds` for output, then hand on all that there is."""
        while True:
            ready = self.selector.select(seconds)
            for key, _ in ready:
                take, rank = key.data
                data = os.read(key.fd, 65536)
                if data:
                    take(rank, data)
                else:
                    self.selector.unregister(key.fd)
                    os.close(key.fd)
            if not ready or not self.selector.get_map():
                if seconds and not self.selector.get_map():
                    time.sleep(seconds)
                return
            seconds = 0

    def show(self, rank, data):
        """Pass on standard error, line by line, behind the mark of its rank."""
        *lines, self.rest[rank] = (self.rest.get(rank, b"") + data).split(b"\n")
        mark = b"[%d] " % rank if self.world_size > 1 else b""
        for line in lines:
            if rank in self.last_words or FATAL.match(line):  # it may only follow from the death of another rank
                self.last_words.setdefault(rank, []).append(mark + line + b"\n")
            elif not line.startswith(NOISE):
                sys.stderr.buffer.write(mark + line + b"\n")
        sys.stderr.buffer.flush()

    def note(self, rank, data):
        """Keep what a rank's wrapper says of its end, a line of JSON."""
        self.notes[rank] = self.notes.get(rank, b"") + data
        if self.notes[rank].endswith(b"\n"):
            self.reports[rank] = json.loads(self.notes[rank])

    def time_of_end(self, rank):
        return self.reports.get(rank, {}).get("time", float("inf"))

    def tell_failure(self, rank, codes):
        code, text = codes[rank], self.reports.get(rank, {}).get("text", "")
        if code == BROKEN_PIPE:
            return BROKEN_PIPE
        if code == BAD_INPUT and text:  # the same on every rank, so without a mark
            print(text, file=sys.stderr)
            return BAD_INPUT
        sys.stderr.buffer.writelines(self.last_words.pop(rank, []))
        for line in text.splitlines():
            self.show(rank, line.encode() + b"\n")
        cause = f"exit code {code}" if code > 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"
        say(f"rank {rank} of {self.world_size} failed: {cause}; every rank is ended")
        return code if code > 0 else 128 - code

    def tell_time_limit(self, ranks):
        running = ranks.running()
        say(f"time limit of {self.options.timeout:g} s reached (--timeout): this is where each rank is")
        ranks.signal(signal.SIGUSR1)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            self.take_output(0.05)
        for rank in range(self.world_size):
            done = rank in self.reports
            state = "has ended" if rank not in running else "has run to its end" if done else "is running"
            say(f"rank {rank} of {self.world_size} {state}")
        return TIME_LIMIT_REACHED


def say(text):
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def main(arguments):
    """Run a command line of launch.sh; returns the exit code."""
    try:
        return Job(checked(arguments)).run()
    except (BadInput, PortTaken) as error:
        say(str(error))
        return BAD_INPUT
    except BrokenPipeError:  # nobody reads our standard error any more
        return BROKEN_PIPE
