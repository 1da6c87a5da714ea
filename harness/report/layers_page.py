"""The text of docs/layers.md, from what layers.py and layers_refused.py found."""

from pathlib import Path

from harness.report import layers, layers_refused
from harness.report.tables import table
from harness.start.recipe import HARNESS

PAGE = HARNESS.parent / "docs" / "layers.md"
TEXT = Path(__file__).with_name("layers_template.md")  # the page, with a {name} for each table
COLUMNS = {"data": "data parallel", "column": "column parallel", "row": "row parallel", "sharded": "fully sharded"}
RANKS = 2
NOTHING = 0.1  # of a unit: OneFlow's own messages, which are many where a parameter is small


def calls():
    """See pages.calls."""
    return {(what.__name__, RANKS): (RANKS, what.measured_on) for what in (layers, layers_refused)}


def page(results):
    """The text of the page; results: of `calls`."""
    cells, errors = (results[key] for key in calls())
    return TEXT.read_text().format(layers=layouts(cells), refused=refused(errors)).rstrip() + "\n"


def layouts(found):
    rows = []
    for (title, _), columns in layers.ROWS.items():
        row = [title]
        for column in COLUMNS:
            several = enumerate(columns.get(column, []))
            row.append("<br><br>".join(text_of(cell, found[title, column, number]) for number, cell in several) or "-")
        rows.append(row)
    return table(["layer", *COLUMNS.values()], rows)


def text_of(cell, found):
    """The lines of one cell."""
    lines = [sbps(found["sbp"])]
    lines += [f"{phase}: {multiples(sent, cell.moves.get(phase, {}))}" for phase, sent in found["sent"].items()]
    if isinstance(found["graph"], str):
        lines.append(f"**graph {found['graph']}**")
    elif found["graph"]:
        lines.append(f"graph: {multiples(found['graph'])}")
    if found["wrong"]:
        lines.append("**wrong**")
    return "<br>".join(lines)


def sbps(found):
    """Such as "weight, bias B; x S(0) → out S(0)"."""
    names = [name for name in found if name not in ("x", "out")]
    groups = {}
    for name in names:
        groups.setdefault(found[name], []).append(name)
    words = [f"{'W' if len(group) > 2 else ', '.join(group)} {sbp}" for sbp, group in groups.items()]
    return "; ".join([*words, f"x {found['x']} → out {found['out']}"])


def multiples(sent, moves=None):
    """Such as "0.50 x (all-to-all) + 2.00 W (all-reduce)"."""
    parts = []
    for unit, amount in sent.items():
        if amount > NOTHING:
            words = [
                collective if times == 1 else f"{times:g} × {collective}"
                for times, collective in layers.collectives((moves or {}).get(unit, ""))
            ]
            parts.append(f"{amount:.2f} {unit}" + (f" ({', '.join(words)})" if words else ""))
    return " + ".join(parts) or "0"


def refused(found):
    rows = []
    for one, (line, right) in zip(layers_refused.REFUSED, found):
        instead = one.instead if right is not False else f"{one.instead} **wrong**"
        rows.append([one.what, f"`{line}`", instead])
    return table(["layer", "the last line of the error", "use instead"], rows)
