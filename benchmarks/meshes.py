"""Train gpt.py on all meshes of up to 4 ranks, in each layout, and write docs/gpt.md from the results.

    ./launch.sh meshes

Writes docs/gpt.json and docs/gpt.md. tests/slow/test_gpt_page.py makes the first steps of
most of these runs.
"""

import json
import signal
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "harness")]

from benchmarks.tables import fill, table  # noqa: E402
from oneflow_cookbook.plan.formulas import AXES  # noqa: E402
from oneflow_cookbook.pool import Pool  # noqa: E402
from oneflow_cookbook.start.signals import exit_at  # noqa: E402
from tests.cases import ROOT  # noqa: E402
from tests.cases import gpt_meshes as gpt  # noqa: E402

PAGE = ROOT / "docs" / "gpt.md"
NEAR = 0.05  # measured bytes may differ from a formula by this share of it,
MESSAGES = 30_000  # and by these bytes: OneFlow's own messages in a step, which depend on the machine
ALL_TO_ALL = "weights that are split along dimension 1 need [an extra all-to-all](sbp-atlas.md#the-same-ranks)"
FIRST_SENDS = "one rank of a stage sends the residual, and the next stage spreads it by an all-reduce"
UNSPLIT = "in one direction the full, unsplit residual is sent"
KNOWN = {  # (mesh, layout, axis, mode) -> why the bytes are not those of the formula
    **{(mesh, "sharded weights", "data", "eager"): ALL_TO_ALL for mesh in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1))},
    **{((1, 2, 2), "plain", axis, "eager"): FIRST_SENDS for axis in ("tensor", "pipeline")},
    ((1, 2, 2), "sequence parallel", "pipeline", "graph"): UNSPLIT,
}
MODES = {False: "eager", True: "graph"}


def name_of(mesh):
    return " × ".join(map(str, mesh))


def off(measured, formula):
    """Whether measured bytes differ from the formula."""
    return abs(measured - formula) > NEAR * formula + MESSAGES


def cell(measured, formula):
    """Figures of both modes in MB, the formula in brackets; bold where they differ."""
    if not formula:
        return "–"
    figures = [megabytes(count) if not off(count, formula) else f"**{megabytes(count)}**" for count in measured]
    return f"{figures[0] if len(set(figures)) == 1 else ' · '.join(figures)} ({megabytes(formula)})"


def megabytes(count):
    return f"{count / 1e6:.2f}"


def moved_and_kept(results):
    """The table: bytes along each axis, in both modes, and what the fullest rank keeps, which is the same in both."""
    rows = []
    for (mesh, layout), both in gpt.by_row(results).items():
        formulas, _ = gpt.formulas(mesh, layout)
        cells = [cell([run["sent"][axis] for run in both], formulas[axis]) for axis in AXES]
        rows.append([f"{name_of(mesh)}<br>{layout}", *cells, megabytes(sum(both[0]["held"].values()))])
    return table(["D × T × P", *AXES, "a rank keeps"], rows)


def remarks():
    """A list of where bytes are not those of the formulas, and why."""
    places = {}
    for (_, layout, axis, mode), why in KNOWN.items():
        where = f"{layout}, {axis} axis, {mode}"
        places.setdefault(why, {})[where] = None
    lines = ["; ".join(wheres) + f": {why}." for why, wheres in places.items()]
    return "\n".join(f"- {line[0].upper()}{line[1:]}" for line in lines)


def largest(numbers):
    """Such as 2.3e-6."""
    return f"{max(map(abs, numbers)):.1e}".replace("e-0", "e-")


def page(results):
    parts = {
        "loss": largest(error for run in results["runs"] for error in run["loss_errors"]),
        "gradient": largest(run["gradient_error"] for run in results["runs"]),
        "table": moved_and_kept(results),
        "remarks": remarks(),
    }
    return fill(PAGE.read_text(), parts)


def collected(runs):
    """The results of all runs, rounded, as they are written to a file."""
    for run in runs:
        run["loss_errors"] = [float(f"{error:.2g}") for error in run["loss_errors"]]
        run["gradient_error"] = float(f"{run['gradient_error']:.2g}")
    return {"runs": runs}


def write(results):
    gpt.FOUND.write_text(json.dumps(results).replace('{"mesh"', '\n{"mesh"') + "\n")
    PAGE.write_text(page(results))


def main():
    runs = []
    for mesh, layout in gpt.ROWS:
        for graph, mode in MODES.items():
            print(f"{name_of(mesh)}, {layout}, {mode}", flush=True)
            with Pool(int(np.prod(mesh)), timeout=600, repeat=True) as pool:
                runs.append(gpt.row_run(pool, mesh, layout, graph))
    write(collected(runs))
    return 0


if __name__ == "__main__":
    exit_at(signal.SIGTERM, signal.SIGHUP)
    sys.exit(main())
