"""What a forward pass did, from two traced runs of a recipe: its matmuls and the moves between them, to be drawn."""

import re
from dataclasses import dataclass
from typing import Optional

import numpy as np

from harness.measure import theory
from harness.measure.sbp import KINDS, Layout, split_dim
from harness.report.svg import colour_of, wide

SMALL = 1000  # bytes of a tensor, such as a loss, that is not drawn


def in_words(sbp):
    """S(0) -> "split(0)", as OneFlow calls it."""
    return KINDS[sbp[0]] + ("" if split_dim(sbp) is None else f"({split_dim(sbp)})")


@dataclass
class Tensor:
    """One tensor of an equation."""

    name: str
    colour: str
    shape: tuple
    layout: Layout

    @property
    def partial(self):
        return "P" in self.layout.axes

    @property
    def sbp(self):
        return in_words(self.layout.sbp) if len(self.layout.axes) == 1 else self.layout.sbp

    @property
    def heading(self):
        return f"{self.name} ({', '.join(map(str, self.shape))})"

    def across(self, cell):
        return max(self.shape[1] * cell, wide(self.heading, bold=True), wide(self.sbp))


@dataclass
class Product:
    """A matmul: x, w and what it makes."""

    tensors: list
    text: str  # of its line in the recipe
    sent: list  # bytes of each rank

    @property
    def of(self):
        return self.tensors[-1]


@dataclass
class Move:
    """A tensor that goes to another layout. sent, formula: what each rank sends, in units of the tensor."""

    of: Tensor
    new: Tensor
    sent: list
    backward: bool = False
    formula: Optional[float] = None  # where all ranks send the same

    def __post_init__(self):
        old, new = self.of.layout, self.new.layout
        self.collective = theory.collective(old, new)
        one = theory.Boxing(self.of.shape, old, new)
        if one.by_rank and len(set(one.by_rank.values())) == 1:
            self.formula = one.by_rank[old.members[0]] / np.prod(self.of.shape)


class Forward:
    """The Products and Moves of a forward pass as `items`, each move behind the product that it is of, and then the
    Moves of gradients in the backward pass.

    small, large: what `measure_script` recorded, once small enough to draw, and once so large that what was sent for a
    tensor is its content.
    """

    def __init__(self, small, large):
        self.names, self.tensors, self.items = small[0]["names"], {}, []
        for number, step in enumerate(small[0]["steps"]):
            sent = [result["steps"][number]["sent"] for result in large]
            whole = large[0]["steps"][number]
            if step["what"] == "matmul":
                self.matmul(step, sent)
            elif step["what"] == "to_global" and size(whole["inputs"][0]) >= SMALL:
                self.to_global(step, [one / size(whole["inputs"][0]) for one in sent])
            elif step["what"] == "backward":
                self.backward(step, sent, whole["outputs"])

    def tensor(self, one, name, colour=None):
        """The Tensor of a described one; it has this name if it is new."""
        layout = Layout(one["sbp"], one["ranks"])
        colour = "partial" if "P" in layout.axes else colour or colour_of(name)
        return self.tensors.setdefault(one["id"], Tensor(name, colour, one["shape"], layout))

    def name(self, one, otherwise, not_that=None):
        """The name of a tensor in the recipe; otherwise: where it has none, or `not_that`, of what it was made from."""
        name = self.names.get(one["id"])
        return otherwise if name in (None, "·", not_that) else name

    def matmul(self, step, sent):
        [x, w, *_], [out] = step["inputs"], step["outputs"]
        turned = re.search(r"(\w+)\.transpose\(", step["text"])
        before = self.names.get(x["id"])
        x = self.tensor(x, f"{turned.group(1)}.T" if turned else self.name(x, "·"))
        w = self.tensor(w, self.name(w, "·"))
        out = self.tensor(out, self.name(out, f"{x.name} @ {w.name}", before))
        self.items.append(Product([x, w, out], step["text"], sent))

    def to_global(self, step, sent):
        [old], [new] = step["inputs"], step["outputs"]
        before = self.tensor(old, self.name(old, "·"))
        if Layout(new["sbp"], new["ranks"]) == before.layout:
            self.tensors[new["id"]] = before
            return
        name = self.name(new, before.name, self.names.get(old["id"]))
        moved = self.tensor(new, name, "out" if before.colour in ("out", "partial") else None)
        place = max(k for k, item in enumerate(self.items) if item.of is before) + 1
        self.items.insert(place, Move(before, moved, sent))

    def backward(self, step, sent, whole):
        for one, large in zip(step["outputs"], whole):
            if one["sbp"] == "B":  # each rank had a part of it
                new = self.tensor(one, self.name(one, "·"))
                part = Tensor(new.name, new.colour, new.shape, Layout("P", one["ranks"]))
                self.items.append(Move(part, new, [amount / size(large) for amount in sent], backward=True))


def size(one):
    return one["item"] * int(np.prod(one["shape"]))
