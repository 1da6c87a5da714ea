"""A forward pass as a picture: for each matmul an equation of blocks, by rank, and an arrow for each move."""

import numpy as np

from harness.report.forward import Forward, Move, Product
from harness.report.svg import LETTER, WIDTH, Picture, wide

LEFT, OPERATOR, GAP = 46, 22, 10  # pixels: of a rank's name, of an operator, between two rows


def picture(text, small, large):
    """The Picture of a recipe's forward pass; text: the first line of its docstring; small, large: see Forward."""
    drawn, items, before = Picture(text), Forward(small, large).items, None
    tensors = [one for item in items if isinstance(item, Product) for one in item.tensors]
    mesh = any(len(one.layout.axes) > 1 for one in tensors)
    cell = 8 if mesh else 12
    for item, following in zip(items, [*items[1:], None]):
        if isinstance(item, Product):
            if before and "relu" in before.text and item.tensors[0] is not before.of:
                drawn.lines(LEFT, "relu, on each rank: nothing moves")
                drawn.down += 8
            column, before = product(drawn, item.tensors, cell), item
        elif isinstance(following, Product) and following.tensors[0] is item.new:
            onward(drawn, item, column, cell)
        elif item.backward:
            drawn.lines(0, f"backward: {item.collective} of {item.new.name}", size=12, fill="move", bold=True)
            drawn.lines(0, item.in_words[1], fill="move")
        elif not mesh:
            result(drawn, item, column, cell)
        elif getattr(following, "of", None) is not item.of:  # the last one
            meshes(drawn, [one for one in items if isinstance(one, Move) and one.of is item.of], column, cell)
    if not any(isinstance(item, Move) for item in items):
        drawn.down += 4
        most = max(sent for item in items for sent in item.sent)
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
    drawn.text(x, drawn.down + 11, tensor.name, fill=tensor.colour, bold=True, then=tensor.shape_in_words)
    drawn.text(x, drawn.down + 25, tensor.sbp)


def block(drawn, x, y, cell, tensor, rank):
    """What a rank holds of a tensor."""
    held = tensor.layout.block(tensor.shape, rank)
    drawn.cells(x, y, cell, held, tensor.shape, tensor.colour, tensor.partial)


def product(drawn, tensors, cell):
    """A row of blocks for each rank; returns where the column of the product begins."""
    columns = [LEFT]
    for tensor in tensors:
        columns.append(columns[-1] + tensor.across(cell) + OPERATOR)
    assert columns[-1] - OPERATOR <= WIDTH, (columns, [tensor.name for tensor in tensors])
    for x, tensor in zip(columns, tensors):
        names(drawn, x, tensor)
    drawn.down += 32
    tall = cell * max(tensor.shape[0] for tensor in tensors)
    layout = tensors[0].layout
    for rank in layout.members:
        middle = drawn.down + tall / 2
        label(drawn, rank, layout, middle)
        for x, tensor in zip(columns, tensors):
            block(drawn, x, middle - cell * tensor.shape[0] / 2, cell, tensor, rank)
        for x, sign in zip(columns[1:], "×="):
            drawn.text(x - OPERATOR / 2, middle + 5, sign, 16, anchor="middle")
        drawn.down += tall + GAP
    return columns[2]


def start_of(drawn, move, column, cell):
    """Where the arrow of a move begins: below the middle of what moves."""
    return column + cell * move.of.shape[1] / 2, drawn.down - GAP + 3


def onward(drawn, move, column, cell):
    """A move from the result of one equation to the x of the next."""
    (start, top), end = start_of(drawn, move, column, cell), LEFT + cell * move.new.shape[1] / 2
    bottom = top + 16 + 15 * len(move.in_words)
    drawn.arrow((start, top), (start, top + 9), (end, top + 9), (end, bottom + 4))
    drawn.move(end + 10, top + 25, move.in_words)
    drawn.down = bottom + 8


def result(drawn, move, column, cell):
    """A move to a tensor that is a result: its blocks stand below those that it is made of."""
    (middle, top), new = start_of(drawn, move, column, cell), move.new
    bottom = top + 10 + 15 * len(move.in_words)
    drawn.arrow((middle, top), (middle, bottom))
    drawn.move(middle - 12, top + 14, move.in_words, anchor="end")
    drawn.down = bottom + 2
    column = min(column, WIDTH - new.across(cell))
    names(drawn, column, new)
    drawn.down += 32
    for rank in new.layout.members:
        tall = cell * new.shape[0]
        label(drawn, rank, new.layout, drawn.down + tall / 2, column - LEFT)
        block(drawn, column, drawn.down, cell, new, rank)
        drawn.down += tall + GAP


def meshes(drawn, moves, column, cell):
    """Results on a mesh, side by side, each as its mesh: of several moves of one tensor."""
    middle, top = start_of(drawn, moves[0], column, cell)
    bottom, ends = top + 15 * max(len(move.in_words) for move in moves) + 20, []
    for move, left in zip(moves, (0, WIDTH / 2 + 4)[-len(moves) :]):
        new = move.new
        drawn.arrow((middle, top), (middle, top + 9), (left + 12, top + 9), (left + 12, bottom))
        drawn.move(left + 20, top + 24, move.in_words, size=LETTER)
        drawn.down = bottom + 2
        names(drawn, left, new)
        drawn.down += 34
        across, tall = max(cell * new.shape[1], wide("rank 0")) + 16, cell * new.shape[0] + 20
        for (row, column), rank in np.ndenumerate(new.layout.grid):
            x, y = left + column * across, drawn.down + row * tall
            drawn.text(x, y + 9, f"rank {rank}")
            block(drawn, x, y + 13, cell, new, rank)
        ends.append(drawn.down + 2 * tall)
    drawn.down = max(ends) + 8
