"""One job: the ranks that this launcher starts, and watches until they end."""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from pathlib import Path

from oneflow_cookbook.start import ending
from oneflow_cookbook.start.cores import cores_of_ranks
from oneflow_cookbook.start.ending import Cause, JobOutcome
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.options import checked
from oneflow_cookbook.start.output import RankOutput, encoded, say, write
from oneflow_cookbook.start.ranks import RankAssignment, RankProcesses, check_loopback, is_consequence, reserve_port
from oneflow_cookbook.start.signals import heeded
from oneflow_cookbook.start.silence import HOW_TO_END, Silence, lost_batch_in_words

NOTICE_DELAY = 5.0  # seconds after which a rank that waits for other launchers is shown


class Job:
    """The ranks of this launcher; `run` starts and watches them. It talks to no other launcher of the job."""

    def __init__(self, options):
        self.options = options
        self.nproc_per_node = options.nproc_per_node
        self.first = options.node_rank * self.nproc_per_node  # the lowest rank of this launcher
        self.world_size = options.nnodes * self.nproc_per_node
        self.several = options.nnodes > 1  # launchers
        self.on_host = f" on {socket.gethostname()}" if self.several else ""
        self.every_rank = "every rank here" if self.several else "every rank"
        self.signals = []  # those received that end the job
        self.dump_requested = False  # whether SIGUSR1 came: show where each rank is
        self.waiting_shown = False
        self.logs = []  # a file for each rank
        self.deadline = time.monotonic() + (options.timeout or float("inf"))
        # In most scripts only rank 0 prints, so only its launcher knows whether the job is silent.
        self.silence = Silence(options.silent if self.first == 0 else 0)

    def run(self):
        """Run the job, with its restarts; returns the exit code for the shell."""
        end_signals = heeded([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
        for signum in end_signals:
            signal.signal(signum, lambda signum, frame: self.signals.append(signum))
        signal.signal(signal.SIGUSR1, lambda signum, frame: setattr(self, "dump_requested", True))
        with contextlib.ExitStack() as stack:
            if self.options.log_dir:
                self.open_logs(stack)
            try:
                outcome = self.run_attempt()
                for restart in range(1, self.options.max_restarts + 1):
                    if outcome.cause is not Cause.RANK:
                        break
                    text = f"restart {restart} of {self.options.max_restarts}"
                    say(text)
                    self.log(text)
                    outcome = self.run_attempt()
                return outcome.code
            finally:  # a SIGTERM from srun, when all is over, must not change the exit code
                for signum in end_signals:
                    signal.signal(signum, signal.SIG_IGN)

    def open_logs(self, stack):
        """Open DIR/rank_K.log for each rank K of this launcher; a job appends to the files of an earlier one."""
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

    def run_attempt(self):
        """Start the ranks and watch them; returns the JobOutcome."""
        options = self.options
        with contextlib.ExitStack() as stack:
            port = options.master_port
            if self.first == 0:
                port = stack.enter_context(reserve_port(port)).getsockname()[1]
            else:
                check_loopback()
            assignment = RankAssignment(
                self.world_size,
                port,
                self.nproc_per_node,
                self.first,
                # LOCAL_RANK 0 twice on one host, or unequal numbers of ranks on hosts, would give empty shards
                local_rank=None if self.several else 0,
                cores=cores_of_ranks(self.nproc_per_node, options.task),
                address=options.master_addr,
                reads=self.world_size == 1 and not in_background(),
            )
            output = stack.enter_context(contextlib.closing(RankOutput(self.nproc_per_node, self.prefix, self.logs)))
            name = ["-m", options.module] if options.module else [options.script]
            with RankProcesses([*name, *options.arguments], assignment, **output.writing) as ranks:
                output.close_writing()
                outcome = self.watch(ranks, output)
                self.announce(outcome, ranks, output)
                output.on_terminal = outcome.cause is Cause.SIGNAL  # then the script may still report how it ends
                if outcome.cause is Cause.SIGNAL and outcome.code == 128 + signal.SIGTERM:
                    outcome = self.wait_for_end(outcome, ranks, output)
            output.read_rest()
            self.log_end(outcome, output)
            return outcome

    def wait_for_end(self, outcome, ranks, output):
        """After SIGTERM, ranks have --grace seconds to save a checkpoint. Any other signal ends the wait.

        Returns the outcome, with exit code 0 if each rank ended with 0: at any other code srun and mpirun may kill the
        other launchers, whose ranks may still save.
        """
        ranks.ask_to_end()
        deadline = time.monotonic() + self.options.grace
        while set(self.signals) <= {signal.SIGTERM} and time.monotonic() < deadline:
            output.read(0.02)
            if len(ranks.exit_codes()) == self.nproc_per_node:
                break
        codes = ranks.exit_codes()
        running = sorted(set(range(self.nproc_per_node)) - set(codes))
        if running and time.monotonic() >= deadline:
            numbers = ", ".join(str(self.first + rank) for rank in running)
            say(f"--grace, {self.options.grace:g} s, is over, and these ranks are killed: {numbers}")
        ranks.end(grace=0)
        output.read_rest()
        for rank, report in enumerate(output.reports):
            if report.code:  # such as a checkpoint that could not be saved
                output.show_error(rank, report.text)
        return outcome if running or any(codes.values()) else dataclasses.replace(outcome, code=0)

    def log_end(self, outcome, output):
        """Append to the logs each rank's traceback or message, and how the job ended."""
        for file, report in zip(self.logs, output.reports):
            if report.text:
                file.write(encoded(f"{report.text}\n"))
        self.log(outcome.text or "succeeded")

    def prefix(self, rank):
        return b"[%d] " % (self.first + rank) if self.world_size > 1 else b""

    def watch(self, ranks, output):
        """Wait until something ends the job on this launcher; returns the JobOutcome."""
        while True:
            output.read(0.02)
            if self.dump_requested:
                self.dump_requested = False
                ranks.dump_tracebacks(signal.SIGUSR1)
            now = time.monotonic()
            self.show_waiting(now, output)
            silent = self.silence.to_show(output.printed, now)
            if silent:
                self.show_silence(silent, ranks, output)
            outcome = self.outcome(ranks, output)
            if outcome:
                return outcome

    def show_waiting(self, now, output):
        """Show once what a rank waits for at `import oneflow`, and what no launcher can compare with the others."""
        late = [waits.text for waits in output.waiting.values() if now > waits.begin + NOTICE_DELAY]
        if self.several and late and not self.waiting_shown:
            self.waiting_shown = True
            script = self.options.module or self.options.script
            words = ["--nnodes", self.options.nnodes, "-n", self.nproc_per_node, script, *self.options.arguments]
            say(f"waiting for {late[0]}; each host needs the same: {' '.join(map(str, words))}")

    def outcome(self, ranks, output):
        """The JobOutcome of the ranks; None while they run and nothing ends the job."""
        codes = ranks.exit_codes()
        all_ended = len(codes) == self.nproc_per_node
        if any(codes.values()) or all_ended:
            output.read_rest()
        if output.closed:
            text = f"nobody reads the output any more: {self.every_rank} is ended"
            return JobOutcome(ending.BROKEN_PIPE, Cause.READER, text)
        rank = ending.first_failure(codes, output.reports)
        if rank is not None and (self.signals or all_ended or not self.may_all_refuse(output.reports[rank])):
            return self.failure(rank, codes[rank], output.reports)
        if self.signals:
            signum = self.signals[0]
            text = f"{signal.Signals(signum).name}{self.on_host}: {self.every_rank} is ended"
            return JobOutcome(128 + signum, Cause.SIGNAL, text)
        if time.monotonic() >= self.deadline:
            text = f"time limit of {self.options.timeout:g} s reached (--timeout)"
            return JobOutcome(ending.TIME_LIMIT_REACHED, Cause.TIME_LIMIT, text)
        return JobOutcome(0, Cause.DONE) if all_ended else None

    def may_all_refuse(self, report):
        """Whether the other ranks may still refuse their arguments too, as this one did."""
        return report.refused and time.time() < report.time + ending.REFUSAL_DELAY

    def failure(self, rank, code, reports):
        """The JobOutcome after a local rank has failed. reports: of all ranks."""
        why = f"exit code {code}" if code > 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"
        if self.several and is_consequence(code):
            why += ", perhaps because a rank on another host ended"
        text = f"rank {self.first + rank} of {self.world_size}{self.on_host} failed: {why}; {self.every_rank} is ended"
        cause = Cause.RANK
        if all(report.refused for report in reports):  # and they would again after a restart
            messages = dict.fromkeys(report.text for report in reports)  # each once: most are the same on all ranks
            cause, text = Cause.ARGUMENTS, "\n".join(messages).strip() or f"launch.sh: {text}"
        return JobOutcome(ending.exit_code(code), cause, text, rank)

    def announce(self, outcome, ranks, output):
        """Print how the job ended."""
        if outcome.cause is Cause.DONE and self.first == 0 and output.reports[0].text:
            write(sys.stdout, encoded(output.reports[0].text) + b"\n")  # --help
        if outcome.cause in (Cause.DONE, Cause.TIME_LIMIT):
            for rank in range(self.nproc_per_node):
                output.show_error(rank)
        if outcome.cause is Cause.TIME_LIMIT:
            self.show_ranks(outcome.text, ranks, output)
        elif outcome.cause is Cause.ARGUMENTS:
            write(sys.stderr, encoded(outcome.text) + b"\n")
        elif outcome.code and outcome.cause is not Cause.READER:
            if outcome.cause is Cause.RANK:
                output.show_error(outcome.rank, output.reports[outcome.rank].text)
            say(outcome.text)

    def show_silence(self, seconds, ranks, output):
        """Show where each rank is, after `seconds` without output."""
        text = f"no rank{self.on_host} has printed for {seconds:g} s"
        self.log(text)
        self.show_ranks(text, ranks, output)
        say(f"the job continues; {HOW_TO_END}")

    def show_ranks(self, why, ranks, output):
        """Show where each rank of this launcher is. why: the reason, for the first line."""
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
            say(lost_batch_in_words(self.first + rank, no_room))
        if all(report.code == 0 for report in output.reports) and len(ranks.exit_codes()) < self.nproc_per_node:
            others = ", or ranks of another launcher still run" if self.several else ""
            say(f"{self.every_rank} has run to its end, but a collective was never answered{others}")


def in_background():
    """Whether another program has the terminal from which our standard input comes."""
    with contextlib.suppress(OSError):  # it comes from no terminal
        return os.tcgetpgrp(0) != os.getpgrp()
    return False


def main(arguments):
    """Run a command line of launch.sh; returns the exit code."""
    try:
        return Job(checked(arguments)).run()
    except UsageError as error:
        say(str(error))
        return ending.BAD_INPUT
    except OSError as error:  # such as a full disk
        say(f"{error}: every rank is ended")
        return 1
