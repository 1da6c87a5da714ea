"""What a recipe does, as a list of what to draw: its tensors in order, each behind the moves that made it."""

import re
from dataclasses import dataclass
from typing import Optional

import numpy as np

from harness import theory

# The signatures of a matmul of two matrices: SBP of x, of w -> of the product. J. Yuan et al., arXiv:2110.15032.
MATMUL = {("B", "B"): "B", ("S(0)", "B"): "S(0)", ("B", "S(1)"): "S(1)", ("S(1)", "S(0)"): "P"}
MATMUL.update({("P", "B"): "P", ("B", "P"): "P"})


@dataclass
class Tensor:
    """A tensor and, by rank, the (start, stop) of each dimension that the rank holds; None where it holds nothing."""

    name: str
    shape: tuple
    sbp: str
    ranks: list
    blocks: list

    @property
    def partial(self):
        return "P" in self.sbp.split(", ")


@dataclass
class Boxing:
    """One tensor that moves from a layout, (SBP, ranks), to another. item: bytes of an element."""

    shape: tuple
    item: int
    old: tuple
    new: tuple

    def __post_init__(self):
        theirs = theory.boxing(self.shape, theory.Layout(*self.old), theory.Layout(*self.new))
        self.collective = theirs.collective
        self.total = None if theirs.total is None else self.item * theirs.total
        self.by_rank = theirs.by_rank and {rank: self.item * sent for rank, sent in theirs.by_rank.items()}

    @property
    def change(self):
        (old, ranks), (new, new_ranks) = self.old, self.new
        return f"{old} -> {new}" if ranks == new_ranks else f"{old} on {ranks} -> {new} on {new_ranks}"

    @property
    def size(self):
        return self.item * int(np.prod(self.shape))


@dataclass
class Move:
    """A step that can move data. `boxings` is None where it is not known what had to move."""

    what: str  # such as "x @ w" or "partial -> out"
    line: int  # of the script; 0 if it is not one of its own
    size: int  # bytes of the tensor that moves
    sent: Optional[list]  # bytes that left each rank; None where a graph does not tell it step by step
    boxings: Optional[list]
    change: str = ""  # such as "P -> B"
    collective: str = "nothing"

    @property
    def formula(self):
        """Bytes that leave all ranks together, by theory.py."""
        totals = [None] if self.boxings is None else [boxing.total for boxing in self.boxings]
        return None if None in totals else sum(totals)

    @property
    def by_rank(self):
        """Bytes that leave each rank, where the formulas say it."""
        if self.boxings is None or any(boxing.by_rank is None for boxing in self.boxings):
            return None
        ranks = {rank for boxing in self.boxings for rank in boxing.by_rank}
        return {rank: sum(boxing.by_rank.get(rank, 0.0) for boxing in self.boxings) for rank in ranks}


def drawing(results):
    """The Tensors and Moves of a recipe in order, from what harness.ledger.measure returned on each rank."""
    first, items = results[0], []
    names = {tensor["id"]: name for name, tensor in first["tensors"].items()}
    steps = [
        (step, [result["steps"][number]["sent"] for result in results]) for number, step in enumerate(first["steps"])
    ]
    weights = sum(
        one["item"] * int(np.prod(one["shape"])) for name, one in first["tensors"].items() if name[:4] == "new "
    )
    for step, _ in steps:
        step["weights"] = weights
    made = [[names.get(output["id"]) for output in step["outputs"]] for step, _ in steps]
    shown = 0
    for name, tensor in first["tensors"].items():
        maker = next((k for k in range(shown, len(steps)) if name in made[k] and "boxings" not in steps[k][0]), None)
        if maker is not None:
            items += [move for step, sent in steps[shown : maker + 1] for move in moves_of(step, sent, names)]
            shown = maker + 1
        items.append(tensor_of(name, tensor, len(results)))
    return items + [move for step, sent in steps[shown:] for move in moves_of(step, sent, names)]


def tensor_of(name, tensor, world_size):
    whole = [(0, size) for size in tensor["shape"]]
    if tensor["sbp"] == "local":
        return Tensor(name, tensor["shape"], "local", [], [whole] * world_size)
    layout = theory.Layout(tensor["sbp"], tensor["ranks"])
    blocks = [layout.block(tensor["shape"], rank) if rank in layout.members else None for rank in range(world_size)]
    return Tensor(name, tensor["shape"], tensor["sbp"], tensor["ranks"], blocks)


def moves_of(step, sent, names):
    """The Moves of one step of the ledger: one, or for the call of a graph one for the call and one for each boxing."""
    line = step["line"]
    if "boxings" in step:
        boxings = [Boxing(e["shape"], e["item"], e["old"], e["new"]) for e in step["boxings"]]
        size = max((boxing.size for boxing in boxings), default=0)
        collectives = ", ".join(dict.fromkeys(boxing.collective for boxing in boxings)) or "nothing"
        if step["weights"]:  # it trains
            size, collectives = step["weights"], "a whole step"
        moves = [Move(step["what"], line, size, sent, boxings, collective=collectives)]
        for edge, one in zip(step["boxings"], boxings):
            what = f"{short(edge['producer'])} -> {short(edge['consumer'])}"
            moves.append(Move(what, 0, one.size, None, [one], one.change, one.collective))
        return moves
    if step["what"] == "backward":  # of which only the bytes are known, in units of all weights
        return [Move("backward", line, step["weights"], sent, None, collective="backward")]
    inputs, [out, *_] = step["inputs"], step["outputs"]
    called = [names.get(tensor["id"], "·") for tensor in (*inputs, out)]
    x, size = inputs[0], int(np.prod(inputs[0]["shape"])) * inputs[0]["item"]
    if step["what"] == "matmul":
        what = f"{called[0]} @ {called[1]}" + (f" = {called[2]}" if called[2] != "·" else "")
        boxings = rebox(inputs, out, step["transposed"])
        return [Move(what, line, size, sent, boxings and [one for _, one in boxings], collective=in_words(boxings))]
    what = f"{called[0]} -> {called[1]}" if called[:2] != ["·", "·"] else step["text"]
    if x["sbp"] == "local":
        return [Move(what, line, size, sent, None, f"local -> {out['sbp']}", "local to global")]
    one = Boxing(x["shape"], x["item"], (x["sbp"], x["ranks"]), (out["sbp"], out["ranks"]))
    return [Move(what, line, size, sent, [one], one.change, one.collective)]


def short(op):
    """The name of an op in a graph, without what OneFlow puts around it."""
    if "_output." in op or "_input." in op:
        which = "output" if "_output." in op else "input"
        return f"{which} {op.split('.')[-1].split('_')[0]}"
    return re.sub(r"^module[.-]|-\d+$", "", op).replace("hierarchical_parallel_cast", "to_global")


def rebox(inputs, out, transposed=(False, False)):
    """What OneFlow had to move for a matmul of two matrices with this result: [("x" or "w", Boxing)].

    That way of all that lead to the SBP of the result which costs least. None if it is not known: for other tensors
    than matrices, on a mesh, or where x or w is transposed by the matmul, unless the pair is a legal signature.
    """
    x, w = inputs[:2]
    if "local" in (x["sbp"], w["sbp"]):
        return []
    if len(x["shape"]) != 2 or len(w["shape"]) != 2 or x["ranks"] != w["ranks"]:
        return None
    turn = {ord("0"): "1", ord("1"): "0"}
    axes = [(t["sbp"].translate(turn) if turned else t["sbp"]).split(", ") for t, turned in zip((x, w), transposed)]
    if all(pair in MATMUL for pair in zip(*axes)):
        return []
    if len(axes[0]) > 1 or any(transposed):
        return None
    ways = []
    for sbps in (sbps for sbps, product in MATMUL.items() if product == out["sbp"]):
        moves = [(name, tensor, sbp) for name, tensor, sbp in zip("xw", (x, w), sbps) if tensor["sbp"] != sbp]
        ways.append([(name, moved(tensor, sbp)) for name, tensor, sbp in moves])
    return min(ways, key=lambda way: (sum(one.total for _, one in way), len(way)))


def moved(tensor, sbp):
    ranks = tensor["ranks"]
    return Boxing(tensor["shape"], tensor["item"], (tensor["sbp"], ranks), (sbp, ranks))


def in_words(boxings):
    """What `rebox` found, such as "w S(0) -> B: all-gather"."""
    if boxings is None:
        return "not known"
    return ", ".join(f"{name} {one.change}: {one.collective}" for name, one in boxings) or "nothing"
