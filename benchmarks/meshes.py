"""Train gpt.py on all meshes of up to 4 ranks, in each layout, and make docs/gpt.md of what was found.

    ./launch.sh meshes

Writes docs/gpt.json, docs/gpt.md and the picture of the losses. tests/slow/test_gpt.py makes the first steps of
most of these runs.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.plan.formulas import AXES  # noqa: E402
from harness.pool import Pool  # noqa: E402
from harness.report import curves  # noqa: E402
from harness.report.svg import THEMES  # noqa: E402
from harness.report.tables import table  # noqa: E402
from tests.cases import ROOT, gpt  # noqa: E402

PAGE, PICTURES = ROOT / "docs" / "gpt.md", ROOT / "docs" / "pictures"
TEXT = Path(__file__).with_name("meshes_template.md")  # the page, with a {name} for each table
TITLE = "Losses on ten meshes: {runs} runs of {steps} steps of AdamW, eager and in a graph."
NEAR = 0.05  # how far what was measured may be from a formula,
MESSAGES = 30_000  # and bytes of OneFlow's own messages in a step, which depend on the machine
ALL_TO_ALL = "an all-to-all comes on top for weights that dimension 1 splits, as in the atlas"
ONE_SENDS = "one rank of a stage sends the residual, and the next stage spreads it by an all-reduce, as in the atlas"
ONE_TABLE = "one rank of the first stage sends the table, and the last stage spreads it by an all-reduce"
KNOWN = {  # (mesh, layout, axis, mode): why it is not the formula
    **{(mesh, "sharded weights", "data", "eager"): ALL_TO_ALL for mesh in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1))},
    **{((1, 2, 2), "plain", axis, "eager"): ONE_SENDS for axis in ("tensor", "pipeline")},
    **{((2, 1, 2), layout, "pipeline", "eager"): ONE_TABLE for layout in ("plain", "sharded weights")},
    ((1, 2, 2), "sequence parallel", "pipeline", "graph"): "one way the residual goes on as the whole sequence",
}
MODES = {False: "eager", True: "graph"}


def name_of(mesh):
    return " × ".join(map(str, mesh))


def errors(found):
    """The table of the errors."""
    rows = []
    for (mesh, layout), both in gpt.by_row(found).items():
        cells = [f"{max(map(abs, run['loss_errors'])):.0e}" for run in both]
        cells += [f"{run['gradient_error']:.0e}" for run in both]
        rows.append([name_of(mesh), layout, *(cell.replace("e-0", "e-") for cell in cells)])
    return table(
        ["D × T × P", "layout", *(f"{what}, {mode}" for what in ("losses", "gradients") for mode in MODES.values())],
        rows,
    )


def off(measured, formula):
    """Whether a figure is not that of its formula."""
    return abs(measured - formula) > NEAR * formula + MESSAGES


def cell(measured, formula):
    """Figures of both modes in MB, the formula in brackets; bold where they differ."""
    if not formula:
        return "–"
    figures = [f"**{one / 1e6:.2f}**" if off(one, formula) else f"{one / 1e6:.2f}" for one in measured]
    return f"{figures[0] if len(set(figures)) == 1 else ' · '.join(figures)} ({formula / 1e6:.2f})"


def costs(found):
    """The table of bytes and memory."""
    rows = []
    for (mesh, layout), both in gpt.by_row(found).items():
        moved, kept = gpt.formulas(mesh, layout)
        cells = [cell([run["sent"][axis] for run in both], moved[axis]) for axis in AXES]
        cells.append(cell([sum(run["held"].values()) for run in both], kept))
        rows.append([name_of(mesh), layout, *cells])
    return table(["D × T × P", "layout", *AXES, "kept by a rank"], rows)


def remarks():
    """{why figures are not those of the formulas: where}."""
    places = {}
    for (mesh, *rest), why in KNOWN.items():
        places.setdefault(why, []).append(", ".join([name_of(mesh), *rest]))
    return places


def page(found):
    plain = [run for run in found["runs"] if run["layout"] == "plain"]
    return TEXT.read_text().format(
        **gpt.SIZES,
        steps=gpt.LAYOUTS["plain"]["steps"],
        few=gpt.LAYOUTS["sharded weights"]["steps"],
        loss=f"{max(abs(x) for run in plain for x in run['loss_errors']):.0e}".replace("e-0", "e-"),
        gradient=f"{max(run['gradient_error'] for run in found['runs']):.0e}".replace("e-0", "e-"),
        errors=errors(found),
        costs=costs(found),
        others=f"{max(run['sent']['others'] for run in found['runs']) / 1e6:.2f}",
        remarks="\n".join(f"- {why}: {'; '.join(places)}." for why, places in remarks().items()),
    )


def picture(found):
    plain = [run for run in found["runs"] if run["layout"] == "plain"]
    title = TITLE.format(runs=len(plain), steps=gpt.LAYOUTS["plain"]["steps"])
    lines = [(int(np.prod(run["mesh"])), run["graph"], run["loss_errors"]) for run in plain]
    return curves.picture(title, found["numpy"], lines)


def made(found):
    """Every file that is made of what was found: path -> text."""
    drawn = picture(found)
    return {PAGE: page(found), **{PICTURES / f"gpt_losses{theme}.svg": drawn.svg(theme) for theme in THEMES}}


def collected(runs):
    """What is written down of the `facts` of all runs."""
    for run in runs:
        run["loss_errors"] = [float(f"{error:.2g}") for error in run["loss_errors"]]
        run["gradient_error"] = float(f"{run['gradient_error']:.2g}")
    losses = gpt.known(**gpt.LAYOUTS["plain"], **gpt.SIZES)["losses"]
    return {"numpy": [round(loss, 6) for loss in losses], "runs": runs}


def write(found):
    gpt.FOUND.write_text(json.dumps(found).replace('{"mesh"', '\n{"mesh"') + "\n")
    for path, text in made(found).items():
        path.write_text(text)


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
    sys.exit(main())
