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
SOAK = ROOT / "docs" / "soak.jsonl"
MOST = 6  # processes that compute beside a launch of soak.py
COLUMNS = ["fault", "the job", "runs", "as expected", "seconds: median, largest"]
SHOWN = {  # name of a fault -> how the page says it; the outcomes have the name
    "a rank is killed, and a rank again after the restart": "a rank is killed, and again after the restart",
    "a host dies": "all processes of a host are killed",
}
UNKNOWN = "Cause unknown"
CAUSES = {  # seed of a try that was not as described -> why, a sentence without a full stop
    "1/9": "`launch.sh` looked at the loopback interface of node 0 alone; elsewhere ranks waited until `--timeout`. "
    "Now each host looks at its own",
    "1/805": "A rank that had just been started died of SIGUSR1; now it is blocked until the rank can handle it",
    "1/59": "The experiment was wrong, not `launch.sh`: it changed a file that holds a single number",
    **dict.fromkeys(
        ("1/176", "1/247", "1/410"),
        "The experiment was wrong, not `launch.sh`: it looked for open ports too early. The ranks were gone, but Linux "
        "had not closed the port of one yet",
    ),
}
NOTES = """## Good to know

- A rank that calls `sys.exit(0)` or is stopped is silent, and the other ranks wait for it until `--timeout`. Then
  `launch.sh` shows where each rank is, and which one is stopped or has ended. For these faults, the seconds
  are counted from when the time limit expires.
- When `launch.sh` itself is killed, Linux kills its ranks at once, and the launcher on the other host ends the job. On
  its own host only the shell prints something: `Killed`.
- `launch.sh` notices a broken link when the other launcher has sent nothing for 10 s. A shorter break does no harm.
- A host that dies ends the job, because nothing can be started on it. A scheduler can [start the job
  again](clusters.md#when-a-host-dies). A host that never comes ends it only at `--timeout`, if you
  set it.
- On a full or read-only disk the job ends, and the last checkpoint stays: the recipe removes it when the next one is
  complete.
- The recipe keeps one checkpoint. If it is damaged, the job ends with the error of `flow.load`; remove it, and the job
  starts with step 1.
- OneFlow's checkpoints have no checksum. A changed number is loaded silently; this recipe notices it at its end only
  because it compares its losses with those of a single device.
- When the kernel kills a rank for lack of memory, it sends SIGKILL; `launch.sh` cannot tell the reason.
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
    """How the job ends, in words; where two endings are possible, with how often each was observed."""
    code = {ANY: "ends with an error", 0: "continues"}.get(fault.code, f"ends with {fault.code}")
    if not fault.restarts and not fault.may_continue:
        return "restarts" if "after the restart" in fault.name else code
    other = "restarts" if fault.restarts else "continues"
    count = sum(one.restarts if fault.restarts else one.continued for one in outcomes)
    total = len(outcomes)
    if count in (0, total):
        return other if count else code
    return f"{code} ({total - count} of {total}) or {other} ({count} of {total})"


def shown(name):
    return SHOWN.get(name, name)


def row(fault, outcomes):
    seconds = [one.seconds for one in outcomes if one.seconds is not None]
    took = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "–"
    return [shown(fault.name), job_of(fault, outcomes), len(outcomes), sum(map(good, outcomes)), took]


def part(name, outcomes):
    """A table for one part of the page, and below it what the user sees."""
    faults = [fault for fault in FAULTS if fault.part == name]
    by_name = {fault.name: [one for one in outcomes if one.fault == fault.name] for fault in faults}
    rows = [row(fault, by_name[fault.name]) for fault in faults if by_name[fault.name]]
    if not rows:
        return ""
    seen = [
        (shown(fault.name), next((one.says for one in by_name[fault.name] if one.says and good(one)), ""))
        for fault in faults
    ]
    quoted = "".join(f"- {name}: `{line}`\n" for name, line in seen if line)
    what = f"\nWhat a user sees:\n\n{quoted}" if quoted else ""
    return f"## {name}\n\n{table(COLUMNS, rows)}{what}"


def not_yet(outcomes):
    """The kinds of faults without a run, in a sentence; "" if there are none."""
    missing = [shown(fault.name) for fault in FAULTS if fault.name not in {one.fault for one in outcomes}]
    return f"\nNot run yet: {'; '.join(missing)}.\n" if missing else ""


def failures(outcomes, earlier):
    """The runs that were not as expected, and those that were not at first, each with its seed."""
    text = ""
    for what, some in (
        ("did not behave as expected", outcomes),
        ("failed at first, and were repeated after a fix", earlier),
    ):
        bad = {
            one.seed: f"- `{one.seed}`: {shown(one.fault)}. {CAUSES.get(one.seed, UNKNOWN)}."
            for one in some
            if not good(one)
        }
        text += f"Runs that {what}: {len(bad)}.\n\n" + "".join(f"{line}\n" for line in bad.values()) + "\n" * bool(bad)
    return text


def counts(outcomes):
    """How much was left or lost, in a sentence."""
    left, lost = sum(bool(one.left) for one in outcomes), sum(one.lost for one in outcomes)
    unequal = sum(not one.equal for one in outcomes)
    if not left and not lost and not unequal:
        return (
            "No run left anything behind. After each fault the job, or the same job started\n"
            "again, ended with the weights of an undisturbed one. A damaged checkpoint had to be removed first;\n"
            "that job started with step 1."
        )
    return f"{left} runs left something behind, {lost} lost a checkpoint and {unequal} ended with different weights."


def soak(outcomes):
    """What came of the runs of soak.py, as a section; "" if there are none."""
    suites, launches = ([one for one in outcomes if one["what"] == what] for what in ("suite", "launch"))
    lines = []
    if suites:
        failed, repeated = sum(one["code"] != 0 for one in suites), sum(one["repeated"] for one in suites)
        lines.append(f"- The default suite, {len(suites)} times in a row: {failed} failed.")
        lines.append(f"  {repeated} calls were repeated, because OneFlow had crashed.")
    if launches:
        failed = [one for one in launches if one["code"] != 0]
        seconds = [one["seconds"] for one in launches]
        median, largest = f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"
        lines.append(f"- {len(launches)} launches beside up to {MOST} processes that compute: {len(failed)} failed.")
        lines.append(f"  The median took {median}, the longest {largest}. Recipe, ranks and mode are drawn at random.")
        lines += [f"  - `{one['command']}` ended with {one['code']}." for one in failed]
    if not lines:
        return ""
    question = "Does a job fail when nothing is injected? `python benchmarks/soak.py` tries it:"
    return "\n".join(["## Without a fault", "", question, "", *lines, "", ""])


def read_soak(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def page(machine, outcomes, earlier=(), undisturbed=()):
    parts = "\n".join(filter(None, (part(name, outcomes) for name in dict.fromkeys(fault.part for fault in FAULTS))))
    return f"""# Faults

[README](../README.md) · [all pages](README.md) · next: [testing](testing.md)

We injected {len(outcomes)} faults of {len({one.fault for one in outcomes})} kinds into jobs of
[elastic_training.py](../recipes/starting/elastic_training.py), which take {STEPS} steps and save a
checkpoint every {EVERY}. {counts(outcomes)}

Do you have an error message and look for its cause? [Diagnosing](diagnosing.md) has an index of messages.

{NOTES}
## How a run works

`./launch.sh faults` makes this page ({machine}). Each run's seed selects the fault, its timing, eager or graph mode,
and either one host ({RANKS[1]} ranks) or two ({RANKS[2]} ranks in all). The hosts are network namespaces with addresses
of their own. `./launch.sh faults --only 1/12` repeats run 12 of seed 1. If `./launch.sh faults` is interrupted, it
resumes where it stopped. The tests repeat a sample.

Most faults come at a random moment: at the start, while the ranks meet, in training, or while a checkpoint is written.
If a fault comes too late, when the job has all but ended, it is injected again, earlier. A run is as expected if

- the job ends with the exit code in the table, or continues, or restarts;
- each host names the cause: the rank, the host or the signal;
- no process, listening port or file is left;
- a job that restarts, or is started again after the fault, resumes from the newest checkpoint, so that at most {EVERY}
  steps are repeated; if the checkpoint itself is damaged, it is removed, and the job starts with step 1;
- in the end weight and momentum are bit for bit those of an undisturbed job;
- where the table has seconds, the job ends, or says that it restarts the ranks, within {DEATH} s of the fault, or
  within 30 s if a host freezes. The seconds do not include the restart itself.

{failures(outcomes, earlier)}Where the table says "or restarts", about half of the runs
had `--max-restarts 2`: these restarted, and the others ended with the exit code. Where it says "or continues", it
depends on the moment or the limit that was drawn. The numbers in brackets say how many runs did which.

Below each table is one line of output for each fault that prints any; most of a rank's traceback is left out.
{not_yet(outcomes)}
{soak(undisturbed)}{parts}"""
