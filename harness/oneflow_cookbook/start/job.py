"""One job: the ranks of this node, started and watched until the job ends on all nodes."""

import contextlib
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from oneflow_cookbook.start import ending, unanswered
from oneflow_cookbook.start.ending import Cause, Outcome, Received
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.nodes import Nodes
from oneflow_cookbook.start.options import checked, same_on_all_nodes
from oneflow_cookbook.start.output import Output, encoded, say, write
from oneflow_cookbook.start.ranks import RankAssignment, RankProcesses, check_loopback, is_consequence, reserve_port
from oneflow_cookbook.start.signals import heeded
from oneflow_cookbook.start.silence import HOW_TO_END, Silence, lost


class Job:
    """The ranks of this node; `run` starts and watches them."""

    def __init__(self, options, nodes):
        self.options, self.nodes = options, nodes
        self.nproc_per_node = options.nproc_per_node
        self.first = nodes.node_rank * self.nproc_per_node  # the lowest rank of this node
        self.world_size = nodes.nnodes * self.nproc_per_node
        self.where = f" on {nodes.name}" if nodes.nnodes > 1 else ""
        self.signals = []  # those received that end the job
        self.dump_requested = False  # whether SIGUSR1 came: show where each rank is
        self.reported_print = 0.0  # when this node last told node 0 that a rank prints
        self.logs = []  # a file for each rank of this node
        self.deadline = time.monotonic() + (options.timeout or float("inf"))
        self.silence = Silence(options.silent)

    def run(self):
        """Run the job, with its restarts; returns the exit code for the shell."""
        end_signals = heeded([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
        for signum in end_signals:
            signal.signal(signum, lambda signum, frame: self.signals.append(signum))
        signal.signal(signal.SIGUSR1, lambda signum, frame: setattr(self, "dump_requested", True))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.nodes)
            if self.options.log_dir:
                self.open_logs(stack)
            try:
                outcome = self.run_attempt(0)
                while outcome.restart:
                    outcome = self.run_attempt(outcome.restart)
                return outcome.code
            finally:  # a SIGTERM from srun, when all is over, must not change the exit code
                for signum in end_signals:
                    signal.signal(signum, signal.SIG_IGN)

    def open_logs(self, stack):
        """Open DIR/rank_K.log for each rank K of this node; a job appends to the files of an earlier one."""
        folder = Path(self.options.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = [folder / f"rank_{self.first + rank}.log" for rank in range(self.nproc_per_node)]
            self.logs = [stack.enter_context(path.open("ab", buffering=0)) for path in paths]
        except OSError as error:
            raise UsageError(f"--log-dir {folder}: {error.strerror}: choose a different folder") from None
        words = " ".join([self.options.script, *self.options.arguments])
        self.log(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, one of {self.world_size} ranks of {words}")

    def log(self, text):
        """Append a line of the launcher to all logs."""
        for file in self.logs:
            file.write(encoded(f"launch.sh: {text}\n"))

    def run_attempt(self, attempt):
        """Start the ranks and watch them; returns the Outcome. attempt: 0, or the number of the restart."""
        with contextlib.ExitStack() as stack:
            port = 0
            if not self.nodes.is_leader:
                check_loopback()
            else:
                wanted = self.options.master_port if self.nodes.nnodes == 1 else 0
                port = stack.enter_context(reserve_port(wanted)).getsockname()[1]
            start = self.nodes.begin(port, self.deadline, self.options.silent, lambda: self.signals)
            if start is None:
                say(f"{signal.Signals(self.signals[0]).name}: nothing was started")
                return Outcome(128 + self.signals[0], Cause.SIGNAL, self.nodes.node_rank)
            own = {"nproc_per_node": self.nproc_per_node, "first": self.first}
            own["reads"] = self.world_size == 1 and not in_background()
            assignment = RankAssignment(self.world_size, **own, **start)
            output = stack.enter_context(contextlib.closing(Output(self.nproc_per_node, self.prefix, self.logs)))
            name = ["-m", self.options.module] if self.options.module else [self.options.script]
            script = [*name, *self.options.arguments]
            with RankProcesses(script, assignment, **output.writing) as ranks:
                output.close_writing()
                outcome = self.watch(ranks, output, attempt)
                self.announce(outcome, ranks, output)
                output.on_terminal = outcome.cause is Cause.SIGNAL  # then the script may still report how it ends
                if outcome.cause is Cause.SIGNAL and outcome.code == 128 + signal.SIGTERM:
                    self.wait_for_end(ranks, output)
            output.read_rest()
            self.log_end(outcome, output)
            return outcome

    def wait_for_end(self, ranks, output):
        """After SIGTERM, ranks have --grace seconds to save a checkpoint. Any other signal ends the wait.

        Launchers wait for each other too: srun and mpirun may kill the others when the first launcher exits.
        """
        ranks.ask_to_end()
        deadline = time.monotonic() + self.options.grace
        ended = False  # whether all ranks of this node have
        waiting = {peer.hello["node"] for peer in self.nodes.peers}  # node 0 waits for all others, these for node 0
        while set(self.signals) <= {signal.SIGTERM} and time.monotonic() < deadline and (waiting or not ended):
            output.read(0.02)
            if not ended and len(ranks.exit_codes()) == self.nproc_per_node:
                ended = True
                if not self.nodes.is_leader:  # node 0 ends last, and closes the connections
                    self.nodes.send(ended=True, node=self.nodes.node_rank)
            for message in iter(self.nodes.receive, None):
                if "ended" in message or "lost" in message:
                    waiting.discard(message["node"])
        running = sorted(set(range(self.nproc_per_node)) - set(ranks.exit_codes()))
        if running and time.monotonic() >= deadline:
            numbers = ", ".join(str(self.first + rank) for rank in running)
            say(f"--grace, {self.options.grace:g} s, is over, and these ranks are killed: {numbers}")
        ranks.end(grace=0)
        output.read_rest()
        for rank, report in enumerate(output.reports):
            if report.code:  # such as a checkpoint that could not be saved
                output.show_error(rank, report.text)

    def log_end(self, outcome, output):
        """Append to the logs each rank's traceback or message, and how the job ended."""
        for file, report in zip(self.logs, output.reports):
            if report.text:
                file.write(encoded(f"{report.text}\n"))
        self.log(outcome.text or "succeeded")
        if outcome.restart:
            self.log(f"restart {outcome.restart} of {self.options.max_restarts}")

    def prefix(self, rank):
        return b"[%d] " % (self.first + rank) if self.world_size > 1 else b""

    def watch(self, ranks, output, attempt):
        """Wait for the end of the job, on this node or another; returns the Outcome that all nodes agree on."""
        here, received = None, []
        while True:
            output.read(0.02)
            if self.dump_requested:
                self.dump_requested = False
                ranks.dump_tracebacks(signal.SIGUSR1)
            now = time.monotonic()
            self.watch_silence(now, ranks, output, attempt)
            if here is None:
                here = self.outcome_here(ranks, output)
                if here:
                    received.append(Received(here, now))
                    self.nodes.send(outcome=asdict(here), attempt=attempt)
            for message in iter(self.nodes.receive, None):
                if "lost" in message:
                    lost = Outcome(1, Cause.NODE, message["node"], f"{message['lost']} is gone")
                    received.append(Received(lost, now))
                elif message.get("attempt") != attempt:  # sent in an earlier attempt
                    continue
                elif "printed" in message:  # a rank of another node
                    output.printed = now
                elif "silent" in message:
                    self.show_silence(message["silent"], ranks, output)
                elif "verdict" in message:
                    return ending.outcome_from(message["verdict"])
                else:
                    received.append(Received(ending.outcome_from(message["outcome"]), now))
            verdict = ending.decide(received, now, self.nodes.nnodes, self.nodes.is_leader, len(self.nodes.peers))
            if verdict:
                if self.nodes.is_leader:
                    verdict = ending.with_restart(verdict, attempt, self.options.max_restarts)
                self.nodes.send(verdict=asdict(verdict), attempt=attempt)
                return verdict

    def watch_silence(self, now, ranks, output, attempt):
        """On node 0, show a long silence on all nodes; elsewhere, report once a second at most that ranks print."""
        if self.nodes.is_leader:
            silent = self.silence.to_show(output.printed, now)
            if silent:
                self.nodes.send(silent=silent, attempt=attempt)
                self.show_silence(silent, ranks, output)
        elif output.printed > self.reported_print and now > self.reported_print + 1:
            self.reported_print = now
            self.nodes.send(printed=True, attempt=attempt)

    def outcome_here(self, ranks, output):
        """The Outcome of this node's ranks; None while they run and nothing ends the job."""
        node = self.nodes.node_rank
        if self.signals:
            signum = self.signals[0]
            text = f"{signal.Signals(signum).name}{self.where}: every rank is ended"
            return Outcome(128 + signum, Cause.SIGNAL, node, text)
        if time.monotonic() >= self.deadline:
            text = f"time limit of {self.options.timeout:g} s reached (--timeout)"
            return Outcome(ending.TIME_LIMIT_REACHED, Cause.TIME_LIMIT, node, text)
        codes = ranks.exit_codes()
        if any(codes.values()) or len(codes) == self.nproc_per_node:
            output.read_rest()
        if output.closed:
            text = f"nobody reads the output{self.where} any more: every rank is ended"
            return Outcome(ending.BROKEN_PIPE, Cause.READER, node, text)
        rank = ending.first_failure(codes, output.reports)
        if rank is not None:
            report, all_ended = output.reports[rank], len(codes) == self.nproc_per_node
            if report.refused and not all_ended and time.time() < report.time + ending.REFUSAL_DELAY:
                return None  # the others may refuse too
            return self.failure(rank, codes[rank], output.reports)
        return Outcome(0, Cause.DONE, node) if len(codes) == self.nproc_per_node else None

    def failure(self, rank, code, reports):
        """The Outcome of a local rank that has failed. reports: of all ranks."""
        why = f"exit code {code}" if code > 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"
        text = f"rank {self.first + rank} of {self.world_size}{self.where} failed: {why}; every rank is ended"
        cause = Cause.RANK
        if all(report.refused for report in reports):  # and they would again after a restart
            messages = dict.fromkeys(report.text for report in reports)  # each once: most are the same on all ranks
            cause, text = Cause.ARGUMENTS, "\n".join(messages).strip() or f"launch.sh: {text}"
        shell_code, ended = ending.exit_code(code), min(reports[rank].time, time.time())
        return Outcome(shell_code, cause, self.nodes.node_rank, text, rank, ended, is_consequence(code))

    def announce(self, outcome, ranks, output):
        """Print how the job ended."""
        here = outcome.node == self.nodes.node_rank
        if outcome.cause is Cause.DONE and self.first == 0 and output.reports[0].text:
            write(sys.stdout, encoded(output.reports[0].text) + b"\n")  # --help
        if outcome.cause in (Cause.DONE, Cause.TIME_LIMIT):
            for rank in range(self.nproc_per_node):
                output.show_error(rank)
        if outcome.cause is Cause.TIME_LIMIT:
            self.show_ranks(outcome.text, ranks, output)
        elif outcome.cause is Cause.ARGUMENTS:
            write(sys.stderr, encoded(outcome.text) + b"\n")
        elif outcome.code and not (outcome.cause is Cause.READER and here):
            if outcome.cause is Cause.RANK and here:
                output.show_error(outcome.rank, output.reports[outcome.rank].text)
            say(outcome.text)
        if outcome.restart:
            say(f"restart {outcome.restart} of {self.options.max_restarts}")

    def show_silence(self, seconds, ranks, output):
        """Show where each rank is, after `seconds` without output."""
        text = f"no rank has printed for {seconds:g} s"
        self.log(text)
        self.show_ranks(text, ranks, output)
        say(f"the job continues; {HOW_TO_END}")

    def show_ranks(self, why, ranks, output):
        """Show where each rank of this node is. why: the reason, for the first line."""
        say(f"{why}: this is where each rank is")
        ranks.dump_tracebacks()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            output.read(0.05)
        for rank, report in enumerate(output.reports):
            state = ranks.state(rank)
            if state == "is running" and report.code is not None:
                state = "has run to its end"
            say(f"rank {self.first + rank} of {self.world_size} {state}")
        for rank, no_room in output.lost.items():
            say(lost(self.first + rank, no_room))
        if all(report.code == 0 for report in output.reports) and len(ranks.exit_codes()) < self.nproc_per_node:
            others = ", or the ranks of another node still run" if self.nodes.nnodes > 1 else ""
            say(f"every rank{self.where} has run to its end, but a collective was never answered{others}")
            for line in unanswered.lines({self.first + k: report.calls for k, report in enumerate(output.reports)}):
                say(line)


def in_background():
    """Whether another program has the terminal from which our standard input comes."""
    with contextlib.suppress(OSError):  # it comes from no terminal
        return os.tcgetpgrp(0) != os.getpgrp()
    return False


def main(arguments):
    """Run a command line of launch.sh; returns the exit code."""
    try:
        options = checked(arguments)
        where = (options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr, options.master_port)
        return Job(options, Nodes(*where, same_on_all_nodes(options))).run()
    except UsageError as error:
        say(str(error))
        return ending.BAD_INPUT
    except OSError as error:  # such as a full disk
        say(f"{error}: every rank is ended")
        return 1
