"""One job: the ranks of this node, watched until the job ends, on all nodes at once."""

import contextlib
import hashlib
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from harness.start import output
from harness.start.logs import Logs
from harness.start.nodes import VERDICT_DELAY, MeetingFailed, Nodes
from harness.start.options import BadInput, checked
from harness.start.output import Output, encoded, say
from harness.start.rank import BROKEN_PIPE
from harness.start.ranks import NodeRanks, PortTaken, Ranks, is_consequence, reserve_port

BAD_INPUT = 2
TIME_LIMIT_REACHED = 124
RESTART_TIMEOUT = 60.0  # seconds in which each node must be back for a restart


@dataclass
class End:
    """How a job ends: what one launcher tells the others, and all agree on."""

    code: int  # for the shell
    cause: str  # "done", "rank", "refused", "signal", "limit", "node" or "unread": nobody reads a rank's output
    node: int  # where
    text: str = ""  # what to say of it
    rank: Optional[int] = None  # the local rank that failed
    time: float = 0.0
    consequence: bool = False  # it looks like OneFlow's answer to the death of another rank
    restart: int = 0  # the number of the restart that follows; 0: none


def same_on_all_nodes(options):
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
    """The ranks of this node. `run` starts them, watches them and returns the exit code for the shell."""

    def __init__(self, options, nodes):
        self.options, self.nodes = options, nodes
        self.count = options.nproc_per_node
        self.first, self.world_size = nodes.number * self.count, nodes.count * self.count
        self.where = f" on {nodes.name}" if nodes.count > 1 else ""
        self.caught = []  # signals that end the job
        self.asked = False  # by SIGUSR1, where each rank is
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
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, no rank has an exit code
        with contextlib.ExitStack() as stack:
            if self.options.log_dir:
                self.logs = stack.enter_context(self.opened_logs())
            try:
                return self.attempts()
            except BrokenPipeError:
                if self.logs:
                    self.logs.remark("nobody reads the output of launch.sh any more: every rank is ended")
                return BROKEN_PIPE
            finally:  # srun sends SIGTERM when another task has ended; Python takes its handlers back before it ends
                for number in ending:
                    signal.signal(number, signal.SIG_IGN)

    def opened_logs(self):
        try:
            logs = Logs(self.options.log_dir, range(self.first, self.first + self.count))
        except OSError as error:
            raise BadInput(f"--log-dir {self.options.log_dir}: {error.strerror}: name another folder") from None
        words = " ".join([self.options.script, *self.options.arguments])
        logs.remark(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, one of {self.world_size} ranks of {words}")
        return logs

    def attempts(self):
        """Start the ranks, again after each failure as often as --max-restarts says; returns the exit code."""
        restarts = 0
        while True:
            with self.nodes:
                limit = (self.deadline, "until --timeout")
                if restarts:  # all were there a moment ago
                    limit = min(limit, (time.monotonic() + RESTART_TIMEOUT, f"again within {RESTART_TIMEOUT:.0f} s"))
                self.nodes.meet(limit[0], say, lambda: self.caught, limit[1])
                if self.caught:
                    say(f"{signal.Signals(self.caught[0]).name}: nothing was started")
                    return 128 + self.caught[0]
                end = self.attempt(restarts)
            restarts = end.restart
            if not restarts:
                return end.code

    def attempt(self, restarts):
        """Start the ranks and watch them; returns the End."""
        reserved = None
        if self.nodes.number == 0:
            reserved = reserve_port(self.options.master_port if self.nodes.count == 1 else 0)
        start = self.nodes.begin(reserved and reserved.getsockname()[1])
        start["address"] = start["address"] or self.options.master_addr
        here = NodeRanks(self.world_size, self.count, self.first, **start)
        self.asked = False
        with contextlib.closing(Output(self.count, self.mark, self.logs)) as out:
            with Ranks(
                [self.options.script, *self.options.arguments],
                here,
                channels=[{"HARNESS_REPORT": end} for end in out.writing["report"]],
                variables={"HARNESS_MARK": ""} if self.logs else None,
                stdout=out.writing.get("stdout"),
                stderr=out.writing["stderr"],
            ) as ranks:
                out.started()
                end = self.watch(ranks, out, restarts)
                self.tell(end, ranks, out)
            self.after(end, out)
        if reserved:
            reserved.close()
        return end

    def mark(self, rank):
        return b"[%d] " % (self.first + rank) if self.world_size > 1 else b""

    def watch(self, ranks, out, restarts):
        """Until the job ends, here or elsewhere; returns the End that all nodes agree on."""
        own, over, done, ends, decide = None, False, set(), [], float("inf")
        leads = self.nodes.number == 0
        while True:
            running = ranks.running()
            out.take(0.02)
            self.tell_progress()
            if self.asked:
                self.asked = False
                ranks.show_where()
            if not (own or over):
                own = self.end_here(ranks, running, out)
                over = not (own or running)
                if own:
                    ends.append(own)
                    self.nodes.tell(failed=asdict(own))
                elif over:
                    self.nodes.tell(done=True)
            for peer, message in self.nodes.poll():
                if "end" in message:
                    return End(**message["end"])
                if "failed" in message:
                    ends.append(End(**message["failed"]))
                if "done" in message:
                    done.add(peer)
                if "gone" in message:
                    ends.append(End(1, "node", peer.number, f"{peer} is gone", time=time.time()))
            if ends and decide == float("inf"):  # another node may know a better cause
                delay = VERDICT_DELAY if leads else 2 * VERDICT_DELAY  # for node 0 to decide
                sure = leads and not all(end.consequence for end in ends)
                decide = time.monotonic() + (delay if self.nodes.peers and not sure else 0)
            end = None
            if time.monotonic() >= decide:  # node 0 decides, and another node only if node 0 does not
                end = min(ends, key=lambda end: (end.consequence, end.time))
                if (leads or not self.nodes.peers) and end.cause == "rank" and restarts < self.options.max_restarts:
                    end.restart = restarts + 1
            elif over and not ends and leads and len(done) == self.nodes.count - 1:
                end = End(0, "done", 0)
            if end:
                self.nodes.tell(end=asdict(end))
                return end

    def end_here(self, ranks, running, out):
        """The End, if something on this node has ended or must end the job, or None."""
        node, now = self.nodes.number, time.time()
        if self.caught:
            name = signal.Signals(self.caught[0]).name
            return End(128 + self.caught[0], "signal", node, f"{name}{self.where}: every rank is ended", time=now)
        if time.monotonic() >= self.deadline:
            return End(TIME_LIMIT_REACHED, "limit", node, time=now)
        codes = {rank: process.returncode for rank, process in enumerate(ranks.processes) if rank not in running}
        failed = [rank for rank in codes if codes[rank]]
        if failed or not running:
            out.take_last()
        if not failed:
            return None

        def time_of_end(rank):
            return out.reports[rank].get("time", float("inf"))

        rank = min(failed, key=lambda rank: (time_of_end(rank), is_consequence(codes[rank])))
        code, report = codes[rank], out.reports[rank]
        why = f"exit code {code}" if code > 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"
        text = f"rank {self.first + rank} of {self.world_size}{self.where} failed: {why}; every rank is ended"
        cause = "rank"
        if code == BAD_INPUT:  # another start would be refused as well
            cause = "refused"
            text = report.get("text") or text  # the same on every rank, so without a mark
        if report.get("unread"):
            cause = "unread"
        end = End(code if code > 0 else 128 - code, cause, node, text, rank, min(time_of_end(rank), now))
        end.consequence = is_consequence(code)
        return end

    def tell(self, end, ranks, out):
        """Say how the job ended, on standard error."""
        here = end.node == self.nodes.number
        if end.cause == "unread" and here:  # who did not read the ranks' output has had enough
            return
        if end.cause in ("done", "limit"):
            out.show_held_back()
        if end.cause == "limit":
            self.tell_where(ranks, out)
        elif end.cause == "refused" and not end.text.startswith("rank "):
            output.write(output.sys.stderr, encoded(end.text) + b"\n")
        elif end.code:
            if here and end.rank is not None:
                out.show_fatal(end.rank, out.reports[end.rank].get("text", ""))
            say(end.text)
            if end.restart:
                say(f"restart {end.restart} of {self.options.max_restarts}")

    def tell_where(self, ranks, out):
        """The time limit is reached: show where each rank is."""
        running = ranks.running()
        say(f"time limit of {self.options.timeout:g} s reached (--timeout): this is where each rank is")
        ranks.show_where()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            out.take(0.05)
        for rank in range(self.count):
            state = ranks.state(rank) if rank in running else "has ended"
            if state == "is running" and out.reports[rank]:
                state = "has run to its end"
            say(f"rank {self.first + rank} of {self.world_size} {state}")

    def tell_progress(self):
        """Once in a while, where logs are kept: how far it is."""
        if self.logs and self.logs.lost:
            say(self.logs.lost)
            self.logs.lost = ""  # said once
        if self.logs and self.options.progress and time.monotonic() >= self.next_progress:
            self.next_progress = time.monotonic() + self.options.progress
            say(f"{time.monotonic() - self.begin:.0f} s; {self.logs.progress()}")

    def after(self, end, out):
        """The ranks are gone: what is left of their output, and how the job ended, goes into the logs."""
        if not self.logs:
            if end.cause == "signal":
                out.take(0)  # what ranks say that end in good order
            return
        out.silent = True
        out.take(0)
        for rank, report in enumerate(out.reports):
            if report.get("text"):
                self.logs.write(rank, encoded(report["text"]) + b"\n")
        words = "ended well" if not end.code else end.text or f"exit code {end.code}"
        if end.cause == "limit":
            words = f"time limit of {self.options.timeout:g} s reached (--timeout)"
        self.logs.remark(words)
        if end.restart:
            self.logs.remark(f"restart {end.restart} of {self.options.max_restarts}")


def main(arguments):
    """Run a command line of launch.sh; returns the exit code."""
    try:
        options = checked(arguments)
        where = (options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr, options.master_port)
        each = f" (each task of {options.task.scheduler} is a node)" if options.task else ""
        nodes = Nodes(*where, same_on_all_nodes(options), each)
        return Job(options, nodes).run()
    except (BadInput, PortTaken, MeetingFailed) as error:
        say(str(error))
        return BAD_INPUT
    except OSError as error:  # no more processes or files are to be had, say
        say(f"{error}: every rank is ended")
        return 1
