"""What a forward pass did, from two traced runs of a recipe: its matmuls and the moves between them, to be drawn."""

import re
from dataclasses import dataclass

import numpy as np

from harness.measure import theory
from harness.measure.sbp import KINDS, Layout, split_dim
from harness.measure.steps import bytes_of
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
    def shape_in_words(self):
        return f"({', '.join(map(str, self.shape))})"

    def across(self, cell):
        return max(self.shape[1] * cell, wide(f"{self.name} {self.shape_in_words}", bold=True), wide(self.sbp))


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
    """A tensor that goes to another layout. sent: what each rank sends, in units of the tensor."""

    of: Tensor
    new: Tensor
    sent: list
    backward: bool = False

    @property
    def collective(self):
        return theory.collective(self.of.layout, self.new.layout)

    @property
    def in_words(self):
        """The name of the move, and what each rank sends: one line for those that send the same."""
        old, new = self.of.layout, self.new.layout
        name, of = self.collective, f"({self.of.name})" if " " in self.of.name else self.of.name
        if old.ranks != new.ranks:
            name = name.replace(" to other ranks", "")
            name += f", {ranks_in_words(old.members)} → {ranks_in_words(new.members)}"
        groups = {}
        for rank, sent in enumerate(self.sent):
            if sent >= 0.02:
                groups.setdefault(f"{sent:.2f}", []).append(rank)
        lines, formula = [name], self.formula
        for amount, ranks in groups.items():
            each = len(ranks) == len(self.sent)
            verb = "sends" if each or len(ranks) == 1 else "each send"
            lines.append(f"{'each rank' if each else ranks_in_words(ranks)} {verb} {amount} × {of}")
            if each and formula is not None and abs(float(amount) - formula) > 0.02 * formula + 0.011:
                lines.append(f"({formula:.2f} by the formula)")
        return lines

    @property
    def formula(self):
        """What each rank sends by the formula, where all send the same; else None."""
        by_rank = theory.Boxing(self.of.shape, self.of.layout, self.new.layout).by_rank or {}
        amounts = set(by_rank.values())
        return amounts.pop() / np.prod(self.of.shape) if len(amounts) == 1 else None


def ranks_in_words(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


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
            elif step["what"] == "to_global" and bytes_of(whole["inputs"][0]) >= SMALL:
                self.to_global(step, [one / bytes_of(whole["inputs"][0]) for one in sent])
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
                self.items.append(Move(part, new, [amount / bytes_of(large) for amount in sent], backward=True))
