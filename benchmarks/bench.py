"""Measure the recipes against PyTorch, JAX, gloo and theory, and write docs/performance.md and its plots.

    ./launch.sh bench [--short] [PART ...]

Each figure that compares comes from one run in which the sides take turns on the same cores; medians, and of ratios the
median of the turns' ratios. What a part has found is kept in docs/performance.json, and the page is made from that.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpt, moves, page, peers, starts, steps  # noqa: E402
from harness.pool import PoolError  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOUND, PAGE = DOCS / "performance.json", DOCS / "performance.md"
TURNS = 5
PARTS = {  # in the order in which they run: name -> function of the number of turns and of one that tells progress
    "training": steps.training,
    "limit": steps.limit,
    "kernels": steps.kernels,
    "busy": steps.busy,
    "gpt": gpt.gpt,
    "levers": steps.levers,
    "scaling": steps.scaling,
    "sizes": steps.sizes,
    "idle": steps.idle,
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
    """{name: {"date", "minutes", "machine", "data"}} of each of `parts`, name -> function of `say`."""
    found = {}
    for k, (name, part) in enumerate(parts.items(), 1):
        print(f"{k}/{len(parts)} {name}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        data = json.loads(json.dumps(part(say)))
        minutes = round((time.monotonic() - begin) / 60, 1)
        found[name] = {"date": str(datetime.date.today()), "minutes": minutes, "machine": machine(), "data": data}
        yield found


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
            *_, found = measure(SHORT)
            print(page.page(found))
            return 0
        chosen = {name: PARTS[name] for name in PARTS if name in options.parts or not options.parts}
        for found in measure({name: lambda say, part=part: part(TURNS, say) for name, part in chosen.items()}):
            kept = json.loads(FOUND.read_text()) if FOUND.exists() else {}
            everything = {**kept, **found}
            write({name: everything[name] for name in PARTS if name in everything})
    except (peers.PeerError, PoolError) as error:
        print(f"launch.sh: bench: {error}", file=sys.stderr)
        return 1
    print(f"wrote {PAGE.relative_to(DOCS.parent)}")
    return 0


def write(found):
    """The kept figures, the page and the plots."""
    FOUND.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page.page(found))
    plots = [str(peers.PYTHON), str(Path(__file__).with_name("plots.py")), str(FOUND), str(DOCS / "pictures")]
    done = subprocess.run(plots, capture_output=True, text=True)
    if done.returncode:
        raise peers.PeerError(f"plots.py: {done.stderr.splitlines()[-1]}")


if __name__ == "__main__":
    sys.exit(main())
