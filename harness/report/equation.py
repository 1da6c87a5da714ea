"""A forward pass as a picture: for each matmul an equation of blocks, by rank, and an arrow for each move."""

import numpy as np

from harness.report.forward import Forward, Move, Product
from harness.report.svg import LETTER, WIDTH, Picture, wide

LEFT, OPERATOR, GAP = 46, 22, 10  # pixels: of a rank's name, of an operator, between two rows


def picture(text, small, large):
    """The Picture of a recipe's forward pass; text: the first line of its docstring; small, large: see Forward."""
    drawn, items, before = Picture(text), Forward(small, large).items, None
    products = [item for item in items if isinstance(item, Product)]
    tensors = [one for item in products for one in item.tensors]
    mesh = any(len(one.layout.axes) > 1 for one in tensors)
    cell = 8 if mesh else 12
    for item, following in zip(items, [*items[1:], None]):
        if isinstance(item, Product):
            if before and "relu" in before.text and item.tensors[0] is not before.of:
                drawn.lines(LEFT, "relu, on each rank: nothing moves")
                drawn.down += 8
            where, before = product(drawn, item.tensors, cell), item
        elif isinstance(following, Product) and following.tensors[0] is item.new:
            onward(drawn, item, where, cell)
        elif item.backward:
            drawn.lines(0, f"backward: {item.collective} of {item.new.name}", size=12, fill="move", bold=True)
            drawn.lines(0, sent_in_words(item)[0], fill="move")
        elif not mesh:
            result(drawn, item, where, cell)
        elif getattr(following, "of", None) is not item.of:  # the last one
            meshes(drawn, [one for one in items if isinstance(one, Move) and one.of is item.of], where, cell)
    if products == items:
        drawn.down += 4
        most = max(sent for item in products for sent in item.sent)
        drawn.lines(LEFT, f"nothing moves: each rank sends {most} bytes", fill="move", bold=True)
    drawn.down += 6
    parts = ["filled: what the rank holds"]
    parts += ["dashed: the whole tensor"] * any("S" in one.layout.sbp for one in tensors)
    parts += ["striped: one part of a sum"] * any(one.partial for one in tensors)
    drawn.lines(0, "; ".join(parts + ["mesh: axis 0 runs down, axis 1 across"] * mesh))
    return drawn


def label(drawn, rank, layout, y, x=0.0):
    """The name of a rank, on a mesh with its place there."""
    if layout.grid.ndim == 1:
        drawn.text(x, y + 4, f"rank {rank}")
        return
    [place] = np.argwhere(layout.grid == rank).tolist()
    drawn.text(x, y - 3, f"rank {rank}")
    drawn.text(x, y + 10, f"({place[0]}, {place[1]})", fill="quiet")


def names(drawn, x, tensor):
    """The heading of a column: name, shape and SBP."""
    shape = tensor.heading[len(tensor.name) + 1 :]
    drawn.text(x, drawn.down + 11, tensor.name, fill=tensor.colour, bold=True, then=shape)
    drawn.text(x, drawn.down + 25, tensor.sbp)


def product(drawn, tensors, cell):
    """A row of blocks for each rank; returns where the columns begin, and in the middle of which block they are."""
    left, columns = LEFT, []
    for tensor in tensors:
        columns.append(left)
        left += tensor.across(cell) + OPERATOR
    assert left - OPERATOR <= WIDTH, (left, [tensor.heading for tensor in tensors])
    for x, tensor in zip(columns, tensors):
        names(drawn, x, tensor)
    drawn.down += 32
    tall = cell * max(tensor.shape[0] for tensor in tensors)
    layout = tensors[0].layout
    for rank in layout.members:
        middle = drawn.down + tall / 2
        label(drawn, rank, layout, middle)
        for x, tensor, sign in zip(columns, tensors, " ×="):
            block = tensor.layout.block(tensor.shape, rank)
            up = middle - cell * tensor.shape[0] / 2
            drawn.cells(x, up, cell, block, tensor.shape, tensor.colour, tensor.partial)
            if sign != " ":
                drawn.text(x - OPERATOR / 2, middle + 5, sign, 16, anchor="middle")
        drawn.down += tall + GAP
    return [x + cell * tensor.shape[1] / 2 for x, tensor in zip(columns, tensors)], columns


def sent_in_words(move):
    """What each rank sends, in units of the tensor: one line for those that send the same."""
    groups = {}
    for rank, sent in enumerate(move.sent):
        if sent >= 0.02:
            groups.setdefault(f"{sent:.2f}", []).append(rank)
    if list(map(len, groups.values())) == [len(move.sent)]:
        [amount] = groups
        off = move.formula is not None and abs(float(amount) - move.formula) > 0.02 * move.formula + 0.011
        formula = [f"({move.formula:.2f} by the formula)"] if off else []
        return [f"each rank sends {amount} × {bracketed(move.of.name)}", *formula]
    return [
        f"{ranks_in_words(ranks)} {'sends' if len(ranks) == 1 else 'each send'} {amount} × {bracketed(move.of.name)}"
        for amount, ranks in groups.items()
    ]


def bracketed(name):
    return f"({name})" if " " in name else name


def ranks_in_words(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def title_of(move):
    old, new = (move.of.layout, move.new.layout)
    if old.ranks == new.ranks:
        return move.collective
    name = move.collective.replace(" to other ranks", "")
    return f"{name}, {ranks_in_words(old.members)} → {ranks_in_words(new.members)}"


def onward(drawn, move, where, cell):
    """A move from the result of one equation to the x of the next."""
    top, [start, end] = drawn.down - GAP + 3, (where[0][2], LEFT + cell * move.new.shape[1] / 2)
    lines = [title_of(move), *sent_in_words(move)]
    bottom = top + 16 + 15 * len(lines)
    drawn.arrow((start, top), (start, top + 9), (end, top + 9), (end, bottom + 4))
    for number, line in enumerate(lines):
        drawn.text(end + 10, top + 25 + 15 * number, line, 12 if not number else LETTER, "move", bold=not number)
    drawn.down = bottom + 8


def result(drawn, move, where, cell):
    """A move to a tensor that is a result: its blocks stand below those that it is made of."""
    top, column, middle = drawn.down - GAP + 3, where[1][2], where[0][2]
    lines = [title_of(move), *sent_in_words(move)]
    bottom = top + 10 + 15 * len(lines)
    drawn.arrow((middle, top), (middle, bottom))
    for number, line in enumerate(lines):
        drawn.text(middle - 12, top + 14 + 15 * number, line, 12 if not number else LETTER, "move", "end", not number)
    drawn.down = bottom + 2
    new, layout = move.new, move.new.layout
    column = min(column, WIDTH - new.across(cell))
    names(drawn, column, new)
    drawn.down += 32
    for rank in layout.members:
        tall = cell * new.shape[0]
        label(drawn, rank, layout, drawn.down + tall / 2, column - LEFT)
        drawn.cells(column, drawn.down, cell, layout.block(new.shape, rank), new.shape, new.colour, new.partial)
        drawn.down += tall + GAP


def meshes(drawn, moves, where, cell):
    """Results on a mesh, side by side, each as its mesh: of several moves of one tensor."""
    top, middle = drawn.down - GAP + 3, where[0][2]
    ends, words = [], [[title_of(move), *sent_in_words(move)] for move in moves]
    for number, (move, lines) in enumerate(zip(moves, words)):
        new, left = move.new, (0, WIDTH / 2 + 4)[number + 2 - len(moves)]
        across = max(cell * new.shape[1], wide("rank 0")) + 16
        arrow = [
            (middle, top),
            (middle, top + 9),
            (left + 12, top + 9),
            (left + 12, top + 15 * max(map(len, words)) + 20),
        ]
        drawn.arrow(*arrow)
        for row, line in enumerate(lines):
            drawn.text(left + 20, top + 24 + 15 * row, line, fill="move", bold=not row)
        drawn.down = arrow[-1][1] + 2
        names(drawn, left, new)
        drawn.down += 34
        tall = cell * new.shape[0] + 20
        for (row, column), rank in np.ndenumerate(new.layout.grid):
            x, y = left + column * across, drawn.down + row * tall
            drawn.text(x, y + 9, f"rank {rank}")
            drawn.cells(x, y + 13, cell, new.layout.block(new.shape, rank), new.shape, new.colour, new.partial)
        ends.append(drawn.down + 2 * tall)
    drawn.down = max(ends) + 8
