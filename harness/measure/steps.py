"""What a script did, as a list of its tensors and moves in order: what `show`, `bytes` and the atlas present."""

import re
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from harness.measure import theory
from harness.measure.events import layout

IMPLICIT, BY_LAYER = "OneFlow moved an operand", "of it"  # collectives of which only the bytes are known
NOISE = 8_000  # bytes that OneFlow's own messages may take in a layer
EXACT = 1e6  # bytes of a tensor below which OneFlow's own messages drown those of its content
READS = {"numpy": "{}.numpy()", "item": "{}.item()", "__repr__": "print({})"}  # they gather the value on every rank


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

    A move that is made again is one Move with `times`; a tensor that looks like an earlier one is left out.
    """
    events, names = results[0]["events"], results[0]["names"]
    known, new_moves, same_as = {}, [], []  # the last two by event: its moves without repeats; the first event like it
    for number, event in enumerate(events):
        moves = moves_of(event, [result["events"][number] for result in results], names)
        firsts = [known.setdefault(move.key, (number, move)) for move in moves]
        for move, (_, one) in zip(moves, firsts):
            one.times += move.times if one is not move else 0
        new_moves.append([move for move, (_, one) in zip(moves, firsts) if one is move])
        same_as.append(number if new_moves[-1] or not firsts else firsts[0][0])

    places = []  # (number of events before the tensor, whether one made it, tensor)
    for tensor in results[0]["tensors"]:
        after = tensor["after"]
        is_output = after > 0 and tensor["id"] in [one["id"] for one in events[after - 1].outputs]
        places.append((same_as[after - 1] + 1 if is_output else after, is_output, tensor))
    items, done, shown = [], 0, set()
    for place, is_output, tensor in sorted(places, key=lambda one: one[0]):
        items += [move for moves in new_moves[done:place] for move in moves]
        done = max(done, place)
        where, shape = layout(tensor), tensor["shape"]
        item = Tensor(tensor["name"], shape, *where, [where.block(shape, rank) for rank in range(len(results))])
        if place == tensor["after"] if is_output else repr(item) not in shown:
            items.append(item)
            shown.add(repr(item))
    return items + [move for moves in new_moves[done:] for move in moves]


def bytes_of(tensor):
    return tensor["item"] * int(np.prod(tensor["shape"]))


def moves_of(event, by_rank, names):
    """The Moves of one event: one, for the call of a graph also one for each boxing in it, for backward for each layer.

    by_rank: the same event on each rank.
    """
    kind, inputs, outputs = event.kind, event.inputs, event.outputs
    sent = [one.sent for one in by_rank]
    called = [names.get(tensor["id"], "·") for tensor in inputs]
    looks = [f"{tensor['sbp']} {tensor['ranks']} {tensor['shape']}" for tensor in inputs]
    where = [event.layer] if event.layer else called  # in a layer tensors have a name the first time only
    move = Move(kind, event.line, sent, event.times, (kind, event.name, *where, *looks))
    if kind == "graph":
        return moves_of_graph(event, replace(move, what=f"a call of {event.name}"))
    if kind == "backward":  # only the bytes are known, in units of all weights
        move = replace(move, size=sum(map(bytes_of, outputs)), collective="backward")
        return [move, *moves_of_layers(move, [one.facts["by_layer"] for one in by_rank])]
    if kind == "layer":
        move.size = max(map(bytes_of, inputs + outputs))
        change = f"{inputs[0]['sbp']} -> {outputs[0]['sbp']}" if outputs else inputs[0]["sbp"]
        fields = {"what": f"inside {event.name}", "change": change, "collective": IMPLICIT}
        return [replace(move, **fields)] if has_moved(move) else []
    if kind == "module to_global":
        return [move_of_module(event, move)]
    x, size = inputs[0], bytes_of(inputs[0])
    if kind == "matmul":
        product = names.get(outputs[0]["id"], "·")
        what = f"{called[0]} @ {called[1]}" + (f" = {product}" if product != "·" else "")
        what = f"{event.layer}: matmul" if event.layer and "·" in called else what
        boxings = theory.matmul_boxings(inputs, outputs[0], event.facts["transposed"])
        operands = {"x": called[0].replace("·", "left operand"), "w": called[1].replace("·", "right operand")}
        collective, boxings = theory.boxings_in_words(boxings, operands), boxings and [one for _, one in boxings]
        return [replace(move, what=what, size=size, boxings=boxings, collective=collective)]
    if kind == "read":  # on every rank
        return [move.of(theory.boxing_to(x, "B", list(range(len(sent)))), what=READS[event.name].format(called[0]))]
    [out] = outputs
    name = names.get(out["id"], "·")
    what = f"{called[0]} -> {name}"
    if called[0] == name == "·" or (event.layer and (called[0] == name or "·" in (called[0], name))):
        what = event.layer or event.text
    if x["sbp"] == "local":
        return [replace(move, what=what, size=size, change=f"local -> {out['sbp']}", collective="local to global")]
    return [move.of(theory.boxing_to(x, out["sbp"], out["ranks"]), what=what)]


def has_moved(move):
    """Whether a layer sent more than OneFlow's own messages: an operand is at least a part of what it takes."""
    return max(move.sent) >= max(0.1 * move.size, NOISE)


def moves_of_layers(backward, by_rank):
    """The Moves of backward by layer, from the [path, bytes] that each rank counted."""
    moves = []
    for parts in zip(*by_rank):
        sent = [count for _, count in parts]
        if max(sent) >= max(0.02 * max(backward.sent), NOISE):
            source = (*backward.source, parts[0][0])
            moves.append(
                replace(backward, what=f"  backward of {parts[0][0]}", sent=sent, source=source, collective=BY_LAYER)
            )
    return moves


def move_of_module(event, move):
    """The Move of all parameters and buffers of a module, which one call moves."""
    pairs = list(zip(event.inputs, event.outputs))
    changes = {f"{old['sbp']} -> {new['sbp']}" for old, new in pairs}
    change = changes.pop() if len(changes) == 1 else ""
    fields = {"what": f"{event.name}.to_global", "change": change, "size": sum(bytes_of(old) for old, _ in pairs)}
    if any(old["sbp"] == "local" for old, _ in pairs):
        return replace(move, collective="local to global", **fields)
    boxings = [theory.boxing_to(old, new["sbp"], new["ranks"]) for old, new in pairs]
    collectives = ", ".join(dict.fromkeys(one.collective for one in boxings if one.collective != "nothing"))
    return replace(move, boxings=boxings, collective=collectives or "nothing", **fields)


def moves_of_graph(event, call):
    """The Move of a graph's call, and that of each boxing in it."""
    edges, weights = event.facts["boxings"], event.facts["weights"]  # no weights if it does not train
    boxings = [theory.Boxing(one["shape"], one["old"], one["new"], one["item"]) for one in edges]
    size = weights or max((boxing.size for boxing in boxings), default=0)
    collectives = ", ".join(dict.fromkeys(boxing.collective for boxing in boxings)) or "nothing"
    moves = [replace(call, size=size, boxings=boxings, collective="a whole step" if weights else collectives)]
    micro_batches = event.facts["micro_batches"]
    if micro_batches > 1:  # the graph tells what moves for one of them, and not which moves come once
        moves[0].boxings, moves[0].collective = None, f"a whole step of {micro_batches} micro-batches"
    for edge, boxing in zip(edges, boxings):
        what = f"{op_in_words(edge['producer'])} -> {op_in_words(edge['consumer'])}"
        moves.append(call.of(boxing, what=what, line=0, sent=None, source=(event.name, what, len(moves))))
    return moves


def op_in_words(op):
    """The name of an op in a graph, without what OneFlow puts around it."""
    if "_output." in op or "_input." in op:
        which = "output" if "_output." in op else "input"
        return f"{which} {op.split('.')[-1].split('_')[0]}"
    return re.sub(r"^module[.-]|-\d+$", "", op).replace("hierarchical_parallel_cast", "to_global")
