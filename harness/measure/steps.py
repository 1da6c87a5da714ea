"""What a script did, as a list of its tensors and moves in order: what `show`, `bytes` and the pictures present."""

import re
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from harness.measure import theory
from harness.measure.sbp import Layout

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
class Move:
    """A step that can move data. `boxings` is None where it is not known what had to move."""

    what: str  # such as "x @ w" or "partial -> out"
    line: int  # of the script; 0 if it is not one of its own
    sent: Optional[list]  # bytes that left each rank; None of a move inside a graph
    times: int = 1  # how often it was made; `sent` is of the first time
    source: tuple = ()  # the inputs and the kind of the step
    size: int = 0  # bytes of the tensor that moves
    boxings: Optional[list] = None
    change: str = ""  # such as "P -> B"
    collective: str = "nothing"

    @property
    def key(self):
        """Equal for moves that are the same one, made again."""
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

    def of(self, boxing, **fields):
        """This move as the move of one tensor."""
        fields.update(size=boxing.size, boxings=[boxing], change=boxing.change, collective=boxing.collective)
        return replace(self, **fields)


def tensors_and_moves(results):
    """The Tensors and Moves of a script in order, from what script.measure_script returned on each rank.

    A move that is made again is one Move with `times`. All tensors that a script returned by name are in the list. Of
    those that were only seen, the ones that look like an earlier one are not.
    """
    first = results[0]
    steps, tensors = first["steps"], first["tensors"]
    weights = sum(bytes_of(tensor) for tensor in tensors if tensor["name"].startswith("new "))
    known, new_moves, same_as = {}, [], []  # the last two by step: its moves without repeats; the first step like it
    for number, step in enumerate(steps):
        sent = [result["steps"][number]["sent"] for result in results]
        moves = moves_of(step, sent, first["names"], weights)
        firsts = [known.setdefault(move.key, (number, move)) for move in moves]
        for move, (_, one) in zip(moves, firsts):
            one.times += move.times if one is not move else 0
        new_moves.append([move for move, (_, one) in zip(moves, firsts) if one is move])
        same_as.append(number if new_moves[-1] else firsts[0][0])

    places = []  # (number of steps before the tensor, whether a step made it, tensor)
    for tensor in tensors:
        after = tensor["after"]
        is_output = after > 0 and tensor["id"] in [one["id"] for one in steps[after - 1]["outputs"]]
        places.append((same_as[after - 1] + 1 if is_output else after, is_output, tensor))
    items, done, shown = [], 0, set()
    for place, is_output, tensor in sorted(places, key=lambda one: one[0]):
        items += [move for moves in new_moves[done:place] for move in moves]
        done = max(done, place)
        layout, shape = Layout(tensor["sbp"], tensor["ranks"]), tensor["shape"]
        item = Tensor(tensor["name"], shape, *layout, [layout.block(shape, rank) for rank in range(len(results))])
        is_new = place == tensor["after"] if is_output else repr(item) not in shown
        if first["returned"] or is_new:
            items.append(item)
            shown.add(repr(item))
    return items + [move for moves in new_moves[done:] for move in moves]


def bytes_of(tensor):
    return tensor["item"] * int(np.prod(tensor["shape"]))


def moves_of(step, sent, names, weights):
    """The Moves of one step: one, or for the call of a graph one for the call and one for each boxing in it.

    weights: the bytes of all weights that are trained, if the script returned them; else those of this step count.
    """
    kind, inputs, outputs = step["what"], step["inputs"], step["outputs"]
    called = [names.get(tensor["id"], "·") for tensor in inputs]
    looks = [f"{tensor['sbp']} {tensor['ranks']} {tensor['shape']}" for tensor in inputs]
    move = Move(kind, step["line"], sent, step["times"], (kind, *called, *looks))
    if "boxings" in step:
        return moves_of_graph(step, move, weights or step["weights"])
    if kind == "backward":  # only the bytes are known, in units of all weights
        return [replace(move, size=weights or sum(map(bytes_of, outputs)), collective="backward")]
    x, size = inputs[0], bytes_of(inputs[0])
    if kind == "matmul":
        product = names.get(outputs[0]["id"], "·")
        what = f"{called[0]} @ {called[1]}" + (f" = {product}" if product != "·" else "")
        boxings = theory.matmul_boxings(inputs, outputs[0], step["transposed"])
        collective, boxings = theory.boxings_in_words(boxings), boxings and [one for _, one in boxings]
        return [replace(move, what=what, size=size, boxings=boxings, collective=collective)]
    if kind != "to_global":  # the value is read, on every rank
        return [move.of(theory.boxing_to(x, "B", list(range(len(sent)))), what=kind.format(called[0]))]
    [out] = outputs
    name = names.get(out["id"], "·")
    what = step["text"] if called[0] == name == "·" else f"{called[0]} -> {name}"
    if x["sbp"] == "local":
        return [replace(move, what=what, size=size, change=f"local -> {out['sbp']}", collective="local to global")]
    return [move.of(theory.boxing_to(x, out["sbp"], out["ranks"]), what=what)]


def moves_of_graph(step, call, weights):
    """The Moves of a graph's call; weights: the bytes of all that it trains, 0 if it does not train."""
    boxings = [theory.Boxing(one["shape"], one["old"], one["new"], one["item"]) for one in step["boxings"]]
    size = weights or max((boxing.size for boxing in boxings), default=0)
    collectives = ", ".join(dict.fromkeys(boxing.collective for boxing in boxings)) or "nothing"
    moves = [replace(call, size=size, boxings=boxings, collective="a whole step" if weights else collectives)]
    for edge, boxing in zip(step["boxings"], boxings):
        what = f"{op_in_words(edge['producer'])} -> {op_in_words(edge['consumer'])}"
        moves.append(call.of(boxing, what=what, line=0, sent=None, source=(step["what"], what, len(moves))))
    return moves


def op_in_words(op):
    """The name of an op in a graph, without what OneFlow puts around it."""
    if "_output." in op or "_input." in op:
        which = "output" if "_output." in op else "input"
        return f"{which} {op.split('.')[-1].split('_')[0]}"
    return re.sub(r"^module[.-]|-\d+$", "", op).replace("hierarchical_parallel_cast", "to_global")
