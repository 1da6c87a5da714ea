"""The text of docs/layers.md, from what layers.py and layers_refused.py found."""

import re
from pathlib import Path

from harness.report import layers, layers_refused
from harness.report.tables import table
from harness.start.recipe import HARNESS

PAGE = HARNESS.parent / "docs" / "layers.md"
TEXT = Path(__file__).with_name("layers_template.md")  # the page, with a {name} for each part
COLUMNS = {"data": "data parallel", "column": "column parallel", "row": "row parallel", "sharded": "fully sharded"}
RANKS = 2
NOTHING = 0.1  # of a unit: OneFlow's own messages, which are many where a parameter is small
YES, EAGER, WRONG = "yes", "in eager mode only", "**wrong**"
NOTES = {  # title of a layer -> what follows its heading
    "Linear as Column, Row": (
        "The classes [Column and Row](../recipes/your_model/tensor_parallel_module.py) take the place of Linear."
        " Row adds its partial sums in an all-reduce, and then the bias."
    ),
    "Embedding": (
        "The names of the layouts are those of a Linear. Here column parallel, weight S(0), splits the vocabulary, as"
        " Megatron-LM's VocabParallelEmbedding does. Row parallel, weight S(1), splits the features. PyTorch names them"
        " the other way round: its `RowwiseParallel` splits an embedding's vocabulary, and `ColwiseParallel` its"
        " features."
    ),
    "LayerNorm": (
        "With x S(1) or P it is right, but moves x several times. Bring P to B first, for 1.00 x, as"
        " [Row](../recipes/your_model/tensor_parallel_module.py) does."
    ),
    "Conv2d": "A split weight is gathered. Where x is B, every rank then computes all of the layer.",
    "BatchNorm1d": (
        "Mean and variance are those of each rank's own rows. That also holds where the channels are split, because"
        " OneFlow moves x to S(0) first. Use [batch_norm.py](../recipes/data_and_state/batch_norm.py)."
    ),
    "Dropout": (
        "Every rank draws the same mask. Use [random_numbers.py](../recipes/data_and_state/random_numbers.py)."
    ),
    "CrossEntropyLoss": (
        "With split classes it moves the logits. [vocab_parallel.py](../recipes/transformer/vocab_parallel.py) does"
        " not."
    ),
    "clip_grad_norm_": (
        "It gathers every split gradient, whole, on every rank. The table has what the call itself sends, after the"
        " backward of a Linear. In a graph, the optimizer's `clip_grad_max_norm` gives the same values and gathers"
        " nothing."
    ),
}


def calls():
    """See pages.calls."""
    return {(what.__name__, RANKS): (RANKS, what.measured_on) for what in (layers, layers_refused)}


def page(results):
    """The text of the page; results: of `calls`."""
    cells, errors = (results[key] for key in calls())
    parts = {
        "answers": answers(cells),
        "example": table_of([("column", row_of_cells(cells, "Linear", "Linear", "column"))], layers.phases("Linear")),
        "layers": "\n".join(section(cells, titles) for titles in same_layouts()),
        "refused": refused(errors),
    }
    return TEXT.read_text().format(**parts).rstrip() + "\n"


def same_layouts():
    """[[(title, kind)] of layers that have the very same layouts]: the page has one table for them."""
    groups = {}
    for row, columns in layers.ROWS.items():
        groups.setdefault(id(columns), []).append(row)
    return list(groups.values())


def heading_of(titles):
    return ", ".join(title for title, _ in titles)


def anchor(heading):
    """By which a heading can be linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def row_of_cells(found, title, kind, column):
    """[(layers.Cell, what was found)] of one layout of a layer."""
    several = layers.ROWS[title, kind].get(column, [])
    return [(cell, found[title, column, number]) for number, cell in enumerate(several)]


def answers(found):
    """The table of what may be used."""
    rows = []
    for titles in same_layouts():
        groups = {}
        for column in COLUMNS:
            several = row_of_cells(found, *titles[0], column)
            verdicts = [verdict(one) for _, one in several]
            for (cell, _), answer in zip(several, verdicts):
                place = column if len(set(verdicts)) == 1 else f"{column} with x {cell.x}"
                groups.setdefault(answer, []).append(place)
        words = [f"{answer}: {', '.join(dict.fromkeys(places))}" for answer, places in groups.items()]
        name = heading_of(titles)
        rows.append([f"[{name}](#{anchor(name)})", "<br>".join(words) if len(groups) > 1 else next(iter(groups))])
    return table(["layer", "can I use it?"], rows)


def verdict(found):
    if found["wrong"]:
        return WRONG
    return EAGER if isinstance(found["graph"], str) else YES


def section(found, titles):
    """The heading, the note and the table of one layer."""
    title, kind = titles[0]
    rows = [(column, row_of_cells(found, title, kind, column)) for column in COLUMNS]
    note = NOTES.get(title)
    lines = [f"### {heading_of(titles)}", *([note] if note else []), table_of(rows, layers.phases(kind))]
    return "\n\n".join(lines)


def table_of(rows, phases):
    """rows: [(column, what row_of_cells returns)]."""
    lines = []
    for column, several in rows:
        for cell, found in several:
            sent = [multiples(found["sent"][phase], cell.moves.get(phase, {})) for phase in phases]
            lines.append(["<br>".join([f"**{COLUMNS[column]}**", *layout_in_words(found)]), *sent])
    return table(["layout", *phases], lines)


def layout_in_words(found):
    """The SBPs, and what is wrong or different in a graph."""
    lines = sbps(found["sbp"])
    if isinstance(found["graph"], str):
        lines.append(f"**graph {found['graph']}**")
    elif found["graph"]:
        lines.append(f"in a graph: {multiples(found['graph'])}")
    return [*lines, WRONG] if found["wrong"] else lines


def sbps(found):
    """Such as ["weight, bias B", "x S(0) → out S(0)"]."""
    names = [name for name in found if name not in ("x", "out")]
    groups = {}
    for name in names:
        groups.setdefault(found[name], []).append(name)
    words = [f"{'W' if len(group) > 2 else ', '.join(group)} {sbp}" for sbp, group in groups.items()]
    return [*words, f"x {found['x']} → out {found['out']}"]


def multiples(sent, moves=None):
    """What a rank sends, such as "0.25 x (all-to-all) + 1.00 W (all-reduce)"; sent: by all ranks together."""
    parts = []
    for unit, amount in sent.items():
        if amount > NOTHING:
            words = [
                collective if times == 1 else f"{times:g} × {collective}"
                for times, collective in layers.collectives((moves or {}).get(unit, ""))
            ]
            parts.append(f"{amount / RANKS:.2f} {unit}" + (f" ({', '.join(words)})" if words else ""))
    return " + ".join(parts) or "0"


def refused(found):
    """What OneFlow refuses, with the last line of the error and what to use."""
    parts = []
    for one, (line, right) in zip(layers_refused.REFUSED, found):
        instead = f"Use {one.instead}." if right is not False else f"Use {one.instead}: {WRONG}."
        parts.append(f"**{one.what}**. {one.why}{' ' if one.why else ''}{instead}\n\n```text\n{line}\n```")
    return "\n\n".join(parts)
