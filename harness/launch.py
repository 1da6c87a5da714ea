"""The launcher: starts the ranks of a script on this host, shows their output, and ends them all together."""

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import select
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import recipe, schedulers
from harness.logs import Logs
from harness.nodes import SECOND_OPINION, Apart, Nodes
from harness.rank import BROKEN_PIPE
from harness.ranks import PortTaken, Ranks, Share, is_consequence, reserve_port

BAD_INPUT = 2
TIME_LIMIT_REACHED = 124
COMES_AGAIN = 60.0  # seconds in which each node must be back for a restart
LONGEST_LINE = 1 << 16  # bytes of a line that is shown in one piece
PATIENCE = 1.0  # seconds in which somebody must read what we write, when the job is to end
# How glog begins the line of an error that ends the process.
FATAL = re.compile(rb"F\d{8} \d\d:\d\d:\d\d\.\d{6} +\d+ \S+:\d+\] ")
NOISE = (b"libibverbs not available",)  # OneFlow says so on every host without InfiniBand


class BadInput(Exception):
    """What is wrong with the command line and what to type instead, in one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are BadInput."""

    def error(self, message):
        message = re.sub(r"^argument (\S+)/--\S+:", r"argument \1:", message)  # without its other spelling
        raise BadInput(f"{message}; see ./launch.sh --help")


def parser():
    """The options of launch.sh; their help stands in launch.sh itself, which can show it before Python is set up."""
    options = Parser(prog="launch.sh", add_help=False, allow_abbrev=False)
    options.add_argument("-n", "--nproc_per_node", "--nproc-per-node", type=int)
    options.add_argument("--nnodes", type=int)
    options.add_argument("--node_rank", "--node-rank", type=int)
    options.add_argument("--master_addr", "--master-addr")
    options.add_argument("--master_port", "--master-port", type=int, default=0)
    options.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    options.add_argument("--log-dir", "--log_dir")
    options.add_argument("--progress", type=float, default=60.0)
    options.add_argument("--timeout", type=float, default=600.0)
    options.add_argument("script", nargs="?")
    options.add_argument("arguments", nargs=argparse.REMAINDER)
    return options


def checked(arguments):
    """The parsed command line, with the number of ranks filled in. Raises BadInput."""
    options = parser().parse_args(arguments)
    if options.script is None:
        raise BadInput("name a Python script, such as recipes/data_parallel.py")
    script = recipe.find(options.script)
    if script is None:
        raise BadInput(f"{options.script}: no such file and no recipe: ./launch.sh lists the recipes")
    options.script = str(script)
    try:
        sizes = recipe.world_sizes(script)
    except SyntaxError as error:
        raise BadInput(f"{script}: not a Python script: line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{script}: {error}") from None
    check_nodes(options)
    if options.nproc_per_node is None and options.task:
        options.nproc_per_node = 1
    if options.nproc_per_node is None:  # as few as the script takes, the same on each node
        fitting = [size for size in sizes or (2,) if size % options.nnodes == 0]
        options.nproc_per_node = fitting[0] // options.nnodes if fitting else 1
    if options.nproc_per_node < 1:
        raise BadInput(f"-n must be 1 or more, got {options.nproc_per_node}")
    world_size = options.nnodes * options.nproc_per_node
    if sizes and world_size not in sizes:
        first, last = (sizes[0], sizes[-1]) if isinstance(sizes, range) else (min(sizes), max(sizes))
        whole = 1 < len(sizes) == last - first + 1
        accepted = f"{first} to {last}" if whole else " or ".join(map(str, sizes))
        each = "tasks of " + options.task.scheduler if options.task else "nodes"
        on_nodes = f" ({options.nproc_per_node} on each of {options.nnodes} {each})" if options.nnodes > 1 else ""
        hint = f": type -n {sizes[0]}" if options.nnodes == 1 else ""
        raise BadInput(f"{script.name} runs on {accepted} ranks, not on {world_size}{on_nodes}{hint}")
    device = re.search(r"(?:^| )--device[ =](\S+)", " ".join(options.arguments))
    if sizes and device and device.group(1) == "cuda":
        check_gpus(options.nproc_per_node)
    if not options.timeout >= 0:
        raise BadInput(f"--timeout must be a number of seconds, or 0 for no limit, got {options.timeout:g}")
    if options.master_port and not 1024 <= options.master_port <= 65535:
        raise BadInput(f"--master_port must be from 1024 to 65535, got {options.master_port}")
    if not options.progress >= 0:
        raise BadInput(f"--progress must be a number of seconds, or 0 for never, got {options.progress:g}")
    files, allowed = 64 + 8 * options.nproc_per_node, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and files > allowed:
        raise BadInput(f"-n {options.nproc_per_node} opens {files} files, and {allowed} may be: type ulimit -n {files}")
    if options.log_dir == "":
        raise BadInput("--log-dir must name a folder, got an empty name: type --log-dir logs")
    return options


def check_gpus(ranks):
    """Raises BadInput unless each rank of this host has a GPU that OneFlow 0.9.0 has code for."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        found = []
    usable = [gpu for gpu in found if re.fullmatch(rb"[678]\.\d", gpu)]
    if len(usable) < max(len(found), ranks):
        wanted = "each rank needs a GPU of compute capability 6.0 to 8.9"
        raise BadInput(f"{wanted}, got {len(usable)} for {ranks}: type --device cpu")


def check_nodes(options):
    """The options for several hosts, or what srun or mpirun says in their place. Raises BadInput."""
    try:
        typed = options.nnodes is not None or options.node_rank is not None
        options.task = None if typed else schedulers.task()
        if options.task:
            options.nnodes, options.node_rank = options.task.count, options.task.number
            options.master_addr = options.master_addr or options.task.address
            options.master_port = options.master_port or options.task.port
    except (KeyError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise BadInput(f"the variables of srun or mpirun are not whole ({what}): unset SLURM_* and OMPI_*") from None
    if options.task and not options.master_addr:
        raise BadInput(f"{options.task.scheduler} does not say where task 0 runs: type --master_addr HOST")
    if not (typed or options.task) and schedulers.unknown():
        number, count = schedulers.unknown()
        where = f"--nnodes {count} --node_rank {number} --master_addr HOST --master_port 29500"
        raise BadInput(f"task {number} of {count} of an mpirun that is not Open MPI's: type {where}, or unset PMI_SIZE")
    options.nnodes = 1 if options.nnodes is None else options.nnodes
    options.node_rank = options.node_rank or 0
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
    address = options.master_addr
    if ":" in address:
        raise BadInput(f"--master_addr {address}: OneFlow knows IPv4 only: type a name, or an address like 10.0.0.1")
    try:
        address.encode("idna")
    except UnicodeError:
        raise BadInput(f"--master_addr {address} is no name of a host: type one, or an address like 10.0.0.1") from None


def same_job(options):
    """What launchers of one job have in common besides the options that say where it runs: name -> words."""
    script, words = Path(options.script), " ".join(options.arguments) or "none"
    if len(words) > 100:  # what launchers tell each other is short
        words = f"{words[:50]} ... ({hashlib.sha256(encoded(words)).hexdigest()[:16]})"
    return {
        "script": script.name,
        "version of the script": hashlib.sha256(script.read_bytes()).hexdigest()[:16],
        "arguments": words,
        "job": options.task.job if options.task else "of no scheduler",
    }


class Job:
    """The ranks of this node, watched until the job ends on all nodes. `run` returns the exit code for the shell."""

    def __init__(self, options, nodes):
        self.options, self.nodes = options, nodes
        self.here = options.nproc_per_node
        self.first, self.world_size = nodes.number * self.here, nodes.count * self.here
        self.caught = []  # signals that end the job
        self.asked = False  # by SIGUSR1, where each rank is
        self.unread = False  # nobody takes what we write
        self.logs = None
        self.begin = time.monotonic()
        self.deadline = self.begin + options.timeout if options.timeout else float("inf")
        self.next_progress = self.begin + options.progress

    def run(self):
        ending = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            ending.remove(signal.SIGHUP)
        for number in ending:
            signal.signal(number, lambda number, frame: self.caught.append(number))
        signal.signal(signal.SIGUSR1, lambda number, frame: setattr(self, "asked", True))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who started us may ignore it: no rank would have an exit code
        with contextlib.ExitStack() as stack:
            if self.options.log_dir:
                stack.enter_context(self._open_logs())
            try:
                return self._run()
            except BrokenPipeError:  # nobody reads our output any more
                if self.logs:
                    self.logs.remark("nobody reads the output of launch.sh any more: every rank is ended")
                return BROKEN_PIPE
            finally:  # srun sends SIGTERM when another task has ended; Python takes its handlers back before it ends
                for number in ending:
                    signal.signal(number, signal.SIG_IGN)

    def _open_logs(self):
        try:
            self.logs = Logs(self.options.log_dir, range(self.first, self.first + self.here))
        except OSError as error:
            raise BadInput(f"--log-dir {self.options.log_dir}: {error.strerror}: name another folder") from None
        words = " ".join([self.options.script, *self.options.arguments])
        self.logs.remark(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, one of {self.world_size} ranks of {words}")
        return self.logs

    def _run(self):
        end = {"again": 0}
        while "again" in end:
            with self.nodes:
                limit = (self.deadline, "until --timeout")
                if end["again"]:  # all were there a moment ago
                    limit = min(limit, (time.monotonic() + COMES_AGAIN, f"again within {COMES_AGAIN:.0f} s"))
                self.nodes.meet(limit[0], self.say, lambda: self.caught, limit[1])
                if self.caught:
                    self.say(f"{signal.Signals(self.caught[0]).name}: nothing was started")
                    return 128 + self.caught[0]
                end = self.attempt(end["again"])
        return end["code"]

    def attempt(self, restarts):
        """Start this node's ranks and watch them; returns how the job ends, or {"again": number of restarts}."""
        self.reports = {}  # rank -> what its wrapper said of its end; ranks are counted on this node
        self.notes = {}  # rank -> that as bytes, as far as they have come
        self.rest = {}  # rank -> the part of a line of standard error that has no end yet
        self.printed = {}  # rank -> that of a line of standard output
        self.asked = False
        self.ended = False
        self.last_words = {}  # rank -> what it wrote from OneFlow's fatal error on
        self.selector = selectors.DefaultSelector()
        reserved = None
        if self.nodes.number == 0:
            reserved = reserve_port(self.options.master_port if self.nodes.count == 1 else 0)
        start = self.nodes.begin(reserved and reserved.getsockname()[1])
        start["address"] = start["address"] or self.options.master_addr
        share = Share(self.world_size, self.here, self.first, **start)
        kinds = {"stderr": self.show, "report": self.note}  # where it comes from -> what takes it
        if self.logs:
            kinds["stdout"] = self.print
        pipes = {kind: [os.pipe() for _ in range(self.here)] for kind in kinds}
        writing = {kind: [write for _, write in pairs] for kind, pairs in pipes.items()}
        with Ranks(
            [self.options.script, *self.options.arguments],
            share,
            channels=[{"HARNESS_REPORT": write} for write in writing["report"]],
            variables={"HARNESS_MARK": ""} if self.logs else None,
            stdout=writing.get("stdout"),
            stderr=writing["stderr"],
        ) as ranks:
            for kind, pairs in pipes.items():
                for rank, (read, write) in enumerate(pairs):
                    os.close(write)
                    os.set_blocking(read, False)
                    self.selector.register(read, selectors.EVENT_READ, (kinds[kind], rank))
            end = self.watch(ranks, restarts)
            self.tell(end, ranks)
        if self.logs:
            self.close_logs(end)
        elif end.get("signal"):
            self.take_output(0)  # what ranks say that end in good order
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
            self.tell_progress()
            if self.asked:
                self.asked = False
                ranks.show_where()
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
                    failures[-1]["restart"] = False  # there is nobody to start again there
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
                "signal": True,
                "restart": False,
                **common,
            }
        if time.monotonic() >= self.deadline:
            return {"code": TIME_LIMIT_REACHED, "limit": True, "text": "", "restart": False, **common}
        codes = {rank: process.returncode for rank, process in enumerate(ranks.processes) if rank not in running}
        failed = [rank for rank in codes if codes[rank]]
        if failed or not running:
            self.take_output(0)
            for take, parts in ((self.show, self.rest), (self.print, self.printed)):
                for rank, rest in parts.items():
                    if rest:  # a last line without an end
                        take(rank, b"\n")
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
            "restart": code != BAD_INPUT and not self.reports.get(rank, {}).get("unread"),
            "unread": self.reports.get(rank, {}).get("unread", False),
        }
        if code == BAD_INPUT and text:  # the same on every rank, so without a mark
            found["text"] = text
        found["time"] = min(self.time_of_end(rank), common.pop("time"))
        return {**found, **common}

    def tell(self, end, ranks):
        """Say how the job ended, on standard error."""
        if end.get("unread") and end["node"] == self.nodes.number:  # nobody reads here, and who did not has had enough
            return
        if end["code"] == 0 or end.get("limit"):  # no rank's death made them say it
            for lines in self.last_words.values():
                self.put(sys.stderr, b"".join(lines))
        if end.get("limit"):
            self.tell_where(ranks)
        elif end["code"] == BAD_INPUT and not end["text"].startswith("rank "):
            self.put(sys.stderr, encoded(end["text"]) + b"\n")
        elif end["code"]:
            if end["node"] == self.nodes.number and "rank" in end:
                said = self.last_words.pop(end["rank"], [])
                for line in self.reports.get(end["rank"], {}).get("text", "").splitlines():
                    said.append(self.mark(end["rank"]) + encoded(line) + b"\n")
                self.put(sys.stderr, b"".join(said))
            self.say(end["text"])
            if "again" in end:
                self.say(f"restart {end['again']} of {self.options.max_restarts}")

    def take_output(self, seconds):
        """Wait up to `seconds` for output, then hand on all that there is; of what has no end, a good part."""
        for _ in range(16):  # each of all that a pipe holds
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
        self.log(rank, data)
        lines = self.lines(self.rest, rank, data)
        mark, shown = self.mark(rank), []
        for line in lines:
            if rank in self.last_words or FATAL.match(line):  # it may only follow from the death of another rank
                self.last_words.setdefault(rank, []).append(mark + line)
            elif self.is_shown(rank) and not line.startswith(NOISE):
                shown.append(mark + line)
        self.put(sys.stderr, b"".join(shown))

    def print(self, rank, data):
        """Pass on standard output, where a log is kept: of the first rank here only."""
        self.log(rank, data)
        lines = self.lines(self.printed, rank, data)
        if self.is_shown(rank):
            self.put(sys.stdout, b"".join(self.mark(rank) + line for line in lines))

    def put(self, stream, data):
        """Write to our own output. A reader who takes nothing makes the job wait, but must not keep it from its end."""
        waited = 0.0
        while data and not self.unread:
            if select.select([], [stream], [], 0.1)[1]:
                # So much does not block, and goes in one piece; whole lines, as ranks may write there as well.
                piece = data[: data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF]
                try:
                    data = data[os.write(stream.fileno(), piece) :]
                except BrokenPipeError:
                    raise
                except OSError:  # such as a full disk
                    self.unread = True
            elif self.caught or time.monotonic() >= self.deadline:
                waited += 0.1
                self.unread = waited > PATIENCE
            self.nodes.beat()

    def say(self, text):
        self.put(sys.stderr, encoded(f"launch.sh: {text}\n"))

    @staticmethod
    def lines(rests, rank, data):
        """The lines that end in `data`, with their ends; what is behind the last is kept, unless it is very long.

        A carriage return ends a line as well, once it is known that no line feed follows.
        """
        rest = rests.setdefault(rank, bytearray())
        whole = rest.endswith(b"\r")
        rest += data
        if not (whole or b"\n" in data or b"\r" in data or len(rest) >= LONGEST_LINE):
            return []
        lines = bytes(rest).splitlines(keepends=True)
        last = b"" if lines[-1].endswith(b"\n") else lines.pop()
        if len(last) >= LONGEST_LINE:
            lines.append(last + b"\n")
            last = b""
        rests[rank] = bytearray(last)
        return lines

    def mark(self, rank):
        return b"[%d] " % (self.first + rank) if self.world_size > 1 else b""

    def is_shown(self, rank):
        """Whether the terminal shows what a rank writes; the logs, if there are any, have it of all."""
        return not self.ended and (not self.logs or rank == 0)

    def log(self, rank, data):
        if self.logs:
            self.logs.write(rank, data)

    def tell_progress(self):
        """Once in a while, where logs are kept: how far it is."""
        if self.logs and self.logs.lost:
            self.say(self.logs.lost)
            self.logs.lost = ""  # said once
        if self.logs and self.options.progress and time.monotonic() >= self.next_progress:
            self.next_progress = time.monotonic() + self.options.progress
            self.say(f"{time.monotonic() - self.begin:.0f} s; {self.logs.progress()}")

    def close_logs(self, end):
        """What is left of a rank's output goes to its log alone: it has been ended for another's failure."""
        self.ended = True
        self.take_output(0)
        for rank in range(self.here):
            text = self.reports.get(rank, {}).get("text", "")
            if text:
                self.logs.write(rank, encoded(text) + b"\n")
        words = "" if end["code"] else "ended well"
        if end.get("limit"):
            words = f"time limit of {self.options.timeout:g} s reached (--timeout)"
        self.logs.remark(words or end["text"] or f"exit code {end['code']}")
        if "again" in end:
            self.logs.remark(f"restart {end['again']} of {self.options.max_restarts}")

    def note(self, rank, data):
        """Keep what a rank's wrapper says of its end, a line of JSON."""
        self.notes[rank] = self.notes.get(rank, b"") + data
        if self.notes[rank].endswith(b"\n"):
            self.reports[rank] = json.loads(self.notes[rank].splitlines()[-1])

    def time_of_end(self, rank):
        return self.reports.get(rank, {}).get("time", float("inf"))

    def tell_where(self, ranks):
        """The time limit is reached: show where each rank is."""
        running = ranks.running()
        self.say(f"time limit of {self.options.timeout:g} s reached (--timeout): this is where each rank is")
        ranks.show_where()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            self.take_output(0.05)
        for rank in range(self.here):
            state = ranks.state(rank) if rank in running else "has ended"
            if state == "is running" and rank in self.reports:
                state = "has run to its end"
            self.say(f"rank {self.first + rank} of {self.world_size} {state}")


def encoded(text):
    """Bytes of a text that may have what is no letter, such as a name of a file in another encoding."""
    return text.encode(errors="backslashreplace")


def say(text):
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def main(arguments):
    """Run a command line of launch.sh; returns the exit code."""
    try:
        options = checked(arguments)
        port = options.master_port
        where = (options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr, port)
        each = f" (each task of {options.task.scheduler} is a node)" if options.task else ""
        nodes = Nodes(*where, same_job(options), each)
        return Job(options, nodes).run()
    except (BadInput, PortTaken, Apart) as error:
        say(str(error))
        return BAD_INPUT
    except OSError as error:  # no more processes or files are to be had, say
        say(f"{error}: every rank is ended")
        return 1
