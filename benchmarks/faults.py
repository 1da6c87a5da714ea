"""Inject faults into jobs of elastic_training.py, on one host and on two, and see what launch.sh makes of them.

    ./launch.sh faults [--tries K]

Each try starts a job, does one thing to it at a random moment, and looks at how it ends, what it says, which processes
are left, and whether the job that goes on from its checkpoints ends with the bits of one that nobody disturbed. Writes
docs/faults.json and docs/faults.md; with --tries K it makes K tries of each kind in each mode, and writes nothing.
"""

import argparse
import json
import os
import platform
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import elastic_jobs as jobs  # noqa: E402
from benchmarks.elastic_jobs import EVERY, RANKS, STEPS, Job, at_some_moment, while_it_trains  # noqa: E402
from harness.jobs.hosts import NO_HOSTS, Hosts  # noqa: E402
from harness.report.tables import table  # noqa: E402
from tests.cases import ROOT  # noqa: E402

DEATH = 15  # seconds within which a job must end, or start again, after a death
SILENCE = 12  # the --timeout of jobs that will fall silent
DISK = "72k"  # has room for one checkpoint of 44 KB (eager) or 52 KB, and not for a second
FOUND, PAGE = ROOT / "docs" / "faults.json", ROOT / "docs" / "faults.md"
COLUMNS = ["fault", "exit code", "one host", "two hosts"]


TEXT = f"""# Faults

[README](../README.md) · [all pages](README.md) · next: [testing](testing.md)

What happens to a training job when a rank, a host, a link or a disk fails? We injected {{count}} faults into jobs of
[elastic_training.py](../recipes/starting/elastic_training.py), each at a random moment:

- {{right}} of {{count}} jobs ended, or restarted, in time and with the right exit code. Each named the rank or host
  that failed.
- {{left}} processes were left, and {{lost}} checkpoints were lost.
- {{equal}} of {{count}} trainings resumed from their last checkpoint and ended with the weights of an undisturbed run,
  bit by bit.

## What each fault does

The seconds run from the fault until the last launcher ends, or starts the ranks again. The limit is {DEATH} s. The
table has the longest time of all tries. The last two faults have no time, because they do not happen at one moment.

{{table}}
- **A rank that is killed or raises** ends the job at once. In rows with `restarts`, the job had `--max-restarts 2`, and
  all ranks started again from the last checkpoint.
- **A rank that is stopped or calls `sys.exit(0)`** falls silent. The others wait for it until `--timeout`, here
  {SILENCE} s from the start of the job. `launch.sh` then prints where each rank is, and which one is stopped or has
  ended.
- **A link that goes down** is noticed when the other launcher has sent nothing for 10 s.
- **A host that dies or never comes** ends the job, because nothing can be started on it. Let a scheduler start the job
  again.
- **A full disk** ends the job. The last checkpoint is still there: the recipe removes it only when the next one is
  complete.

## How it was measured

`./launch.sh faults` makes this page ({{machine}}), and the tests repeat a sample. A job trains for {STEPS} steps, with
a checkpoint after every {EVERY}. It has {RANKS[1]} ranks on one host or {RANKS[2]} on two, which are network namespaces
with addresses of their own. Half of the tries run in eager mode, half in a graph.

A fault comes at the start, while the ranks meet, in training, or while a checkpoint is written. If the job or the rank
is almost at its end by then, the try does not count. At a time limit, only the host of the silent rank names it. A job
that does not restart by itself is started again. Its last checkpoint, weight and momentum, is compared with that of an
undisturbed run.
"""


@dataclass
class Fault:
    """A kind of fault, and what must come of it."""

    what: str  # in the words of the page
    inject: Callable  # does it to a Job; False if it came too late
    code: int  # the exit code of every launcher that is left
    says: str  # a pattern that each of them says; RANK and NODE stand for what was hit
    hosts: tuple = (1, 2)
    tries: int = 4  # in each mode on each number of hosts
    restarts: bool = False  # whether --max-restarts brings the job back; then `code` and `says` are those before
    does: str = ""  # what a rank does on SIGUSR2: raise, or exit with a code
    timeout: float = 120  # of the job, in seconds
    within: float = DEATH  # seconds from the fault to the end
    setting: str = ""  # "disk": a small one; "alone": the other host never comes


@dataclass
class Outcome:
    """What came of one try."""

    fault: str
    hosts: int
    graph: bool
    seconds: Optional[float]  # from the fault to the end, or the new start, on the last host; None: it need not end
    problems: list  # what is not as promised, in words
    left: int  # processes that were left
    lost: bool  # whether a checkpoint was lost
    equal: bool  # whether the weights are bit by bit those of an undisturbed run in the end


RANK_FAILED = r"rank RANK of \d+NODE failed: "
FAULTS = [
    Fault("a rank is killed, signal 9", at_some_moment(jobs.signal_rank(signal.SIGKILL)), 137,
          RANK_FAILED + "killed by signal 9", tries=12, restarts=True),
    Fault("a rank is killed, no restart", at_some_moment(jobs.signal_rank(signal.SIGKILL)), 137,
          RANK_FAILED + "killed by signal 9", tries=12),
    Fault("a rank raises an exception", while_it_trains(jobs.signal_rank(signal.SIGUSR2)), 1,
          RANK_FAILED, does="raise", restarts=True),
    Fault("a rank calls sys.exit(3)", while_it_trains(jobs.signal_rank(signal.SIGUSR2)), 3,
          RANK_FAILED + "exit code 3", does="3"),
    Fault("a rank calls sys.exit(0)", while_it_trains(jobs.signal_rank(signal.SIGUSR2)), 124,
          "rank RANK of . has (run to its end|ended)", does="0", tries=2, timeout=SILENCE, within=SILENCE + 3),
    Fault("Ctrl-C", at_some_moment(jobs.signal_launcher(signal.SIGINT)), 130,
          "SIGINT(NODE: every rank is ended|: nothing)"),
    Fault("SIGTERM to launch.sh", at_some_moment(jobs.signal_launcher(signal.SIGTERM)), 143,
          "SIGTERM(NODE: every rank is ended|: nothing)"),
    Fault("a rank is stopped, SIGSTOP", while_it_trains(jobs.signal_rank(signal.SIGSTOP)), 124,
          "rank RANK of . is stopped", tries=2, timeout=SILENCE, within=SILENCE + 3),
    Fault("a host dies", while_it_trains(jobs.kill_node), 1, r"NODE is gone", hosts=(2,)),
    Fault("the link goes down", while_it_trains(jobs.pull_link), 1, r"node \d \([^)]*\) is gone", hosts=(2,), tries=3),
    Fault("a host never comes", jobs.nothing, 2, "did not come within --timeout", hosts=(2,), tries=2, timeout=4,
          within=8, setting="alone"),
    Fault("the disk is full at a checkpoint", jobs.nothing, 1, RANK_FAILED + "exit code 1", tries=3, within=120,
          setting="disk"),
]  # fmt: skip


def undisturbed(hosts, count, graph):
    """A job that nobody disturbs, in a new folder: its last checkpoint, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        job = Job(hosts, count, graph, folder)
        assert job.wait(120) and job.well() and job.last_bits(), job.said(0)
        return job.last_bits(), job.ended - begin


def on_small_disk(hosts, count, folder):
    """The words that run a command with a small disk where the checkpoints go, and then keep what is on it."""
    user = ["--user", "--map-root-user"] if hosts.user and count == 1 else []
    disk, kept = f"{folder}/checkpoints", f"{folder}/kept"
    make = f"mkdir -p {disk} {kept} && mount -t tmpfs -o size={DISK} none {disk}"
    run = f'{make} && "$@"; code=$?; cp -r {disk}/. {kept}; exit $code'
    return ["unshare", *user, "--mount", "bash", "-c", run, "job"]


def attempt(fault, hosts, count, graph, rng, wanted):
    """One try of a fault; None if it came too late. wanted: what `undisturbed` returns."""
    with tempfile.TemporaryDirectory() as folder:
        before = on_small_disk(hosts, count, folder) if fault.setting == "disk" else ()
        nodes = [rng.choice((0, 1))] if fault.setting == "alone" else None
        job = Job(hosts, count, graph, folder, rng, fault, nodes=nodes, before=before)
        job.seconds = wanted[1]
        try:
            hit = fault.inject(job)
            begin, newest = time.monotonic(), job.newest()
            ended = job.wait(fault.within + 60)
        finally:
            if count > 1:
                hosts.link(1, "up")
            left = job.left()
        if not hit or too_late(fault, job, begin):
            return None
        problems = [*([] if ended else ["it did not end"]), *broken_promises(fault, job)]
        again = [when for lines in job.lines.values() for when, line in lines if "restart 1 of 2" in line]
        seconds = (
            None if fault.setting or not ended else max(again if fault.restarts and again else [job.ended]) - begin
        )
        if seconds is not None and seconds > fault.within:
            problems.append(f"it took {seconds:.1f} s")
        if fault.setting == "disk":
            job.checkpoints.rmdir()  # the disk is gone with the job
            Path(job.folder, "kept").rename(job.checkpoints)
            newest = EVERY
        if not fault.restarts:  # the next job goes on
            job = Job(hosts, count, graph, folder, rng)
            assert job.wait(120), job.said(0)
            left += job.left()
        resumed = re.findall(r"resumes after step (\d+)|starts with step 1", job.said(0))  # "" if it starts anew
        lost = bool(resumed) and int(resumed[-1] or 0) < newest
        return Outcome(fault.what, count, graph, seconds, problems, left, lost, job.last_bits() == wanted[0])


def too_late(fault, job, begin):
    """Whether the job, or the rank that was hit, had all but ended."""
    said = [job.said(node) for node in job.runs]
    unharmed = fault.code and job.well() and not any("failed: " in text for text in said)
    last_words = any(when < begin and "of a single device" in line for when, line in job.lines.get(0, ()))
    return unharmed or last_words or any("killed by signal 12" in text for text in said)  # our handler was gone already


def broken_promises(fault, job):
    """What the launchers that are left did not say or do, in words."""
    dies, problems = fault.what == "a host dies", []
    place = rf"node {job.hit_node} \([^)]*\)"
    if not dies:
        place = f" on {place}" if job.num_hosts > 1 else ""
    pattern = fault.says.replace("RANK", str(job.hit_rank or 0)).replace("NODE", place)
    code = 0 if fault.restarts else fault.code
    for node, run in job.runs.items():
        if dies and node == job.hit_node:
            continue
        must_say = job.hit_node == node if fault.code == 124 else fault.code or node == 0
        if must_say and not re.search(pattern, job.said(node)):
            problems.append(f"node {node} did not say {pattern}: {re.findall('.*launch.sh.*', job.said(node))}")
        if run.process.returncode != code:
            problems.append(f"node {node} ended with {run.process.returncode}, not {code}")
        if fault.restarts and "restart 1 of 2" not in job.said(node):
            problems.append(f"node {node} did not start again")
    return problems


def tried(faults, tries=None, tell=lambda outcome: None, seed=0, counts=(1, 2), modes=(False, True)):
    """All outcomes; tries: of each fault in each mode on each number of hosts, if not its own."""
    rng, outcomes, wanted = random.Random(seed), [], {}
    kinds = [(fault, count, graph) for fault in faults for count in fault.hosts if count in counts for graph in modes]
    with Hosts(2) as hosts:
        if not hosts.real:
            raise SystemExit(NO_HOSTS)
        for fault, count, graph in kinds:
            made = 0
            while made < (tries or fault.tries):
                if (count, graph) not in wanted:
                    wanted[count, graph] = undisturbed(hosts, count, graph)
                outcome = attempt(fault, hosts, count, graph, rng, wanted[count, graph])
                if outcome is None:  # it came too late: a job may take less time by now
                    del wanted[count, graph]
                    continue
                made += 1
                outcomes.append(outcome)
                tell(outcome)
    return outcomes


def good(outcome):
    return not outcome.problems and not outcome.left and not outcome.lost and outcome.equal


def longest(outcomes):
    """The most seconds that one of these tries took, and the number of tries."""
    if not outcomes:
        return "–"
    times, tries = [one.seconds for one in outcomes if one.seconds is not None], f"{len(outcomes)} tries"
    return f"{max(times):.1f} s ({tries})" if times else tries


def rows_of(outcomes):
    """The rows of the page's table, one for each kind of fault."""
    for fault in FAULTS:
        on = [[one for one in outcomes if (one.fault, one.hosts) == (fault.what, count)] for count in (1, 2)]
        yield [fault.what, "restarts" if fault.restarts else fault.code, *map(longest, on)]


def page(found):
    """docs/faults.md, from what is in docs/faults.json."""
    outcomes = [Outcome(**one) for one in found["outcomes"]]
    text = TEXT.format(
        count=len(outcomes),
        right=sum(not one.problems for one in outcomes),
        equal=sum(one.equal for one in outcomes),
        left=sum(one.left for one in outcomes),
        lost=sum(one.lost for one in outcomes),
        table=table(COLUMNS, rows_of(outcomes)),
        machine=found["machine"],
    )
    return "\n".join([text, f"{found['remark']}\n"] if "remark" in found else [text])


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="launch.sh faults", description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, help="of each fault in each mode on each number of hosts; writes no page")
    tries = parser.parse_args(arguments).tries
    if tries is not None and tries < 1:
        parser.error(f"--tries must be 1 or more, got {tries}")

    def tell(one):
        words = f"{one.fault}; {one.hosts} hosts; {'graph' if one.graph else 'eager'}"
        took = "" if one.seconds is None else f"; {one.seconds:.1f} s"
        print(words + took + ("" if good(one) else f"; NOT AS PROMISED: {one}"), flush=True)

    outcomes = tried(FAULTS, tries, tell)
    bad = [one for one in outcomes if not good(one)]
    print(f"{len(outcomes)} faults, {len(bad)} not as promised")
    if tries is None:
        found = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "outcomes": [asdict(one) for one in outcomes],
        }
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(page(found))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
