"""What a forward pass did, from two traced runs of a recipe: its matmuls and the moves between them, to be drawn."""

import re
from dataclasses import dataclass

import numpy as np

from harness.measure import theory
from harness.report.svg import colour_of, wide

SMALL = 1000  # bytes of a tensor, such as a loss, that is not drawn
WORDS = {"B": "broadcast", "P": "partial_sum", "S(0)": "split(0)", "S(1)": "split(1)"}


@dataclass
class Tensor:
    """One tensor of an equation. number: what tells it from others in the run."""

    number: int
    name: str
    colour: str
    shape: tuple
    layout: theory.Layout

    @property
    def partial(self):
        return "P" in self.layout.axes

    @property
    def sbp(self):
        return WORDS[self.layout.sbp] if len(self.layout.axes) == 1 else self.layout.sbp

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


@dataclass
class Move:
    """A tensor that goes to another layout. sent, formula: what each rank sends, in units of the tensor."""

    old: Tensor
    new: Tensor
    sent: list
    formula: float = None  # where all ranks send the same

    def __post_init__(self):
        old, new = self.old.layout, self.new.layout
        self.collective = theory.collective(old, new)
        one = theory.boxing(self.old.shape, old, new)
        if one.by_rank and len(set(one.by_rank.values())) == 1:
            self.formula = one.by_rank[old.members[0]] / np.prod(self.old.shape)


def steps_of(small, large):
    """The Products and Moves of a forward pass, the moves behind the product that they are of, and then the Moves of
    gradients in the backward pass.

    small, large: what `ledger.measure` traced, once small enough to draw, and once so large that what was sent for a
    tensor is its content.
    """
    names, seen, items = small[0]["names"], {}, []

    def tensor(one, name, colour=None):
        layout = theory.Layout(one["sbp"], one["ranks"])
        colour = "partial" if "P" in layout.axes else colour or colour_of(name)
        return seen.setdefault(one["id"], Tensor(one["id"], name, colour, one["shape"], layout))

    for number, step in enumerate(small[0]["steps"]):
        inputs, outputs, whole = step["inputs"], step["outputs"], large[0]["steps"][number]
        called = [names.get(one["id"], "·") for one in inputs + outputs]
        sent = [result["steps"][number]["sent"] for result in large]
        if step["what"] == "matmul":
            turned = re.search(r"(\w+)\.transpose\(", step["text"])
            called[0] = f"{turned.group(1)}.T" if turned else called[0]
            x, w = (seen.get(one["id"]) or tensor(one, name) for one, name in zip(inputs, called))
            name = called[2] if called[2] not in ("·", called[0]) else f"{x.name} @ {w.name}"
            items.append(Product([x, w, tensor(outputs[0], name)], step["text"]))
        elif step["what"] == "to_global" and size(whole["inputs"][0]) >= SMALL and inputs[0]["sbp"] != "local":
            old = seen.get(inputs[0]["id"]) or tensor(inputs[0], called[0])
            if theory.Layout(outputs[0]["sbp"], outputs[0]["ranks"]) == old.layout:
                seen[outputs[0]["id"]] = old
                continue
            name = old.name if called[1] in ("·", called[0]) else called[1]
            new = tensor(outputs[0], name, "out" if old.colour in ("out", "partial") else None)
            after = [k for k, item in enumerate(items) if old in (getattr(item, "tensors", [None])[-1], last(item))]
            items.insert(after[-1] + 1, Move(old, new, [one / size(whole["inputs"][0]) for one in sent]))
        elif step["what"] == "backward":
            for name, one, large_one in zip(called[1:], outputs, whole["outputs"]):
                if one["sbp"] == "B":  # each rank's own is a part of it
                    new = tensor(one, name)
                    part = Tensor(0, name, new.colour, new.shape, theory.Layout("P", one["ranks"]))
                    items.append(Move(part, new, [amount / size(large_one) for amount in sent]))
    return items


def last(item):
    """The tensor that a Move is of."""
    return item.old if isinstance(item, Move) else None


def size(one):
    return one["item"] * int(np.prod(one["shape"]))
