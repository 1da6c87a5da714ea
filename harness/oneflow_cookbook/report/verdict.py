"""The last lines of `show` and `bytes`: what the script moves in a step, and what OneFlow adds."""

import re

from oneflow_cookbook.measure.events import GRADIENT, ONEFLOW, SCRIPT
from oneflow_cookbook.measure.steps import IMPLICIT
from oneflow_cookbook.report.drawing import bytes_in_words
from oneflow_cookbook.report.shorten import left_out_in_words

NAMED = 6  # places that are named at most


def notes(moves, mark, has_graph):
    """Sentences: why a measured number of bytes is not exact, and how to see what OneFlow moved inside a layer.

    mark: what becomes of a number that is not exact. has_graph: whether the script takes --graph.
    """
    if not all(move.is_exact for move in moves if move.sent is not None):
        words = f"Tensors under 1 MB: what was measured is {mark}, because OneFlow's own messages outweigh their bytes."
        yield f"{words} Give larger sizes to compare with the formulas."
    if any(move.collective == IMPLICIT for move in moves):
        more = "Add --graph" if has_graph else "Run the model in an nn.Graph"
        words = "OneFlow moved operands inside these layers; in eager mode it does not tell which ones."
        yield f"{words} {more}: there each move is listed."


def conclusion(moves, left_out, steps):
    """What is not listed, and the verdict, as lines."""
    return "\n".join(filter(None, [left_out_in_words(left_out), verdict(moves, steps)]))


def verdict(moves, steps):
    """A sentence. moves: those of shorten.shortened; steps: how many steps the script trains, 0 if none."""
    in_graph = any(move.sent is None for move in moves)
    by = {why: [move for move in moves if move.why == why] for why in (SCRIPT, GRADIENT, ONEFLOW)}
    written = [move for move in by[SCRIPT] if move.times >= steps]  # the others are not in each step
    parts = [f"your code asks for {moves_in_words(written, steps, 'move') if written else 'no move'}"]
    if by[ONEFLOW]:
        parts.append(f"OneFlow adds {moves_in_words(by[ONEFLOW], steps, 'more')}")
    else:
        parts.append("OneFlow adds none" + ("" if in_graph else " in layers and matmuls"))
    if by[GRADIENT]:
        parts.append(f"the gradients take {moves_in_words(by[GRADIENT], steps, 'move')}")
    backward = [move for move in moves if move.rest]
    if backward:
        parts.append(f"backward sends {amount(backward, steps)}{' more' if by[GRADIENT] else ''}")
    words = f"{'Per step' if steps else 'In the run'}, all ranks together: {'; '.join(parts)}."
    if any("micro-batches" in move.collective for move in moves):
        words += " A graph's moves are counted once, not for each micro-batch."
    return words


def moves_in_words(moves, steps, noun):
    """Such as "4 moves (blocks.0-1.down: 1.05 MB)"."""
    number = sum(calls(move, steps) for move in moves)
    places = list(dict.fromkeys(map(place_of, moves)))
    named = ", ".join(places[:NAMED]) + (f" and {len(places) - NAMED} more" if len(places) > NAMED else "")
    return f"{number} {noun}{'s' if number > 1 and noun == 'move' else ''} ({named}: {amount(moves, steps)})"


def calls(move, steps):
    """How often a move is made in a step; without steps, in the run."""
    return move.equal * max(1, round(move.times / (steps or 1)))


def amount(moves, steps):
    """The bytes that all ranks together send for these moves."""
    about = "" if all(move.formula is not None or move.is_exact for move in moves) else "about "
    return about + bytes_in_words(sum(calls(move, steps) * move.total for move in moves))


def place_of(move):
    """Where a move is: a layer, or the step itself."""
    if move.sent is None and move.why != GRADIENT:  # between two ops of a graph
        return re.split(" -> |-(?=[a-z_])", move.name)[0]
    return re.sub("^ *(inside|gradient of|backward of) | = .*", "", move.name)
