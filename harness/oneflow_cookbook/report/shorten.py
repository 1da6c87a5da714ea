"""Shorten what a script did: without moves that send nothing, and with equal blocks of a model written once."""

import re
from collections import Counter
from dataclasses import replace

from oneflow_cookbook.measure.steps import MADE_GLOBAL, Move, Tensor

# The first index in a name: the 0 of "model.blocks.0.up.weight", also that of "0.weight"
INDEX = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)+(?=\d+(?!\w))|(?=\d+\.[A-Za-z_]))(\d+)")
KINDS = {"matmul": ("matmul", "matmuls"), "to_global": ("to_global",) * 2, "read": ("read", "reads")}
IN_GRAPH, OTHER = ("conversion in the graph", "conversions in the graph"), ("step", "steps")
SAME = 2_000  # bytes by which what two equal blocks sent may differ: OneFlow's own messages


def shortened(items):
    """(the Tensors and Moves to list, the Moves that are left out) of the items of tensors_and_moves."""
    left_out = [item for item in items if isinstance(item, Move) and (item.sends_nothing or item.is_number)]
    omitted = set(map(id, left_out))
    return fold_blocks(join_made_global([item for item in items if id(item) not in omitted])), left_out


def left_out_in_words(moves):
    """Such as "Not listed: 13 matmuls, 4 to_global of 0 B."; "" without moves."""
    counts = Counter(kind_of(move) for move in moves if move.sends_nothing)
    numbers = sum(not move.sends_nothing for move in moves)
    words = [", ".join(f"{count} {names[count > 1]}" for names, count in counts.items())]
    words = [f"{words[0]} of 0 B"] if counts else []
    if numbers:
        words.append(f"{numbers} move{'s' if numbers > 1 else ''} of a single number, such as the learning rate")
    return f"Not listed: {'; '.join(words)}." if words else ""


def kind_of(move):
    """What to call a move, and several of them."""
    return IN_GRAPH if move.sent is None else KINDS.get(move.source[0], OTHER)


def join_made_global(items):
    """Write the tensors that a line makes global, such as all parameters of a model, as a single Move."""
    joined, first_of = [], {}
    for item in items:
        if not (isinstance(item, Move) and item.collective == MADE_GLOBAL):
            joined.append(item)
            continue
        key = (item.name, item.line, item.change)
        if key in first_of:
            first_of[key].append(item)
        else:
            first_of[key] = [item]
            joined.append(first_of[key])
    return [total_of(item) if isinstance(item, list) else item for item in joined]


def total_of(moves):
    """These Moves as one; what they sent is added up."""
    number = sum(move.times for move in moves)
    if len(moves) == 1:
        return moves[0]
    sent = [sum(count * move.times for count, move in zip(counts, moves)) for counts in zip(*(m.sent for m in moves))]
    size = sum(move.size * move.times for move in moves)
    return replace(moves[0], name=f"{moves[0].name}, {number} tensors", times=1, sent=sent, size=size)


def fold_blocks(items):
    """Write items once that differ only in the index of their block: "blocks.0-11.up.weight"."""
    groups = {}
    for item in items:
        key, index = key_and_index(item)
        number = 0
        while not joins(item, index, groups.get((key, number), [])):
            number += 1
        groups.setdefault((key, number), []).append((index, item))
    return [merged(group) for group in groups.values()]


def key_and_index(item):
    """(a key that is equal for the same item of two equal blocks, the block's index, None if it is in none)."""
    match = INDEX.search(item.name)
    if not match:
        return (id(item),), None
    index = match[2]
    name = with_index(item.name, index, "#")
    if isinstance(item, Tensor):
        return (name, item.shape, item.sbp, str(item.ranks)), index
    collective = with_index(item.collective, index, "#")
    return (name, collective, item.line, item.times, item.size, item.change, item.formula, item.why), index


def joins(item, index, group):
    """Whether an item belongs to a group of (index, item) with its key: another block, and the same bytes measured."""
    if index in [other for other, _ in group]:
        return False
    if not group or isinstance(item, Tensor) or item.sent is None:
        return True
    return all(abs(a - b) <= max(SAME, 0.02 * a) for a, b in zip(item.sent, group[0][1].sent))


def with_index(text, index, new):
    """The text with `new` in place of this index of a block."""
    return INDEX.sub(lambda match: match[1] + (new if match[2] == index else match[2]), text)


def merged(group):
    """An item for a group of (index, item)."""
    index, item = group[0]
    if len(group) == 1:
        return item
    blocks = ranges(sorted(int(index) for index, _ in group))
    name = with_index(item.name, index, blocks)
    if isinstance(item, Tensor):
        return replace(item, name=name)
    return replace(item, name=name, collective=with_index(item.collective, index, blocks), equal=len(group))


def ranges(numbers):
    """Such as "0-3,5", as PyTorch prints equal modules of a ModuleList."""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
