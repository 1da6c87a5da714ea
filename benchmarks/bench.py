"""Measure the recipes against PyTorch, JAX, gloo and theory, and write docs/performance.md and its plots.

    ./launch.sh bench [--short] [PART ...]

Each figure that compares comes from one run in which the sides take turns on the same cores; medians, and of ratios the
median of the turns' ratios. What a part has found on each CPU is kept in docs/performance.json, until what it measures
changes; the pages are made from that.
"""

import argparse
import os
import platform
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import details, gpt, moves, page, peers, planned, records, starts, steps, timeline  # noqa: E402
from harness.pool import PoolError  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {DOCS / "performance.md": page.page, DOCS / "performance-details.md": details.page}
TURNS = 5
PARTS = {  # in the order in which they run: name -> function of the number of turns and of one that tells progress
    "training": steps.training,
    "limit": steps.limit,
    "kernels": steps.kernels,
    "busy": steps.busy,
    "gpt": gpt.gpt,
    "plan": planned.plan,
    "levers": steps.levers,
    "scaling": steps.scaling,
    "sizes": steps.sizes,
    "idle": steps.idle,
    "timeline": timeline.timeline,
    "collectives": moves.collectives,
    "launches": starts.launches,
    "fresh_clone": starts.fresh_clone,
    "suite": starts.suite,
}
SHORT = {  # the same in less than 3 minutes
    "training": lambda say: steps.training(1, say, short=True),
    "limit": lambda say: steps.limit(1, say),
    "collectives": lambda say: moves.collectives(1, say, moves.SIZES[2::4]),
}


def machine():
    """Where and with what this is measured."""
    with open("/proc/cpuinfo") as lines:
        models = [line.split(": ")[1].strip() for line in lines if line.startswith("model name")]
    wanted = [line for line in peers.REQUIREMENTS if "==" in line and not line.startswith("#")]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "model": (models or [platform.machine()])[0],
        "kernel": platform.release(),
        "versions": {"oneflow": version("oneflow"), **dict(line.split("==") for line in wanted)},
    }


def say(*words):
    print(" ", *words, file=sys.stderr, flush=True)


def measure(parts):
    """Yields (name, record) of each of `parts`, name -> function of `say`."""
    for k, (name, part) in enumerate(parts.items(), 1):
        print(f"{k}/{len(parts)} {name}", file=sys.stderr, flush=True)
        yield name, records.measured(name, part, machine(), say)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="launch.sh bench", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="less than 3 minutes: a part of it, printed, not written")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: no such part; there are {', '.join(PARTS)}")
    if options.short and options.parts:
        parser.error("--short has its own parts: leave them out")
    if not peers.PYTHON.exists():
        needs = "bench needs PyTorch and JAX, in an environment of their own; type"
        parser.exit(2, f"launch.sh: {needs}\n  {peers.HOW_TO_MAKE}\n")
    try:
        if options.short:
            found = {name: {record["machine"]["model"]: record} for name, record in measure(SHORT)}
            print(page.page(found), details.page(found), sep="\n")
            return 0
        chosen = {name: PARTS[name] for name in PARTS if name in options.parts or not options.parts}
        for name, record in measure({name: partial(part, TURNS) for name, part in chosen.items()}):
            kept = records.current(records.added(records.read(), name, record))
            write({part: kept[part] for part in PARTS if part in kept})
    except (peers.PeerError, PoolError) as error:
        print(f"launch.sh: bench: {error}", file=sys.stderr)
        return 1
    print("wrote", *(path.relative_to(DOCS.parent) for path in PAGES))
    return 0


def write(found):
    """The kept figures, the pages and the plots."""
    records.write(found)
    for path, text in PAGES.items():
        path.write_text(text(found))
    plots = [str(peers.PYTHON), str(Path(__file__).with_name("plots.py")), str(records.FOUND), str(DOCS / "pictures")]
    done = subprocess.run(plots, capture_output=True, text=True)
    if done.returncode:
        raise peers.PeerError(f"plots.py: {done.stderr.splitlines()[-1]}")


if __name__ == "__main__":
    sys.exit(main())
