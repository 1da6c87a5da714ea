"""Inject faults into jobs of elastic_training.py, on one host and on two, and check what launch.sh makes of them.

    ./launch.sh faults [--count N] [--seed S] [--only S/I] [--retry]

Try I draws from the seed S and I alone which fault comes, when and where. Its job must end or continue as
fault_kinds.py says, name the cause, leave nothing behind, and the weights must become bit by bit those of a job that
nobody disturbed. Each outcome is appended at once to docs/faults.jsonl, so that the next call continues there, and
docs/faults.md is made from it.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import elastic_jobs, faults_page  # noqa: E402
from benchmarks.elastic_jobs import ENDS, STEPS, Job, Setting, bits, newest  # noqa: E402
from benchmarks.fault_actions import HALF, nothing  # noqa: E402
from benchmarks.fault_kinds import FAULTS  # noqa: E402
from benchmarks.faults_page import FOUND, PAGE, Outcome, good  # noqa: E402
from harness.jobs.hosts import NO_HOSTS, Hosts  # noqa: E402
from harness.start.ending import BAD_INPUT  # noqa: E402
from harness.start.errors import UsageError  # noqa: E402
from harness.start.options import Parser  # noqa: E402
from harness.start.output import say  # noqa: E402

DECK = [fault for fault in FAULTS for _ in range(fault.cards)]  # a round of tries, before it is shuffled
MOMENTS = (0.02, 0.95)  # of the time that an undisturbed job takes
TOO_LATE = 6  # times that a try is made again, each time earlier
PORTS_CLOSE = 5  # seconds within which the ports of a job must be closed after its end
SMALLER = ("features=64", "features=32")  # another model


@dataclass(frozen=True)
class Draw:
    """What a try draws; the same for the same seed."""

    seed: str
    fault: str
    hosts: int
    graph: bool
    restarts: bool
    moment: float  # when it comes, as a part of the job's time
    victim: float  # which rank or host is hit, from 0 to 1
    amount: float  # from 0 to 1, for all else that a kind draws


def draw(seed, i):
    """What try i draws, counted from 1: kinds come in shuffled rounds, so that each comes early."""
    number, place = divmod(i - 1, len(DECK))
    deck = list(DECK)
    random.Random(f"{seed}, round {number}").shuffle(deck)
    fault, rng = deck[place], random.Random(f"{seed}/{i}")
    return Draw(
        seed=f"{seed}/{i}",
        fault=fault.name,
        hosts=rng.choice(fault.hosts),
        graph=rng.random() < 0.5,
        restarts=fault.restarts and rng.random() < 0.5,
        moment=rng.uniform(*MOMENTS),
        victim=rng.random(),
        amount=rng.random(),
    )


class Undisturbed:
    """What a job that nobody disturbs does: how long it takes, and its checkpoints. Made when it is first asked for."""

    def __init__(self, hosts, count, graph, folder):
        self.hosts, self.count, self.graph, self.folder = hosts, count, graph, folder
        self._seconds, self.made = None, {}

    def run(self, name, setting):
        """The folder of the checkpoints of such a job."""
        if name not in self.made:
            for k in range(3):  # OneFlow itself crashes in about one of a thousand jobs
                folder = self.folder / f"{name} {k}"
                folder.mkdir(parents=True)
                job = Job(self.hosts, self.count, self.graph, folder, setting)
                if job.wait(ENDS) and job.well():
                    break
            else:
                raise SystemExit(f"a job that nobody disturbed failed: {job.said(0)}")
            self.made[name] = folder / "checkpoints"
            if name == "whole":
                self._seconds = job.ended - job.begun
        return self.made[name]

    @property
    def bits(self):
        return bits(self.run("whole", Setting()))

    @property
    def seconds(self):
        self.run("whole", Setting())
        return self._seconds

    @property
    def half(self):
        return self.run("half", Setting(steps=HALF))

    @property
    def foreign(self):
        """Of another model."""
        script = self.folder / "smaller.py"
        text = elastic_jobs.ELASTIC.read_text()
        assert SMALLER[0] in text
        script.write_text(text.replace(*SMALLER))
        return self.run("foreign", Setting(steps=HALF, scripts=dict.fromkeys(range(self.count), script)))


@dataclass
class Trial:
    """A try while it is made: what was drawn, its job, and what was hit."""

    hosts: Hosts
    draw: Draw
    fault: object  # of fault_kinds.py
    folder: Path
    known: Undisturbed
    known_otherwise: Undisturbed  # in the other mode
    scale: float  # makes it earlier, where it came too late before
    setting: Setting = field(default_factory=Setting)
    job: Optional[Job] = None
    second: Optional[Job] = None
    hit_rank: Optional[int] = None
    hit_node: int = 0
    detail: str = ""  # what was drawn, in words
    begin: float = 0.0
    newest: int = 0  # the step of the newest checkpoint at that time
    again: str = "restart 1 of 2"

    @property
    def seconds(self):
        return self.known.seconds

    def moment(self):
        return self.draw.moment * self.seconds * self.scale

    def hit(self, rank):
        self.hit_rank, self.hit_node = rank, rank // self.job.ranks_each

    @property
    def restarts(self):
        return self.setting.max_restarts > 0

    def run(self):
        """Start the job and do it; returns whether that came in time, and whether the job has ended."""
        self.setting.on_signal = self.fault.on_signal
        if self.draw.restarts or self.fault.cards and "again" in self.fault.name:
            self.setting.max_restarts = 2
        if self.fault.silent:  # time enough to come to the fault, on a slow machine too
            self.setting.timeout = round(6 + 2 * self.seconds)
        self.fault.prepare(self)
        self.job = Job(self.hosts, self.draw.hosts, self.draw.graph, self.folder, self.setting)
        hit = self.fault.inject(self)
        self.begin = self.begin or (self.job.begun if self.fault.inject is nothing else time.monotonic())
        self.newest = newest(self.job.checkpoints)
        ended = self.job.wait(ENDS)
        return hit and not self._too_late(), ended

    def _too_late(self):
        """Whether the job, or the rank that was hit, had all but ended."""
        if self.fault.inject is nothing or self.fault.may_continue:
            return False
        job = self.job
        said = [job.said(node) for node in job.runs]
        unharmed = self.fault.code != 0 and job.well() and not any("failed: " in text for text in said)
        last_words = any(when < self.begin and "of a single device" in line for when, line in job.lines.get(0, ()))
        handler_gone = any("killed by signal 12" in text for text in said)
        once = "again" in self.fault.name and not job.when(self.again)
        return unharmed or last_words or handler_gone or once

    def continued(self):
        """Whether the job went to its end, as it should or at least may."""
        return (self.restarts or self.fault.code == 0 or self.fault.may_continue) and self.job.well()

    def broken_promises(self):
        """What the launchers that are left did not say or do, in words."""
        problems, fault, job = [], self.fault, self.job
        left = {node: run for node, run in job.runs.items() if not (fault.gone and node == self.hit_node)}
        harmless = fault.may_continue and job.well()
        for node, run in left.items():
            code, wanted = run.process.returncode, 0 if self.restarts else fault.code
            if not harmless and (code == 0 if wanted is None else code != wanted):
                problems.append(f"node {node} ended with {code}, not {'an error' if wanted is None else wanted}")
            if self.restarts and self.again not in job.said(node):
                problems.append(f"node {node} did not say {self.again}")
        silent = [node for node in left if not re.search(self.pattern(), job.said(node))]
        must = {"all": [*left], "hit": [self.hit_node], "first": [0], "any": [*left] if silent == [*left] else []}
        for node in silent if not harmless else ():
            if node in must[fault.speakers]:
                words = re.findall(".*launch.sh: .*", job.said(node)) or job.said(node).splitlines()[-1:]
                problems.append(f"node {node} did not say {self.pattern()}: {words[-3:]}")
        return problems + self.problems_of_second()

    def problems_of_second(self):
        """What is wrong with what was started besides the job: each of its launchers must be refused."""
        if not self.second:
            return []
        codes = {node: run.process.returncode for node, run in self.second.runs.items()}
        wrong = [
            node for node, code in codes.items() if code != BAD_INPUT or "launch.sh: " not in self.second.said(node)
        ]
        return [
            f"the second launcher on node {node} ended with {codes[node]}: {self.second.said(node)}" for node in wrong
        ]

    def pattern(self):
        place = rf"node {self.hit_node} \([^)]*\)"
        if not self.fault.gone:
            place = f" on {place}" if self.job.num_hosts > 1 else ""
        if self.hit_rank is None and self.job.num_hosts > 1:
            place = place.replace(f"node {self.hit_node}", r"node \d")
        rank = r"\d+" if self.hit_rank is None else str(self.hit_rank)
        return self.fault.says.replace("RANK", rank).replace("NODE", place)

    def quoted(self):
        """A line that says what happened, "" if there is none."""
        jobs = [self.second] if self.second else [self.job]
        pattern = r"launch\.sh: " if self.second else self.fault.shows or self.pattern()
        if not pattern:
            return ""
        lines = [line for job in jobs for some in job.lines.values() for _, line in some if re.search(pattern, line)]
        own = [line for line in lines if line.startswith("launch.sh: ")]
        return (own or lines or [""])[0].replace(f"{self.folder}/", "")

    def time_taken(self):
        """Seconds from the fault, or the time limit, to the end, or the last restart; None if the job continued."""
        if self.fault.silent:
            return self.job.ended - self.job.begun - self.setting.timeout
        if self.restarts:
            return (self.job.when(self.again) or self.job.ended) - self.begin
        return None if self.job.well() else self.job.ended - self.begin

    def next_job(self):
        """Start the job again without the fault; returns it when it has ended."""
        self.hosts.mend()
        checkpoints, kept = self.folder / "checkpoints", self.folder / "kept"
        if kept.exists():
            checkpoints.rmdir()  # the disk is gone with the job
            kept.rename(checkpoints)
            self.newest = newest(checkpoints)
        if not self.fault.keeps:  # the user throws them away
            checkpoints.unlink() if checkpoints.is_file() else shutil.rmtree(checkpoints)
            self.newest = 0
        job = Job(self.hosts, self.draw.hosts, self.draw.graph, self.folder)
        job.wait(ENDS)
        return job

    def listening(self):
        """The ports that stay open: threads of a rank that was killed may hold one for some milliseconds more."""
        deadline = time.monotonic() + PORTS_CLOSE
        while True:
            ports = [port for host in range(self.draw.hosts) for port in self.hosts.listening(host)]
            if not ports or time.monotonic() > deadline:
                return [f"port {port} is open" for port in ports]
            time.sleep(0.1)

    def files_left(self):
        """What lies beside the last checkpoint, and where the job ran."""
        checkpoints = [path for path in self.job.checkpoints.glob("*") if path.name != str(STEPS)]
        files = [*checkpoints, *self.job.work.iterdir(), *self.job.temporary.iterdir()]
        return [f"file {path.relative_to(self.folder)}" for path in files]


def attempt(trial):
    """One try; its Outcome, None if the fault came too late."""
    try:
        in_time, ended = trial.run()
    except BaseException:  # Ctrl-C and SIGTERM too
        for job in filter(None, (trial.job, trial.second)):
            job.kill()
        raise
    processes = trial.job.left()
    if trial.second:
        trial.second.wait(ENDS)
        processes += trial.second.left()
    if not in_time:
        return None
    problems = [] if ended else [f"it did not end in {ENDS} s"]
    problems += trial.broken_promises()
    seconds = trial.time_taken() if trial.fault.within or trial.restarts else None
    if seconds is not None and trial.fault.within and seconds > trial.fault.within:
        problems.append(f"it took {seconds:.1f} s")
    left = trial.listening()
    last, lost = trial.job, False
    if not trial.continued():
        last = trial.next_job()
        processes += last.left()
        if not last.well():
            problems.append(f"the next job ended with {[run.process.returncode for run in last.runs.values()]}")
    if trial.restarts or last is not trial.job:
        resumed = re.findall(r"resumes after step (\d+)|starts with step 1", last.said(0))  # "" if it starts anew
        lost = not resumed or int(resumed[-1] or 0) < trial.newest
    left += trial.listening() + trial.files_left() + ([f"{processes} processes"] if processes else [])
    drawn = trial.draw
    return Outcome(
        seed=drawn.seed, fault=drawn.fault, hosts=drawn.hosts, graph=drawn.graph, restarts=trial.restarts,
        detail=trial.detail, seconds=seconds and round(seconds, 3), says=trial.quoted(), problems=problems, left=left,
        lost=lost, equal=bits(last.checkpoints) == trial.known.bits, continued=trial.continued(),
    )  # fmt: skip


class Tries:
    """Makes tries on hosts of its own; a context manager."""

    def __init__(self):
        self.hosts = Hosts(2)
        if not self.hosts.real:
            raise SystemExit(NO_HOSTS)
        self.folder = tempfile.TemporaryDirectory()
        self.known = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hosts.__exit__()
        self.folder.cleanup()

    def undisturbed(self, count, graph):
        if (count, graph) not in self.known:
            folder = Path(self.folder.name, f"{count} {'graph' if graph else 'eager'} {time.monotonic()}")
            self.known[count, graph] = Undisturbed(self.hosts, count, graph, folder)
        return self.known[count, graph]

    def make(self, drawn):
        """The Outcome of a try; where it comes too late it is made again, and comes earlier."""
        [fault] = [fault for fault in FAULTS if fault.name == drawn.fault]
        known, other = (self.undisturbed(drawn.hosts, graph) for graph in (drawn.graph, not drawn.graph))
        for k in range(TOO_LATE):
            known.run("whole", Setting())  # before the try: it tells how long a job takes now
            with tempfile.TemporaryDirectory() as folder:
                trial = Trial(self.hosts, drawn, fault, Path(folder), known, other, scale=0.75**k)
                try:
                    outcome = attempt(trial)
                finally:
                    self.hosts.mend()
            if outcome:
                return outcome
            del self.known[drawn.hosts, drawn.graph]  # a job may take less time by now
            known = self.undisturbed(drawn.hosts, drawn.graph)
        problem = f"it came too late {TOO_LATE} times"
        return Outcome(drawn.seed, drawn.fault, drawn.hosts, drawn.graph, problems=[problem])


def words(one):
    """An outcome in one line."""
    parts = [
        one.seed,
        one.fault,
        one.detail,
        f"{one.hosts} host{'s' * (one.hosts > 1)}",
        "graph" if one.graph else "eager",
    ]
    took = ["continued" if one.seconds is None and one.continued else f"{one.seconds or 0:.1f} s"]
    return "; ".join([part for part in [*parts, "restarts" * one.restarts, *took] if part])


def tell(one):
    print(words(one) + ("" if good(one) else f"; NOT AS PROMISED: {one}"), flush=True)


def open_tries(seed, count, known, retry):
    """The draws that are still to be made. Raises UsageError if those made were drawn from other kinds.

    known: the outcomes so far, by seed. retry: those that failed are made again, and no new ones.
    """
    draws = [draw(seed, i) for i in range(1, count + 1)]
    for one in draws:
        if one.seed in known and known[one.seed].fault != one.fault:
            raise UsageError(f"{one.seed} in {FOUND.name} was drawn from other kinds of faults: type another --seed")
    if retry:
        return [one for one in draws if one.seed in known and not good(known[one.seed])]
    return [one for one in draws if one.seed not in known]


def whole_number(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text}")
    return int(text)


def one_try(text):
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be SEED/NUMBER, such as 1/12, got {text}")
    return int(match.group(1)), int(match.group(2))


def parsed(arguments):
    parser = Parser(prog="launch.sh faults", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=whole_number, default=1000, help="make the tries from 1 to this number")
    parser.add_argument("--seed", type=int, default=1, help="other seeds draw other faults")
    parser.add_argument("--only", type=one_try, metavar="S/I", help="make try I of seed S alone, and write nothing")
    parser.add_argument("--retry", action="store_true", help="make again those that were not as promised")
    return parser.parse_args(arguments)


def keep(outcome):
    """Append an outcome to the file, and make the page again."""
    if not FOUND.exists():
        FOUND.write_text(json.dumps({"machine": f"{os.cpu_count()} cores, {platform.machine()}"}) + "\n")
    with FOUND.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
    make_page()


def make_page():
    undisturbed = faults_page.read_soak(faults_page.SOAK)
    PAGE.write_text(faults_page.page(*faults_page.read(FOUND), undisturbed))


def main(arguments=None):
    try:
        options = parsed(arguments)
        known = {one.seed: one for one in faults_page.read(FOUND)[1]} if FOUND.exists() else {}
        draws = [draw(*options.only)] if options.only else open_tries(options.seed, options.count, known, options.retry)
    except UsageError as error:
        say(str(error))
        return BAD_INPUT
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # begun under nohup or in the background, we ignore these: jobs must not
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the job of a try as well
    bad = 0
    with Tries() as tries:
        for drawn in draws:
            outcome = tries.make(drawn)
            bad += not good(outcome)
            tell(outcome)
            if not options.only:
                keep(outcome)
    print(f"{len(draws)} tries, {bad} not as promised")
    if not options.only:
        make_page()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
