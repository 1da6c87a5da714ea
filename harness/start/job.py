"""One job: the ranks of this node, started and watched until the job ends on all nodes."""

import contextlib
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

from harness.start.nodes import Nodes
from harness.start.options import BadInput, checked, same_on_all_nodes
from harness.start.output import Output, encoded, say, write
from harness.start.ranks import NodeRanks, Ranks, is_consequence, reserve_port

BAD_INPUT = 2
TIME_LIMIT_REACHED = 124
BROKEN_PIPE = 128 + signal.SIGPIPE
VERDICT_DELAY = 2.0  # seconds in which another node may report the cause of a failure that is only a consequence


@dataclass
class Outcome:
    """How the ranks of a node have ended, or the whole job; launchers send it to each other."""

    code: int  # exit code for the shell
    cause: str  # "done", "rank", "arguments", "signal", "time limit", "node" or "reader"
    node: int  # where
    text: str = ""  # what to say of it
    rank: Optional[int] = None  # the local rank that failed
    time: float = field(default_factory=time.time)
    consequence: bool = False  # whether it looks like OneFlow's answer to the death of another rank
    restart: int = 0  # number of the restart that follows; 0: none


class Job:
    """The ranks of this node. `run` starts them, watches them and returns the exit code for the shell."""

    def __init__(self, options, nodes):
        self.options, self.nodes = options, nodes
        self.count = options.nproc_per_node
        self.first, self.world_size = nodes.number * self.count, nodes.count * self.count
        self.where = f" on {nodes.name}" if nodes.count > 1 else ""
        self.signals = []  # received, of those that end the job
        self.dump_requested = False  # by SIGUSR1
        self.logs = []  # a file for each rank of this node
        self.deadline = time.monotonic() + (options.timeout or float("inf"))

    def run(self):
        ending = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            ending.remove(signal.SIGHUP)
        for number in ending:
            signal.signal(number, lambda number, frame: self.signals.append(number))
        signal.signal(signal.SIGUSR1, lambda number, frame: setattr(self, "dump_requested", True))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.nodes)
            if self.options.log_dir:
                self.open_logs(stack)
            try:
                outcome = self.attempt(0)
                while outcome.restart:
                    outcome = self.attempt(outcome.restart)
                return outcome.code
            finally:  # a SIGTERM from srun, when all is over, must not change the exit code
                for number in ending:
                    signal.signal(number, signal.SIG_IGN)

    def open_logs(self, stack):
        """Open DIR/rank_K.log for each rank K of this node; a job appends to the files of an earlier one."""
        folder = Path(self.options.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = [folder / f"rank_{self.first + rank}.log" for rank in range(self.count)]
            self.logs = [stack.enter_context(path.open("ab", buffering=0)) for path in paths]
        except OSError as error:
            raise BadInput(f"--log-dir {folder}: {error.strerror}: name another folder") from None
        words = " ".join([self.options.script, *self.options.arguments])
        self.log(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, one of {self.world_size} ranks of {words}")

    def log(self, text):
        """Append a line of the launcher to all logs."""
        for file in self.logs:
            file.write(encoded(f"launch.sh: {text}\n"))

    def attempt(self, restart):
        """Start the ranks and watch them; returns the Outcome of the job. restart: the number of this attempt."""
        with contextlib.ExitStack() as stack:
            port = 0
            if self.nodes.is_leader:
                wanted = self.options.master_port if self.nodes.count == 1 else 0
                port = stack.enter_context(reserve_port(wanted)).getsockname()[1]
            start = self.nodes.begin(port, self.deadline, lambda: self.signals)
            if start is None:
                say(f"{signal.Signals(self.signals[0]).name}: nothing was started")
                return Outcome(128 + self.signals[0], "signal", self.nodes.number)
            node_ranks = NodeRanks(self.world_size, count=self.count, first=self.first, **start)
            output = stack.enter_context(contextlib.closing(Output(self.count, self.prefix, self.logs)))
            command = [self.options.script, *self.options.arguments]
            with Ranks(command, node_ranks, **output.writing) as ranks:
                output.close_writing()
                outcome = self.watch(ranks, output, restart)
                self.announce(outcome, ranks, output)
            output.on_terminal = outcome.cause == "signal"  # what a script says that ends in good order
            output.read_rest()
            for file, report in zip(self.logs, output.reports):
                file.write(encoded(report.text + "\n" * bool(report.text)))
            self.log(outcome.text or "ended well")
            if outcome.restart:
                self.log(f"restart {outcome.restart} of {self.options.max_restarts}")
            return outcome

    def prefix(self, rank):
        return b"[%d] " % (self.first + rank) if self.world_size > 1 else b""

    def watch(self, ranks, output, restart):
        """Wait for the end of the job, on this node or another; returns the Outcome that all nodes agree on."""
        own, outcomes, decide_at = None, [], float("inf")
        while True:
            output.read(0.02)
            if self.dump_requested:
                self.dump_requested = False
                ranks.dump_tracebacks()
            if own is None:
                own = self.local_outcome(ranks, output)
                if own:
                    outcomes.append(own)
                    self.nodes.send(outcome=asdict(own), restart=restart)
            for message in self.nodes.receive():
                if "lost" in message:
                    outcomes.append(Outcome(1, "node", message["node"], f"{message['lost']} is gone"))
                elif message.get("restart") != restart:  # of an earlier attempt
                    continue
                elif "verdict" in message:
                    return Outcome(**message["verdict"])
                else:
                    outcomes.append(Outcome(**message["outcome"]))
            failures, verdict = [outcome for outcome in outcomes if outcome.code], None
            decides = self.nodes.is_leader or not self.nodes.peers
            if failures and decides and decide_at == float("inf"):
                unsure = self.nodes.peers and all(failure.consequence for failure in failures)
                decide_at = time.monotonic() + (VERDICT_DELAY if unsure else 0)
            if time.monotonic() >= decide_at:
                verdict = min(failures, key=lambda outcome: (outcome.consequence, outcome.time))
                if self.nodes.is_leader and verdict.cause == "rank" and restart < self.options.max_restarts:
                    verdict.restart = restart + 1
            elif self.nodes.is_leader and not failures and len(outcomes) == self.nodes.count:
                verdict = own
            if verdict:
                self.nodes.send(verdict=asdict(verdict), restart=restart)
                return verdict

    def local_outcome(self, ranks, output):
        """The Outcome of this node's ranks; None while they run and nothing has happened that ends the job."""
        node = self.nodes.number
        if self.signals:
            number = self.signals[0]
            text = f"{signal.Signals(number).name}{self.where}: every rank is ended"
            return Outcome(128 + number, "signal", node, text)
        if time.monotonic() >= self.deadline:
            text = f"time limit of {self.options.timeout:g} s reached (--timeout)"
            return Outcome(TIME_LIMIT_REACHED, "time limit", node, text)
        codes = ranks.exit_codes()
        failed = [rank for rank in codes if codes[rank]]
        if failed or len(codes) == self.count:
            output.read_rest()
        if output.closed:
            text = f"nobody reads the output{self.where} any more: every rank is ended"
            return Outcome(BROKEN_PIPE, "reader", node, text)
        if not failed:
            return Outcome(0, "done", node) if len(codes) == self.count else None
        rank = min(failed, key=lambda rank: (output.reports[rank].time, is_consequence(codes[rank])))
        code, report = codes[rank], output.reports[rank]
        why = f"exit code {code}" if code > 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"
        text = f"rank {self.first + rank} of {self.world_size}{self.where} failed: {why}; every rank is ended"
        cause = "rank"
        if code == BAD_INPUT:  # every rank says the same, and would say it again after a restart
            cause, text = "arguments", report.text or f"launch.sh: {text}"
        ended = min(report.time, time.time())
        return Outcome(code if code > 0 else 128 - code, cause, node, text, rank, ended, is_consequence(code))

    def announce(self, outcome, ranks, output):
        """Print how the job ended."""
        here = outcome.node == self.nodes.number
        if outcome.cause == "done" and self.first == 0 and output.reports[0].text:
            write(sys.stdout, encoded(output.reports[0].text) + b"\n")  # --help
        if outcome.cause in ("done", "time limit"):
            for rank in range(self.count):
                output.show_error(rank)
        if outcome.cause == "time limit":
            self.show_ranks(outcome, ranks, output)
        elif outcome.cause == "arguments":
            write(sys.stderr, encoded(outcome.text) + b"\n")
        elif outcome.code and not (outcome.cause == "reader" and here):
            if outcome.cause == "rank" and here:
                output.show_error(outcome.rank, output.reports[outcome.rank].text)
            say(outcome.text)
        if outcome.restart:
            say(f"restart {outcome.restart} of {self.options.max_restarts}")

    def show_ranks(self, outcome, ranks, output):
        """Show where each rank is when the time limit is reached."""
        say(f"{outcome.text}: this is where each rank is")
        ranks.dump_tracebacks()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            output.read(0.05)
        for rank, report in enumerate(output.reports):
            state = ranks.state(rank)
            if state == "is running" and report.code is not None:
                state = "has run to its end"
            say(f"rank {self.first + rank} of {self.world_size} {state}")


def main(arguments):
    """Run a command line of launch.sh; returns the exit code."""
    try:
        options = checked(arguments)
        where = (options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr, options.master_port)
        return Job(options, Nodes(*where, same_on_all_nodes(options))).run()
    except BadInput as error:
        say(str(error))
        return BAD_INPUT
    except OSError as error:  # such as a full disk
        say(f"{error}: every rank is ended")
        return 1
