"""The launcher: starts the ranks of a script on this host, shows their output, and ends them all together."""

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
from harness.nodes import SECOND_OPINION, Apart, Nodes
from harness.rank import BROKEN_PIPE
from harness.ranks import PortTaken, Ranks, Share, is_consequence, reserve_port

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
    options.add_argument("--nnodes", type=int, default=1)
    options.add_argument("--node_rank", type=int, default=0)
    options.add_argument("--master_addr")
    options.add_argument("--master_port", type=int, default=0)
    options.add_argument("--max-restarts", type=int, default=0)
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
    check_nodes(options)
    if options.nproc_per_node is None:  # as few as the script takes, the same on each node
        fitting = [size for size in sizes or (2,) if size % options.nnodes == 0]
        options.nproc_per_node = fitting[0] // options.nnodes if fitting else 1
    if options.nproc_per_node < 1:
        raise BadInput(f"-n must be 1 or more, got {options.nproc_per_node}")
    world_size = options.nnodes * options.nproc_per_node
    if sizes and world_size not in sizes:
        accepted = f"{sizes[0]} to {sizes[-1]}" if isinstance(sizes, range) else " or ".join(map(str, sizes))
        on_nodes = f" ({options.nproc_per_node} on each of {options.nnodes} nodes)" if options.nnodes > 1 else ""
        hint = f": type -n {sizes[0]}" if options.nnodes == 1 else ""
        raise BadInput(f"{script.name} runs on {accepted} ranks, not on {world_size}{on_nodes}{hint}")
    if not options.timeout >= 0:
        raise BadInput(f"--timeout must be a number of seconds, or 0 for no limit, got {options.timeout:g}")
    if options.master_port and not 1024 <= options.master_port <= 65535:
        raise BadInput(f"--master_port must be from 1024 to 65535, got {options.master_port}")
    return options


def check_nodes(options):
    """The options for several hosts. Raises BadInput."""
    nodes, number = options.nnodes, options.node_rank
    if nodes < 1:
        raise BadInput(f"--nnodes must be 1 or more, got {nodes}")
    if not 0 <= number < nodes:
        raise BadInput(f"--node_rank must be from 0 to {nodes - 1} with --nnodes {nodes}, got {number}")
    if nodes > 1 and not (options.master_addr and options.master_port):
        raise BadInput("--nnodes needs node 0's address, the same on each node: --master_addr HOST --master_port 29500")
    if options.max_restarts < 0:
        raise BadInput(f"--max-restarts must be 0 or more, got {options.max_restarts}")
    if nodes == 1:
        options.master_addr = "127.0.0.1"  # whatever the host is called elsewhere, its own ranks meet here


class Job:
    """The ranks of this node, watched until the job ends on all nodes. `run` returns the exit code for the shell."""

    def __init__(self, options, nodes):
        self.options, self.nodes = options, nodes
        self.here = options.nproc_per_node
        self.first, self.world_size = nodes.number * self.here, nodes.count * self.here
        self.caught = []  # signals
        self.deadline = time.monotonic() + options.timeout if options.timeout else float("inf")

    def run(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.caught.append(number))
        end = {"again": 0}
        while "again" in end:
            with self.nodes:
                self.nodes.meet(self.deadline, say, lambda: self.caught)
                if self.caught:
                    say(f"{signal.Signals(self.caught[0]).name}: nothing was started")
                    return 128 + self.caught[0]
                end = self.attempt(end["again"])
        return end["code"]

    def attempt(self, restarts):
        """Start this node's ranks and watch them; returns how the job ends, or {"again": number of restarts}."""
        self.reports = {}  # rank -> what its wrapper said of its end; ranks are counted on this node
        self.notes = {}  # rank -> that as bytes, as far as they have come
        self.rest = {}  # rank -> the part of a line of standard error that has no end yet
        self.last_words = {}  # rank -> what it wrote from OneFlow's fatal error on
        self.selector = selectors.DefaultSelector()
        reserved = None
        if self.nodes.number == 0:
            reserved = reserve_port(self.options.master_port if self.nodes.count == 1 else 0)
        start = self.nodes.begin(reserved and reserved.getsockname()[1])
        address = self.options.master_addr
        share = Share(self.world_size, self.here, self.first, start["local"], address, start["port"])
        errors = [os.pipe() for _ in range(self.here)]
        reports = [os.pipe() for _ in range(self.here)]
        with Ranks(
            [self.options.script, *self.options.arguments],
            share,
            channels=[{"HARNESS_REPORT": write} for _, write in reports],
            stderr=[write for _, write in errors],
        ) as ranks:
            for rank in range(self.here):
                for (read, write), take in ((errors[rank], self.show), (reports[rank], self.note)):
                    os.close(write)
                    os.set_blocking(read, False)
                    self.selector.register(read, selectors.EVENT_READ, (take, rank))
            end = self.watch(ranks, restarts)
            self.tell(end, ranks)
        for key in list(self.selector.get_map().values()):  # of ranks that were ended
            os.close(key.fd)
        self.selector.close()
        if reserved:
            reserved.close()
        return end

    def watch(self, ranks, restarts):
        """Until the job ends, here or elsewhere; returns {"code", "text": what to say of it, "node", and more}."""
        failures, own, over, done, decided = [], None, False, set(), float("inf")
        while True:
            running = ranks.running()
            self.take_output(0.02)
            own = own or self.failure(ranks, running)
            if own and own not in failures:
                failures.append(own)
                self.nodes.tell(failed=own)
            elif not (own or over or running):
                over = True
                self.nodes.tell(done=True)
            for peer, message in self.nodes.poll():
                if "end" in message:
                    return message["end"]
                if "failed" in message:
                    failures.append(message["failed"])
                if "done" in message:
                    done.add(peer)
                if "gone" in message:
                    failures.append({"code": 1, "text": f"{peer} is gone", "node": peer.number, "time": time.time()})
            if failures and decided == float("inf"):  # another node may know a better cause
                waits = 2 * SECOND_OPINION if self.nodes.number else SECOND_OPINION  # for node 0 to decide
                sure = self.nodes.number == 0 and not all(one.get("consequence") for one in failures)
                decided = time.monotonic() + (waits if self.nodes.peers and not sure else 0)
            if time.monotonic() >= decided:  # node 0 decides, and another node only if node 0 does not
                end = min(failures, key=lambda one: (one.get("consequence", False), one["time"]))
                leads = self.nodes.number == 0 or not self.nodes.peers
                if leads and restarts < self.options.max_restarts and end.get("restart", True):
                    end = {**end, "again": restarts + 1}
                self.nodes.tell(end=end)
                return end
            if over and not failures and self.nodes.number == 0 and len(done) == self.nodes.count - 1:
                end = {"code": 0, "node": 0}
                self.nodes.tell(end=end)
                return end

    def failure(self, ranks, running):
        """What has ended, or must end, this node's ranks, or None."""
        common = {"node": self.nodes.number, "time": time.time()}
        where = f" on {self.nodes.name}" if self.nodes.count > 1 else ""
        if self.caught:
            name = signal.Signals(self.caught[0]).name
            return {
                "code": 128 + self.caught[0],
                "text": f"{name}{where}: every rank is ended",
                "restart": False,
                **common,
            }
        if time.monotonic() >= self.deadline:
            return {"code": TIME_LIMIT_REACHED, "limit": True, "text": "", "restart": False, **common}
        codes = {rank: process.returncode for rank, process in enumerate(ranks.processes) if rank not in running}
        failed = [rank for rank in codes if codes[rank]]
        if failed or not running:
            self.take_output(0)
            for rank, rest in self.rest.items():
                if rest:  # a last line without an end
                    self.show(rank, b"\n")
        if not failed:
            return None
        rank = min(failed, key=lambda rank: (self.time_of_end(rank), is_consequence(codes[rank])))
        code, text = codes[rank], self.reports.get(rank, {}).get("text", "")
        cause = f"exit code {code}" if code > 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"
        found = {
            "code": code if code > 0 else 128 - code,
            "text": f"rank {self.first + rank} of {self.world_size}{where} failed: {cause}; every rank is ended",
            "rank": rank,
            "consequence": is_consequence(code),
            "restart": code not in (BAD_INPUT, BROKEN_PIPE),
        }
        if code == BAD_INPUT and text:  # the same on every rank, so without a mark
            found["text"] = text
        found["time"] = min(self.time_of_end(rank), common.pop("time"))
        return {**found, **common}

    def tell(self, end, ranks):
        """Say how the job ended, on standard error."""
        if end["code"] in (0, BROKEN_PIPE):
            return
        if end.get("limit"):
            self.tell_where(ranks)
        elif end["code"] == BAD_INPUT and not end["text"].startswith("rank "):
            print(end["text"], file=sys.stderr)
        else:
            if end["node"] == self.nodes.number and "rank" in end:
                sys.stderr.buffer.writelines(self.last_words.pop(end["rank"], []))
                for line in self.reports.get(end["rank"], {}).get("text", "").splitlines():
                    self.show(end["rank"], line.encode() + b"\n")
            say(end["text"])
            if "again" in end:
                say(f"restart {end['again']} of {self.options.max_restarts}")

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
        mark = b"[%d] " % (self.first + rank) if self.world_size > 1 else b""
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

    def tell_where(self, ranks):
        """The time limit is reached: show where each rank is."""
        running = ranks.running()
        say(f"time limit of {self.options.timeout:g} s reached (--timeout): this is where each rank is")
        ranks.signal(signal.SIGUSR1)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            self.take_output(0.05)
        for rank in range(self.here):
            done = rank in self.reports
            state = "has ended" if rank not in running else "has run to its end" if done else "is running"
            say(f"rank {self.first + rank} of {self.world_size} {state}")


def say(text):
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def main(arguments):
    """Run a command line of launch.sh; returns the exit code."""
    try:
        options = checked(arguments)
        port = options.master_port
        nodes = Nodes(options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr, port)
        return Job(options, nodes).run()
    except (BadInput, PortTaken, Apart) as error:
        say(str(error))
        return BAD_INPUT
    except BrokenPipeError:  # nobody reads our standard error any more
        return BROKEN_PIPE
