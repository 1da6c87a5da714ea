"""Draw what a script did on a terminal: its tensors, with the ranks side by side, the moves between, and its bytes."""

from itertools import chain, zip_longest

import numpy as np
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oneflow_cookbook.measure.steps import BY_PART, IMPLICIT, Tensor

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")  # of the ranks, in turn
HEADS = ("tensor", "shape", "SBP")


def bytes_in_words(count):
    """Such as "1.23 kB": decimal units, three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size < 999.5 else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def shape_in_words(shape):
    return f"({', '.join(map(str, shape))})" if shape else "scalar"


def held_in_words(tensor, rank):
    """The shape of a rank's block and its place in the tensor: "(2, 4) rows 0-1"."""
    block = tensor.blocks[rank]
    if block is None:
        return "-"
    names = ("rows", "columns") if len(tensor.shape) == 2 else tuple(f"dim {dim}:" for dim in range(len(tensor.shape)))
    words = []
    for name, (start, stop), size in zip(names, block, tensor.shape):
        if stop - start < size:
            words.append(f"{name} {start}-{stop - 1}" if stop - start > 1 else f"{name.rstrip('s')} {start}")
    if tensor.partial:
        words.append("addend")
    elif not words:
        words.append("its own" if tensor.sbp == "local" else "whole")
    shape = f"({', '.join(str(stop - start) for start, stop in block)}) " if block else ""
    return shape + ", ".join(words)


def colour(rank):
    """The colour of a rank, for rich."""
    return COLOURS[rank % len(COLOURS)]


def rank_lines(tensor, with_rank):
    """The cells of the ranks, a list of Texts for each row of the mesh, or for all ranks if they are no mesh.

    with_rank: whether to name the rank in its cell.
    """
    mesh = tensor.ranks if np.ndim(tensor.ranks) == 2 else [range(len(tensor.blocks))]
    return [[cell_of(tensor, rank, with_rank) for rank in row] for row in mesh]


def cell_of(tensor, rank, with_rank):
    """What a rank holds, as a Text."""
    name = f"rank {rank} " if with_rank else ""
    return Text(name + held_in_words(tensor, rank), "dim" if tensor.blocks[rank] is None else colour(rank))


def draw(console, items):
    """Print tensors and moves in order: as a table, or as a list if the console is too narrow. console: of rich."""
    tensors = [item for item in items if isinstance(item, Tensor)]
    mesh = any(np.ndim(tensor.ranks) == 2 for tensor in tensors)
    ranks = range(0 if mesh or not tensors else len(tensors[0].blocks))
    heads = [*map(Text, HEADS), *(Text(f"rank {rank}", colour(rank)) for rank in ranks)]
    rows = {id(tensor): rows_of(tensor, mesh) for tensor in tensors}
    widths = [max(map(len, column)) for column in zip_longest(heads, *chain(*rows.values()), fillvalue="")]
    table = sum(widths) + 2 * len(widths) <= console.width
    arrow = "↓" if (console.encoding or "").lower().replace("-", "").startswith("utf8") else "v"
    if table and tensors:
        console.print(Text("\n"), aligned(heads, widths, "dim"), sep="")
    for item in items:
        if not isinstance(item, Tensor):
            move = Text(f"{arrow} {in_words(item)}", "" if quiet(item) else "bold yellow")
            console.print(Padding(move, (0, 0, 0, 4)))
        elif table:
            for line in rows[id(item)]:
                console.print(aligned(line, widths))
        else:
            console.print(Text.assemble("\n", (item.name, "bold"), f" {shape_in_words(item.shape)} {item.sbp}"))
            for cell in chain(*rank_lines(item, True)):
                console.print(Padding(cell, (0, 0, 0, 2)))


def rows_of(tensor, with_rank):
    """The lines of a tensor in the table, each a list of Texts."""
    heads = [Text(tensor.name, "bold"), Text(shape_in_words(tensor.shape)), Text(tensor.sbp, "bold")]
    first, *others = rank_lines(tensor, with_rank)
    return [heads + first, *([Text("")] * len(heads) + line for line in others)]


def aligned(line, widths, style=""):
    """A line of the table as a Text."""
    cells = [text + " " * (width - len(text)) for text, width in zip(line, widths)]
    return Text("  ", style).append_text(Text("  ").join(cells))


def quiet(move):
    """Whether a move moves nothing, by the formula and by the measured bytes."""
    if move.collective in (IMPLICIT, BY_PART):
        return False
    return not move.formula and not (move.is_exact and max(move.sent or [0]) >= 0.02 * move.size)


def in_words(move):
    """A move as a line of text."""
    about = f"about {bytes_in_words(max(move.sent or [0]))} from a rank"
    if move.collective == BY_PART:
        return f"{move.name}: {about}" + (" each" if move.equal > 1 else "")
    if move.name == "backward":
        words = "backward: the gradients"
    else:
        change = f" {move.change}," if move.change and move.change != move.collective else ""
        collective = move.collective if move.collective != "nothing" else "no communication"
        words = f"{move.name}:{change} {collective}"
    if move.collective == IMPLICIT and not move.is_exact:
        words += f", {about}"
    if not (move.collective == "nothing" and quiet(move)):
        if move.formula is not None:
            words += f", {formula_in_words(move)} by the formula"
        if move.sent is not None and move.is_exact:
            words += f", sent by rank: {', '.join(bytes_in_words(sent) for sent in move.sent)}"
    return words + times_in_words(move, " ({})")


def formula_in_words(move):
    """What each rank sends by the formula, or all together where they differ."""
    if move.share is None:
        return f"{bytes_in_words(move.formula)} in all"
    return f"{bytes_in_words(move.share)} from each rank"


def times_in_words(move, form):
    """How often a move is made, and that it is the move of several equal blocks; form: such as ", {}"."""
    times = f"{move.times} times" if move.times > 1 else ""
    words = f"{times} each".strip() if move.equal > 1 else times
    return form.format(words) if words else ""


def bytes_table(title, moves, outside):
    """The bytes of each move as a table of rich. outside: those that each rank sent outside of them."""
    table = Table(title=f"bytes that leave each rank: {title}", title_justify="left", expand=False)
    for name in ("line", "step", "collective"):
        table.add_column(name, overflow="fold")
    for name in (*(f"rank {rank}" for rank in range(len(outside))), "all ranks", "formula", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for move in moves:
        table.add_row(*map(Text, cells_of(move, len(outside))))  # in a plain str, [...] would be markup
    table.add_section()
    sent = [f"{number:,}" for number in (*outside, sum(outside))]
    between = "between the steps: making tensors, building graphs, operators outside of layers"
    table.add_row("", between, "", *sent, "", "")
    return table


def cells_of(move, world_size):
    """The cells of a move in the table of bytes."""
    line = str(move.line) if move.line else ""
    step = move.name + (f" ({move.change})" if move.change and move.change != move.collective else "")
    formula = "" if move.formula is None else f"{move.formula:,.0f}"
    if move.sent is None:  # a boxing in a graph, of which only the whole call is measured
        return [line, f"  {step}", move.collective, *[""] * world_size, "", formula, ""]
    total, about = sum(move.sent), "" if move.is_exact else "~"
    sent = [f"{about}{number:,}" for number in (*move.sent, total)]
    ratio = f"{total / move.formula:.3f}" if move.formula and move.is_exact else ""
    return [line, step + times_in_words(move, ", {}"), move.collective, *sent, formula, ratio]


def memory_table(memory):
    """The peak of each rank's memory, and what it is made of. memory: of rank_memory.memory, by rank."""
    table = Table(title="\npeak of each rank's memory", title_justify="left")
    for name in ("rank", "peak", "weights", "gradients", "optimizer state", "rest"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, held in enumerate(memory):
        kinds = [held["weights"], held["gradients"], held["state"]]
        rest = max(0, held["peak"] - sum(kinds))
        table.add_row(str(rank), *map(bytes_in_words, [held["peak"], *kinds, rest]))
    return table
