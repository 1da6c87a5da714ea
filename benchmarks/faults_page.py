"""docs/faults.md, from the outcomes in docs/faults.jsonl."""

import json
import statistics
from dataclasses import dataclass, field
from typing import Optional

from benchmarks.elastic_jobs import EVERY, RANKS, STEPS
from benchmarks.fault_kinds import ANY, DEATH, FAULTS
from harness.report.tables import table
from tests.cases import ROOT

FOUND, PAGE = ROOT / "docs" / "faults.jsonl", ROOT / "docs" / "faults.md"
COLUMNS = ["fault", "the job", "tries", "as described", "seconds: median, largest"]
UNKNOWN = "Cause unknown"
CAUSES = {  # seed of a try that was not as described -> why, a sentence without a full stop
    "1/9": "launch.sh looked at the loopback interface of node 0 alone; elsewhere ranks waited until --timeout",
    "1/805": "A rank that had just been started died of SIGUSR1; now it is blocked until the rank can handle it",
    "1/59": "The try itself was wrong: it changed a file that holds a single number",
}
NOTES = """
## Good to know

- A rank that calls `sys.exit(0)` or is stopped is silent, and the other ranks wait for it until `--timeout`. Then
  `launch.sh` shows where each rank is, and which one is stopped or has ended. The seconds run from the time limit.
- When `launch.sh` itself is killed, Linux kills its ranks at once, and the launcher on the other host ends the job. On
  its own host only the shell prints something: `Killed`.
- `launch.sh` notices a broken link when the other launcher has sent nothing for 10 s. A shorter break does no harm.
- A host that dies or never comes ends the job: nothing can be started on it. A scheduler starts the job again.
- On a full or read-only disk the job ends, and the last checkpoint stays: the recipe removes it when the next one is
  complete.
- The recipe keeps one checkpoint. If it is damaged, the job ends with the error of `flow.load`; remove it, and the job
  starts with step 1.
- OneFlow's checkpoints have no checksum. A changed number is loaded silently; this recipe notices it at its end only
  because it compares its losses with those of a single device.
- The kernel that kills a rank for lack of memory sends SIGKILL; `launch.sh` cannot tell why it was sent.
- Not tried: packets that are delayed or lost one by one, as this kernel has no netem; and clocks that jump. `launch.sh`
  measures its time limits with a clock that does not jump.
"""


@dataclass
class Outcome:
    """What came of one try."""

    seed: str
    fault: str
    hosts: int
    graph: bool
    restarts: bool = False
    detail: str = ""  # what was drawn, in words
    seconds: Optional[float] = None  # from the fault to the end, or the restart, on the last host; None: no limit
    says: str = ""  # a line that the user sees
    problems: list = field(default_factory=list)  # what is not as promised, in words
    left: list = field(default_factory=list)  # what was left behind
    lost: bool = False  # whether a checkpoint was lost
    equal: bool = False  # whether the weights are bit by bit those of an undisturbed run in the end
    continued: bool = False  # whether that very job went to its end


def good(outcome):
    return not outcome.problems and not outcome.left and not outcome.lost and outcome.equal


def read(path):
    """The machine and the outcomes in a file: of each try the last one, and those of tries that were made again."""
    first, *lines = path.read_text().splitlines()
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    last = {one.seed: one for one in outcomes}
    return json.loads(first)["machine"], list(last.values()), [one for one in outcomes if one is not last[one.seed]]


def job_of(fault, outcomes):
    """How the job ends, in words."""
    code = {ANY: "ends with an error", 0: "continues"}.get(fault.code, f"ends with {fault.code}")
    if fault.restarts:
        return f"{code}; or restarts"
    if fault.may_continue:
        return f"{code}; or continues ({sum(one.continued for one in outcomes)} of {len(outcomes)})"
    return "restarts" if "after the restart" in fault.name else code


def row(fault, outcomes):
    times = [one.seconds for one in outcomes if one.seconds is not None]
    took = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "–"
    return [fault.name, job_of(fault, outcomes), len(outcomes), sum(map(good, outcomes)), took]


def part(name, outcomes):
    """A table for one part of the page, and behind it what the user sees."""
    faults = [fault for fault in FAULTS if fault.part == name]
    by_name = {fault.name: [one for one in outcomes if one.fault == fault.name] for fault in faults}
    rows = [row(fault, by_name[fault.name]) for fault in faults]
    seen = [
        (fault.name, next((one.says for one in by_name[fault.name] if one.says and good(one)), "")) for fault in faults
    ]
    quoted = "".join(f"- {name}: `{line}`\n" for name, line in seen if line)
    return f"## {name}\n\n{table(COLUMNS, rows)}" + (f"\nWhat a user sees:\n\n{quoted}" if quoted else "")


def failures(outcomes, earlier):
    """The tries that were not as described, and those that were not at first, each with its seed."""
    text = ""
    for what, some in (
        ("are not as described", outcomes),
        ("were not as described until something was fixed", earlier),
    ):
        bad = {
            one.seed: f"- `{one.seed}`: {one.fault}. {CAUSES.get(one.seed, UNKNOWN)}." for one in some if not good(one)
        }
        text += f"Tries that {what}: {len(bad)}.\n\n" + "".join(f"{line}\n" for line in bad.values()) + "\n" * bool(bad)
    return text


def counts(outcomes):
    """How much was left or lost, in words."""
    left, lost = sum(bool(one.left) for one in outcomes), sum(one.lost for one in outcomes)
    unequal = sum(not one.equal for one in outcomes)
    return f"{left} left something behind, {lost} lost a checkpoint, and {unequal} ended with other weights"


def page(machine, outcomes, earlier=()):
    parts = "\n".join(part(name, outcomes) for name in dict.fromkeys(fault.part for fault in FAULTS))
    return f"""# Faults

[README](../README.md) · [all pages](README.md) · next: [testing](testing.md)

We injected {len(outcomes)} faults of {len({one.fault for one in outcomes})} kinds into jobs of
[elastic_training.py](../recipes/starting/elastic_training.py), which take {STEPS} steps and save a checkpoint every
{EVERY}. Of these tries {counts(outcomes)}.

{failures(outcomes, earlier)}## How a try works

`./launch.sh faults` makes this page ({machine}). Each try draws from its seed the
fault, its moment, eager mode or a graph, and one host with {RANKS[1]} ranks or two with {RANKS[2]}. The hosts are
network namespaces with addresses of their own. Run one try again with `./launch.sh faults --only 1/12`. An interrupted
run resumes where it stopped. The tests repeat a sample.

Most faults come at a random moment: at the start, while the ranks meet, in training, or while a checkpoint is written.
If a fault comes too late, when the job has all but ended, it is injected again, earlier. A try is as described if

- the job ends with this exit code, or continues; a rank's fault has `--max-restarts 2` in half of the tries, and
  then the job restarts;
- each host names the cause: the rank, the host or the signal;
- no process, listening port or file is left;
- a job that restarts, or is started again after the fault, resumes from the newest checkpoint, so that at most {EVERY}
  steps are repeated;
- in the end weight and momentum are bit by bit those of an undisturbed job;
- the job ends within {DEATH} s of the fault, where the table has seconds. They run until the last launcher has ended
  or says that it restarts the ranks.

A line that `launch.sh` or a rank prints stands below each table; most of a rank's traceback is left out.

{parts}{NOTES}"""
