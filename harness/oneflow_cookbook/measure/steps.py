"""The tensors and moves of a script in order, for `show` and `bytes`."""

import re
from dataclasses import dataclass, field, replace
from typing import Optional

import numpy as np

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.events import GRADIENT, ONEFLOW, SCRIPT, UNNAMED, Event, layout

# In place of a collective, where only the bytes are known:
IMPLICIT, BY_PART = "OneFlow moved an operand", "part of backward"
GRADIENT_OF, BACKWARD_OF = "  gradient of {}", "  backward of {}"  # of a parameter; of a layer or another tensor
MADE_GLOBAL = "local to global"  # in place of a collective, where a local tensor becomes global
COMPARES = "OneFlow compares the ranks' copies"  # the same for flow.tensor
NOISE = 8_000  # bytes of OneFlow's own messages in a layer, at most
EXACT = 1e6  # bytes of a tensor; for smaller tensors, a large part of what is measured is OneFlow's own messages
READS = {"numpy": "{}.numpy()", "item": "{}.item()", "__repr__": "print({})"}  # function -> as the script calls it


@dataclass
class Tensor:
    """A tensor. blocks: for each rank [(start, stop)] of each dimension that it holds, None if it holds nothing."""

    name: str
    shape: tuple
    sbp: str
    ranks: list
    blocks: list

    @property
    def partial(self):
        """Whether ranks hold addends of it."""
        return "P" in self.sbp.split(", ")


@dataclass
class Move:
    """A step that can move data."""

    name: str  # such as "x @ w" or "partial -> out"
    line: int  # of the script; 0 outside of it
    sent: Optional[list]  # bytes that each rank sent; None for a move inside a graph
    times: int = 1  # how often the script made it; `sent` is of the first time
    source: tuple = ()  # identifies the step: its kind and its inputs
    size: int = 0  # bytes of the tensor that moves
    boxings: Optional[list] = None  # what moves; None if that is not known
    change: str = ""  # such as "P -> B"
    collective: str = "nothing"
    rest: int = 0  # of a backward: bytes that all ranks sent for anything but the gradients of parameters
    why: str = ""  # SCRIPT, GRADIENT or ONEFLOW; "" where the step is made of several moves, or makes a tensor global
    equal: int = 1  # number of equal blocks whose move this is

    @property
    def key(self):
        """Equal for two moves if the second is a repetition of the first."""
        return (*self.source, self.line, self.change, self.collective, self.size)

    @property
    def is_exact(self):
        """Whether OneFlow's own messages are a small part of what was measured."""
        return max([self.size, *(boxing.size for boxing in self.boxings or [])]) >= EXACT

    @property
    def formula(self):
        """Bytes that all ranks together send, by theory.py; None if not known."""
        if self.boxings is None or any(boxing.total is None for boxing in self.boxings):
            return None
        return sum(boxing.total for boxing in self.boxings)

    @property
    def sends_nothing(self):
        """Whether nothing is sent, by the formula; where there is none, by the measured bytes."""
        if self.formula is None:
            return self.sent is not None and not any(self.sent)
        return not self.formula and not (self.is_exact and max(self.sent or [0]) >= 0.02 * self.size)

    @property
    def is_number(self):
        """Whether it is a single number that OneFlow moves inside a graph, such as the learning rate."""
        return self.sent is None and self.why != SCRIPT and self.size <= 8

    @property
    def total(self):
        """Bytes that all ranks together send: by the formula, or as measured if there is none, or if that is exact.

        Of a backward only its rest, as the gradients of parameters are moves of their own.
        """
        if self.collective == "backward":
            return self.rest
        measured = self.formula is None or self.sent is not None and self.is_exact
        return sum(self.sent or [0]) if measured else self.formula

    @property
    def by_rank(self):
        """{rank: bytes that it sends}, None if the formulas do not say which rank sends."""
        if self.boxings is None or any(boxing.by_rank is None for boxing in self.boxings):
            return None
        ranks = {rank for boxing in self.boxings for rank in boxing.by_rank}
        return {rank: sum(boxing.by_rank.get(rank, 0.0) for boxing in self.boxings) for rank in ranks}

    @property
    def share(self):
        """Bytes that each rank sends by the formula, if a tensor stays on its ranks and all send as much; else None."""
        boxings = self.boxings or []
        if self.formula is None or not boxings or any(boxing.old.ranks != boxing.new.ranks for boxing in boxings):
            return None
        ranks = {rank for boxing in boxings for rank in boxing.old.members}
        by_rank = self.by_rank or dict.fromkeys(ranks, self.formula / len(ranks))  # on a mesh the ranks do the same
        return min(by_rank.values()) if len(set(by_rank.values())) == 1 else None

    def of(self, boxing, **fields):
        """This move as that of a single Boxing, with more fields changed."""
        fields.update(size=boxing.size, boxings=[boxing], change=boxing.change, collective=boxing.collective)
        return replace(self, **fields)


@dataclass
class Step:
    """What an event did, on all ranks together; the first Step is what a script has before its first event."""

    event: Event = field(default_factory=lambda: Event("", ""))
    moves: list = field(default_factory=list)  # those that are new
    repeats: bool = False  # whether it only repeats earlier moves
    moves_a_tensor: bool = False
    tensors: list = field(default_factory=list)  # to show after it


def tensors_and_moves(results):
    """The Tensors and Moves of a script in order. results: of script.measure_script on each rank.

    A repeated move is a single Move with `times`; a tensor that looks like an earlier tensor is left out.
    """
    steps = steps_of(results)
    add_tensors(steps, results[0]["tensors"], len(results))
    return [item for step in steps for item in step.moves + step.tensors]


def steps_of(results):
    """The Steps of a script, without their tensors."""
    first_moves, steps = {}, [Step()]
    for events in zip(*(result["events"] for result in results)):
        moves, new = moves_of(events, results[0]["names"]), []
        for move in moves:
            first = first_moves.setdefault(move.key, move)
            if first is move:
                new.append(move)
            else:
                first.times += move.times
        repeats = bool(moves) and not new
        steps.append(Step(events[0], new, repeats, moves_a_tensor=any(map(moves_tensor, moves))))
    return steps


def add_tensors(steps, tensors, world_size):
    """Add to each Step the tensors to show after it, each look once.

    Left out are the results of events that only repeat earlier ones, and unnamed tensors, except those that a move
    reads or makes. The result of a move is shown even if it looks like an earlier tensor.
    """
    moving = [step.event for step in steps if step.moves_a_tensor]
    in_a_move = {tensor["id"] for event in moving for tensor in event.inputs + event.outputs}
    shown = set()
    for described in tensors:
        step = steps[described["after"]]
        is_result = described["id"] in [output["id"] for output in step.event.outputs]
        if is_result and step.repeats:
            continue
        if described["name"] == UNNAMED and described["id"] not in in_a_move:
            continue
        tensor = tensor_of(described, world_size)
        if repr(tensor) not in shown or (is_result and step.moves_a_tensor):
            step.tensors.append(tensor)
            shown.add(repr(tensor))


def tensor_of(described, world_size):
    """The Tensor of what tensors.describe says, with the block of each rank."""
    held, shape = layout(described), described["shape"]
    blocks = [held.block(shape, rank) for rank in range(world_size)]
    return Tensor(described["name"], shape, held.sbp, held.ranks, blocks)


def moves_tensor(move):
    """Whether a Move moves a tensor that was global before."""
    return move.collective not in (MADE_GLOBAL, COMPARES) and not move.sends_nothing and not move.is_number


def steps_in(result):
    """How many steps a script trains, by the calls of its optimizers and graphs, else by those of backward."""
    graphs = [event.times for event in result["events"] if event.kind == "graph" and event.facts["weights"]]
    updates = result["updates"] + sum(graphs)
    return updates or sum(event.times for event in result["events"] if event.kind == "backward")


def bytes_of(tensor):
    return tensor["item"] * int(np.prod(tensor["shape"]))


def moves_of(events, names):
    """The Moves of an event. A graph's call has a Move for each boxing too, backward for each layer.

    events: the event on each rank; names: {id of a tensor: its name}.
    """
    event = events[0]
    operands = [names.get(tensor["id"], UNNAMED) for tensor in event.inputs]
    looks = [f"{tensor['sbp']} {tensor['ranks']} {tensor['shape']}" for tensor in event.inputs]
    place = [event.layer] if event.layer else operands  # in a layer, tensors have names the first time only
    source = (event.kind, event.name, *place, *looks)
    move = Move(event.kind, event.line, [event.sent for event in events], event.times, source)
    if event.kind == "graph":
        return moves_of_graph(event, replace(move, name=f"a call of {event.name}"))
    if event.kind == "backward":
        return moves_of_backward(events, move, names)
    if event.kind == "layer":
        move = move_in_layer(event, move)
        return [move] if has_moved(move) else []
    if event.kind == "module to_global":
        return [move_of_module(event, move)]
    if event.kind == "create":
        [new] = event.outputs
        fields = {"name": f"flow.tensor -> {names.get(new['id'], UNNAMED)}", "size": bytes_of(new), "why": SCRIPT}
        return [replace(move, change=f"local -> {new['sbp']}", collective=COMPARES, **fields)]
    if event.kind == "matmul":
        return [move_of_matmul(event, move, operands, names.get(event.outputs[0]["id"], UNNAMED))]
    if event.kind == "read":
        boxing = theory.boxing_to(event.inputs[0], "B", list(range(len(events))))  # every rank gets the value
        return [move.of(boxing, name=READS[event.name].format(operands[0]), why=SCRIPT)]
    return [move_of_to_global(event, move, operands[0], names.get(event.outputs[0]["id"], UNNAMED))]


def move_of_matmul(event, move, operands, product):
    """The Move of a matmul. operands, product: names of tensors."""
    name = f"{operands[0]} @ {operands[1]}" + (f" = {product}" if product != UNNAMED else "")
    if event.layer and UNNAMED in operands:
        name = f"{event.layer}: matmul"
    matmul, size, probably = (event.inputs, event.outputs[0], event.facts["transposed"]), bytes_of(event.inputs[0]), ""
    boxings = theory.matmul_boxings(*matmul)
    if boxings is None:
        sent = sum(move.sent) if max(map(bytes_of, event.inputs)) >= EXACT else None
        boxings = theory.probable_boxings(*matmul, sent)
        probably = "probably " if boxings else ""
    names = {"x": operands[0].replace(UNNAMED, "left operand"), "w": operands[1].replace(UNNAMED, "right operand")}
    return replace(
        move,
        why=ONEFLOW,
        name=name,
        size=size,
        boxings=None if boxings is None else [boxing for _, boxing in boxings],
        collective=probably + theory.boxings_in_words(boxings, names),
    )


def move_of_to_global(event, move, old_name, new_name):
    """The Move of a tensor's to_global."""
    old, new = event.inputs[0], event.outputs[0]
    name = old_name if old_name == new_name else f"{old_name} -> {new_name}"
    unnamed = [name for name in (old_name, new_name) if name == UNNAMED]
    if len(unnamed) == 2 or (event.layer and (unnamed or old_name == new_name)):
        name = event.layer or event.text
    if old["sbp"] == "local":
        change = f"local -> {new['sbp']}"
        return replace(move, name=name, size=bytes_of(old), change=change, collective=MADE_GLOBAL)
    return move.of(theory.boxing_to(old, new["sbp"], new["ranks"]), name=name, why=SCRIPT)


def move_in_layer(event, move):
    """The Move of what OneFlow moved inside a layer by itself."""
    change = event.inputs[0]["sbp"]
    if event.outputs:
        change += f" -> {event.outputs[0]['sbp']}"
    size = max(map(bytes_of, event.inputs + event.outputs))
    return replace(move, name=f"inside {event.name}", size=size, change=change, collective=IMPLICIT, why=ONEFLOW)


def has_moved(move):
    """Whether a layer sent more than OneFlow's own messages."""
    return max(move.sent) >= max(0.1 * move.size, NOISE)


def moves_of_backward(events, move, names):
    """The Move of a whole backward, that of each parameter's gradient, and one of each part that sent something else.

    The facts "gradients" and "by_part" of the events are as in trace.Trace. Of the parts only the bytes are known.
    """
    whole = replace(move, size=sum(map(bytes_of, events[0].outputs)), collective="backward")
    gradients = []
    for moved in zip(*(event.facts["gradients"] for event in events)):
        source, why, old, new, _ = moved[0]
        boxing = theory.boxing_to(old, new["sbp"], new["ranks"])
        name = GRADIENT_OF if why == GRADIENT else BACKWARD_OF
        fields = {"name": name.format(name_of(source, names)), "why": why, "source": (*whole.source, source)}
        gradients.append(whole.of(boxing, sent=[sent for *_, sent in moved], **fields))
    rest = sum(whole.sent) - sum(sum(gradient.sent) for gradient in gradients)
    gradients = [gradient for gradient in gradients if not gradient.sends_nothing]
    return [replace(whole, rest=max(0, rest)), *gradients, *moves_of_parts(events, whole, names)]


def moves_of_parts(events, whole, names):
    """A Move for each layer or matmul whose backward sent something besides the gradients of parameters."""
    moves = []
    for counts in zip(*(event.facts["by_part"] for event in events)):
        part, sent = counts[0][0], [count for _, count in counts]
        if max(sent) >= max(0.02 * max(whole.sent), NOISE):
            line = part if isinstance(part, str) else part[0]  # its operands have names the first time only
            fields = {"name": BACKWARD_OF.format(name_of(part, names)), "source": (*whole.source, line)}
            moves.append(replace(whole, sent=sent, collective=BY_PART, **fields))
    return moves


def name_of(source, names):
    """What a "source" or "part" of trace.Trace is called; names: {id of a tensor: its name}."""
    if isinstance(source, tuple):  # a matmul
        line, *operands = source
        return " @ ".join(names[key] for key in operands) if set(operands) <= set(names) else line
    return names.get(source, UNNAMED) if isinstance(source, int) else source


def move_of_module(event, move):
    """The Move of a module's to_global, which moves all its parameters and buffers."""
    pairs = list(zip(event.inputs, event.outputs))
    changes = {f"{old['sbp']} -> {new['sbp']}" for old, new in pairs}
    change = changes.pop() if len(changes) == 1 else ""
    fields = {"name": f"{event.name}.to_global", "change": change, "size": sum(bytes_of(old) for old, _ in pairs)}
    if any(old["sbp"] == "local" for old, _ in pairs):
        return replace(move, collective=MADE_GLOBAL, **fields)
    boxings = [theory.boxing_to(old, new["sbp"], new["ranks"]) for old, new in pairs]
    collectives = ", ".join(dict.fromkeys(boxing.collective for boxing in boxings if boxing.collective != "nothing"))
    return replace(move, boxings=boxings, collective=collectives or "nothing", why=SCRIPT, **fields)


def moves_of_graph(event, call):
    """The Move of a graph's call, and that of each boxing in it."""
    edges, weights = event.facts["boxings"], event.facts["weights"]  # no weights if it does not train
    boxings = [theory.Boxing(edge["shape"], edge["old"], edge["new"], edge["item"]) for edge in edges]
    size = weights or max((boxing.size for boxing in boxings), default=0)
    collectives = ", ".join(dict.fromkeys(boxing.collective for boxing in boxings)) or "nothing"
    moves = [replace(call, size=size, boxings=boxings, collective="a whole step" if weights else collectives)]
    micro_batches = event.facts["micro_batches"]
    if micro_batches > 1:  # the compiled graph does not say which moves repeat for each micro-batch
        moves[0].boxings, moves[0].collective = None, f"a whole step of {micro_batches} micro-batches"
    for edge, boxing in zip(edges, boxings):
        name = GRADIENT_OF.format(edge["parameter"]).strip()
        if edge["parameter"] is None:
            name = f"{op_in_words(edge['producer'])} -> {op_in_words(edge['consumer'])}"
        source = (event.name, name, len(moves))
        moves.append(call.of(boxing, name=name, line=0, sent=None, source=source, why=edge["why"]))
    return moves


def op_in_words(op):
    """The name of an op in a graph, without OneFlow's prefixes and numbers."""
    if "_output." in op or "_input." in op:
        end = "output" if "_output." in op else "input"
        return f"{end} {op.split('.')[-1].split('_')[0]}"
    return re.sub(r"^(System-Pipeline-Buffer-Op_-)?(module[.-])?|-\d+$", "", op).replace(
        "hierarchical_parallel_cast", "to_global"
    )
