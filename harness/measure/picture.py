"""What a script does, as a list of what to draw: its tensors in order, each behind the moves that made it."""

import re
from dataclasses import dataclass
from typing import Optional

import numpy as np

from harness.measure import theory

# The signatures of a matmul of two matrices: SBP of x, of w -> of the product. J. Yuan et al., arXiv:2110.15032.
MATMUL = {("B", "B"): "B", ("S(0)", "B"): "S(0)", ("B", "S(1)"): "S(1)", ("S(1)", "S(0)"): "P"}
MATMUL.update({("P", "B"): "P", ("B", "P"): "P"})

EXACT = 1e6  # bytes of a tensor below which OneFlow's own messages drown those of its content


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
    times: int = 1  # how often it was made; `sent` is of the first time
    source: tuple = ()  # what it is made of, and how

    @property
    def key(self):
        """What a move has in common with those that are the same move, made again."""
        return (*self.source, self.line, self.change, self.collective, self.size)

    @property
    def is_exact(self):
        """Whether OneFlow's own messages are little beside what was measured."""
        return max([self.size, *(boxing.size for boxing in self.boxings or [])]) >= EXACT

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
    """The Tensors and Moves of a script in order, from what harness.ledger.measure_script returned on each rank.

    A move that is made again is one Move with `times`. What a script returned by name is all drawn; of the tensors that
    were only seen, those that look like one before are not.
    """
    first = results[0]
    steps, names, tensors = first["steps"], first["names"], first["tensors"]
    made = [{output["id"] for output in step["outputs"]} for step in steps]
    weights = sum(bytes_of(tensor) for tensor in tensors if tensor["name"][:4] == "new ")
    known, moves, same = (
        {},
        [],
        [],
    )  # by key: (step, Move); of each step: its new Moves; the first step that is the same
    for number, step in enumerate(steps):
        sent = [result["steps"][number]["sent"] for result in results]
        own = moves_of(step, sent, names, weights)
        before = [known.setdefault(move.key, (number, move)) for move in own]
        moves.append([move for move, (_, one) in zip(own, before) if one is move])
        same.append(number if moves[-1] else before[0][0])
        for move, (_, one) in zip(own, before):
            one.times += move.times if one is not move else 0

    def is_made(tensor):
        return tensor["after"] > 0 and tensor["id"] in made[tensor["after"] - 1]

    def place(tensor):
        """The number of steps before a tensor."""
        return same[tensor["after"] - 1] + 1 if is_made(tensor) else tensor["after"]

    items, drawn, shown = [], set(), 0
    for tensor in sorted(tensors, key=place):
        for number in range(shown, place(tensor)):
            items += moves[number]
        shown = max(shown, place(tensor))
        item = tensor_of(tensor["name"], tensor, len(results))
        is_new = place(tensor) == tensor["after"] if is_made(tensor) else repr(item) not in drawn
        if first["returned"] or is_new:
            items.append(item)
            drawn.add(repr(item))
    return items + [move for own in moves[shown:] for move in own]


def bytes_of(tensor):
    return tensor["item"] * int(np.prod(tensor["shape"]))


def tensor_of(name, tensor, world_size):
    whole = [(0, size) for size in tensor["shape"]]
    if tensor["sbp"] == "local":
        return Tensor(name, tensor["shape"], "local", [], [whole] * world_size)
    layout = theory.Layout(tensor["sbp"], tensor["ranks"])
    blocks = [layout.block(tensor["shape"], rank) if rank in layout.members else None for rank in range(world_size)]
    return Tensor(name, tensor["shape"], tensor["sbp"], tensor["ranks"], blocks)


def moves_of(step, sent, names, weights):
    """The Moves of one step: one, or for the call of a graph one for the call and one for each boxing in it.

    weights: the bytes of all weights that are trained, where the script tells; else those of this step count.
    """
    inputs, outputs = step["inputs"], step["outputs"]
    called = [names.get(tensor["id"], "·") for tensor in inputs]
    looks = [f"{tensor['sbp']} {tensor['ranks']} {tensor['shape']}" for tensor in inputs]
    common = {"line": step["line"], "sent": sent, "times": step["times"], "source": (step["what"], *called, *looks)}
    if "boxings" in step:
        boxings = [Boxing(e["shape"], e["item"], e["old"], e["new"]) for e in step["boxings"]]
        size = max((boxing.size for boxing in boxings), default=0)
        collectives = ", ".join(dict.fromkeys(boxing.collective for boxing in boxings)) or "nothing"
        if weights or step["weights"]:  # it trains
            size, collectives = weights or step["weights"], "a whole step"
        moves = [Move(step["what"], size=size, boxings=boxings, collective=collectives, **common)]
        for edge, one in zip(step["boxings"], boxings):
            what = f"{short(edge['producer'])} -> {short(edge['consumer'])}"
            inner = {**common, "line": 0, "sent": None, "source": (step["what"], what, len(moves))}
            moves.append(
                Move(what, size=one.size, boxings=[one], change=one.change, collective=one.collective, **inner)
            )
        return moves
    if step["what"] == "backward":  # of which only the bytes are known, in units of all weights
        size = weights or sum(map(bytes_of, outputs))
        return [Move("backward", size=size, boxings=None, collective="backward", **common)]
    x, size = inputs[0], bytes_of(inputs[0])
    old = (x["sbp"], x["ranks"])
    if step["what"] == "matmul":
        product = names.get(outputs[0]["id"], "·")
        what = f"{called[0]} @ {called[1]}" + (f" = {product}" if product != "·" else "")
        boxings = rebox(inputs, outputs[0], step["transposed"])
        collective, boxings = in_words(boxings), boxings and [one for _, one in boxings]
        return [Move(what, size=size, boxings=boxings, collective=collective, **common)]
    if step["what"] != "to_global":  # the value is read, on every rank
        one = Boxing(x["shape"], x["item"], old, ("B", list(range(len(sent)))))
        what = step["what"].format(called[0])
        return [boxed(what, one, common)]
    [out] = outputs
    name = names.get(out["id"], "·")
    what = step["text"] if called[0] == name == "·" else f"{called[0]} -> {name}"
    if x["sbp"] == "local":
        change = f"local -> {out['sbp']}"
        return [Move(what, size=size, boxings=None, change=change, collective="local to global", **common)]
    one = Boxing(x["shape"], x["item"], old, (out["sbp"], out["ranks"]))
    return [boxed(what, one, common)]


def boxed(what, one, common):
    """The Move of one tensor."""
    return Move(what, size=one.size, boxings=[one], change=one.change, collective=one.collective, **common)


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
