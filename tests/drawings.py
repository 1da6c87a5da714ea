"""The pictures of recipes in docs/pictures, kept by hand; each has what it claims of a run as JSON in its <metadata>.

Groups say what they draw: data-tensor and data-rank a rank's block, data-values its numbers, data-step a part of a
training step, data-conversion a cell of a table, data-sends and data-moves an arrow, data-attends a block of a ring,
data-slots those of tokens, data-bar, data-kept and data-strategy a bar.
"""

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np

from harness.measure import theory
from harness.measure.sbp import Layout, split_dim
from tests.cases import ROOT

PICTURES = ROOT / "docs" / "pictures"
THEMES = ("", "-dark")  # by the end of a file's name
SVG = "{http://www.w3.org/2000/svg}"
FROM_DATA = ("gpt_losses",)  # how the names of those begin that a command draws from a file of figures
NAMES = sorted(
    path.stem
    for path in PICTURES.glob("*.svg")
    if not path.stem.endswith("-dark") and not path.stem.startswith(FROM_DATA)
)


def picture(name, theme=""):
    return ElementTree.parse(PICTURES / f"{name}{theme}.svg").getroot()


def claim(root):
    """What a picture claims."""
    return json.loads(root.find(f"{SVG}metadata").text)


def claiming(*keys):
    """The names of the pictures whose claim has these keys."""
    return [name for name in NAMES if set(keys) <= set(claim(picture(name)))]


def groups(root, kind):
    """The groups that draw something of this kind: "tensor", "step", ..."""
    return [group for group in root.iter(f"{SVG}g") if f"data-{kind}" in group.attrib]


def texts(element):
    """All that can be read in a picture or a part of it, line by line."""
    return ["".join(text.itertext()).strip() for text in element.iter(f"{SVG}text")]


def spans(element, axis):
    """(start, size) along "x" or "y" of the first rectangle with a colour in a group."""
    rect = next(rect for rect in element.iter(f"{SVG}rect") if rect.get("fill") != "none")
    return float(rect.get(axis)), float(rect.get({"x": "width", "y": "height"}[axis]))


def layout(tensor):
    return Layout(tensor["sbp"], tensor["ranks"])


def drawn_as(tensor):
    """(shape, Layout) of the matrix that is drawn: of a text (letters, ...) one letter."""
    shape, sbp = tensor["shape"], tensor["sbp"]
    if shape[0] != "s":
        return tuple(shape), layout(tensor)
    axes = [one if split_dim(one) is None else f"S({split_dim(one) - 1})" for one in sbp.split(", ")]
    return tuple(shape[1:]), Layout(", ".join(axes), tensor["ranks"])


def tensors_of(claim):
    """Every tensor of the matmuls and moves of a claim."""
    matmuls = [tensor for tensors in claim["matmuls"] for tensor in tensors]
    return matmuls + [tensor for move in claim["moves"] for tensor in (move["old"], move["new"])]


def sbp_in_words(tensor):
    """ "S(0)", on a mesh "S(0), B"; of a tensor on a single rank which one, since every SBP is the same there."""
    members = layout(tensor).members
    return f"rank {members[0]} only" if len(members) == 1 else tensor["sbp"]


def block_in_words(tensor, rank):
    """What a rank holds of a matrix, line by line: "whole", "rows 0-1", "column 2", "part of the sum"."""
    shape, where = drawn_as(tensor)
    lines = []
    for name, (start, stop), size in zip(("row", "column"), where.block(shape, rank), shape):
        if stop - start < size:
            lines.append(f"{name}s {start}-{stop - 1}" if stop - start > 1 else f"{name} {start}")
    lines += ["part of the sum"] if "P" in where.axes else []
    return lines or ["whole"]


def ranks_in_words(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def move_in_words(move):
    """The lines by which a picture says what moves, and how much each rank sends."""
    old, new = layout(move["old"]), layout(move["new"])
    name = theory.collective(old, new)
    if old.ranks != new.ranks:
        name = name.replace(" to other ranks", "")
        name += f", {ranks_in_words(old.members)} → {ranks_in_words(new.members)}"
    what = move["old"]["name"]
    what = f"({what})" if " " in what else what
    amounts = {}
    for rank, sent in enumerate(move["sent"]):
        if sent:
            amounts.setdefault(sent, []).append(rank)
    lines = [name]
    for sent, ranks in amounts.items():
        all_ranks = len(ranks) == len(move["sent"])
        verb = "sends" if all_ranks or len(ranks) == 1 else "each send"
        lines.append(f"{'each rank' if all_ranks else ranks_in_words(ranks)} {verb} {sent:.2f} × {what}")
        formula = by_formula(move)
        if all_ranks and formula is not None and not near(sent, formula):
            lines.append(f"({formula:.2f} by the formula)")
    return lines


def by_formula(move):
    """What each rank sends for a move in units of the tensor, where all send the same; else None."""
    shape = drawn_as(move["old"])[0]
    boxing = theory.Boxing(shape, drawn_as(move["old"])[1], drawn_as(move["new"])[1])
    amounts = set((boxing.by_rank or {}).values())
    return amounts.pop() / np.prod(shape) if len(amounts) == 1 else None


def near(found, wanted):
    """Equal but for OneFlow's own messages, and for the rounding to two decimals."""
    return abs(found - wanted) <= 0.02 * wanted + 0.011


def numbers_in(lines):
    """The numbers with two decimals."""
    return set(re.findall(r"\d+\.\d\d\b", " ".join(lines)))
