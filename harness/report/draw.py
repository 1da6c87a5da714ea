"""Draw the tensors and moves of a script: on a terminal, and as SVG for the docs."""

import xml.etree.ElementTree as ElementTree

import numpy as np
from rich.columns import Columns
from rich.padding import Padding
from rich.text import Text

from harness.measure.steps import Tensor

CELL = 14  # characters of a rank's picture on a terminal
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")  # of the ranks, in turn
UTF8 = {"shard": "█", "partial": "▒", "rest": "·", "down": "↓"}
ASCII = {"shard": "#", "partial": "%", "rest": ".", "down": "v"}


def bytes_in_words(count):
    """1234 -> "1.23 kB": decimal units, three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size < 999.5 else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def block_in_words(tensor, rank):
    """A rank's block, such as "rows 0-1, columns 2-3", without the dimensions that it has whole."""
    block = tensor.blocks[rank]
    if block is None:
        return "nothing"
    names = ("rows", "columns") if len(tensor.shape) == 2 else tuple(f"dim {dim}:" for dim in range(len(tensor.shape)))
    cut = [
        f"{name} {start}-{stop - 1}" if stop - start > 1 else f"{name.rstrip('s')} {start}"
        for name, (start, stop), size in zip(names, block, tensor.shape)
        if stop - start < size
    ]
    return ", ".join(cut) or ("a part of the sum" if tensor.partial else "whole")


def rank_rows(tensor):
    """The ranks as they are drawn: in one row, or row by row of their mesh."""
    ranks = np.array(tensor.ranks)
    return ranks.tolist() if ranks.ndim == 2 else [list(range(len(tensor.blocks)))]


def on_terminal(console, items):
    """Print tensors and moves, one below the other, as wide as the console is."""
    glyphs = UTF8 if (console.encoding or "").lower().replace("-", "").startswith("utf8") else ASCII
    for item in items:
        if isinstance(item, Tensor):
            shape = " x ".join(map(str, item.shape)) or "scalar"
            where = f"on ranks {item.ranks}" if item.ranks else "on each rank"
            console.print(Text.assemble("\n", (item.name, "bold"), f"  {shape}  ", (item.sbp, "bold"), f"  {where}"))
            for row in rank_rows(item):
                cells = [cell(item, rank, glyphs) for rank in row]
                console.print(
                    Padding(Columns(cells, width=max(CELL, *map(width, cells)), padding=(0, 1)), (0, 0, 0, 2))
                )
        else:
            console.print(Text(f"\n  {glyphs['down']} {in_words(item)}", "" if quiet(item) else "bold yellow"))


def width(text):
    return max(map(len, text.plain.splitlines()))


def cell(tensor, rank, glyphs):
    """One rank's block within the outline of the whole tensor."""
    rows, columns = (
        [*tensor.shape[-2:], 1, 1][:2] if len(tensor.shape) > 1 else (1, tensor.shape[0] if tensor.shape else 1)
    )
    height, wide = min(rows, max(4, len(tensor.blocks))), min(columns, max(8, len(tensor.blocks)))
    block = tensor.blocks[rank]
    text = Text(f"rank {rank}\n", "dim")
    for line in range(height):
        for place in range(wide):
            inside = block and is_in(block, (line + 0.5) / height, (place + 0.5) / wide, tensor.shape)
            glyph = glyphs["partial" if tensor.partial else "shard"] if inside else glyphs["rest"]
            text.append(glyph if block is not None else " ", COLOURS[rank % len(COLOURS)] if inside else "dim")
        text.append("\n")
    return text.append(block_in_words(tensor, rank))


def is_in(block, down, right, shape):
    """Whether a point of the picture, from 0 to 1 down and to the right, lies in a block."""
    (top, bottom), (first, last) = fractions(shape, block)
    return top <= down < bottom and first <= right < last


def quiet(move):
    """Whether a step moves nothing, by the formula and as measured."""
    return not move.formula and not (move.is_exact and max(move.sent or [0]) >= 0.02 * move.size)


def in_words(move):
    """A move in one line."""
    words = f"{move.what}:" + (f" {move.change}," if move.change and move.change != move.collective else "")
    words += f" {move.collective}" if move.collective != "nothing" else " nothing moves"
    if move.what == "backward":
        words = "backward: the gradients"
    if not (move.collective == "nothing" and quiet(move)):
        if move.formula is not None:
            words += f", {bytes_in_words(move.formula)} in all by the formula"
        if move.sent is not None and move.is_exact:
            words += f", sent by rank: {', '.join(bytes_in_words(sent) for sent in move.sent)}"
    return words + (f" ({move.times} times)" if move.times > 1 else "")


# SVG: sizes in pixels, for a reader who sees the picture as large as it is.
LABEL, BLOCK, GAP, TALL, ROW, MOVE, MARGIN, LINES = 146, 28, 6, 22, 32, 17, 10, 12
PALETTE = ("#1f77b4", "#d95f02", "#2ca02c", "#7b3fa0", "#8c564b", "#c2185b", "#5f6b2f", "#00838f")
SMALL = 1000  # bytes of a tensor, such as a loss, whose move is not drawn
NOTE = "numbers: what each rank sends, in units of what moves"
WEIGHTS = "backward and a whole step: in units of all weights"
NARROWEST = 250


def as_svg(items, title):
    """The same drawing as the text of an SVG file. Its background is light, so it can be read on dark pages too.

    Below a move's collective stand the bytes that left each rank, measured, in units of the tensor that moved.
    """
    items = [item for item in items if isinstance(item, Tensor) or not (quiet(item) or item.size < SMALL)]
    lines = LINES if len(items) <= LINES else -(-len(items) // 2)
    columns = [[]]
    for item, following in zip(items, [*items[1:], None]):
        moves_next = following is not None and not isinstance(item, Tensor)  # a move stands with what it made
        if len(columns[-1]) + moves_next >= lines and len(columns) * lines < len(items):
            columns.append([])
        columns[-1].append(item)
    ranks = max(len(item.blocks) for item in items if isinstance(item, Tensor))
    across = LABEL + ranks * (BLOCK + GAP)
    heights = [sum(ROW if isinstance(item, Tensor) else MOVE for item in column) for column in columns]
    moves = any(not isinstance(item, Tensor) for item in items)
    backward = any(getattr(item, "collective", "") in ("backward", "a whole step") for item in items)
    wide = max(NARROWEST, len(columns) * across + (len(columns) + 1) * MARGIN)
    tall = max(heights) + 20 + 14 * moves + 12 * backward + 2 * MARGIN
    size = {"width": str(wide), "height": str(tall), "viewBox": f"0 0 {wide} {tall}"}
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", **size)
    svg.set("font-family", "Helvetica, Arial, sans-serif")
    ElementTree.SubElement(svg, "title").text = title
    stripes = {"id": "sum", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
    pattern = ElementTree.SubElement(
        ElementTree.SubElement(svg, "defs"), "pattern", **stripes, patternTransform="rotate(45)"
    )
    ElementTree.SubElement(pattern, "rect", width="3", height="6", fill="#ffffff")
    rectangle(svg, 0, 0, wide, tall, fill="#fbfbf8", stroke="#b8b8b0", rx="6")
    for number, column in enumerate(columns):
        left, down = MARGIN + number * (across + MARGIN), MARGIN
        middles = [left + LABEL + rank * (BLOCK + GAP) + BLOCK / 2 for rank in range(ranks)]
        for rank, middle in enumerate(middles):
            words(svg, middle, down + 10, f"rank {rank}", 9, "#444444", middle=True)
        down += 20
        for item in column:
            if isinstance(item, Tensor):
                draw_tensor(svg, left, down, item)
                down += ROW
            else:
                draw_move(svg, left, down, item, middles)
                down += MOVE
    if moves:
        words(svg, MARGIN, tall - MARGIN + 2 - 12 * backward, NOTE, 8.5, "#444444")
        if backward:
            words(svg, MARGIN, tall - MARGIN + 2, WEIGHTS, 8.5, "#444444")
    return indented(svg) + "\n"


def draw_tensor(svg, left, down, tensor):
    words(svg, left, down + 10, tensor.name, 12 if len(tensor.name) < 17 else 10, "#111111", bold=True)
    words(svg, left, down + 22, f"{tensor.sbp}  ({', '.join(map(str, tensor.shape))})", 10, "#444444")
    for rank, block in enumerate(tensor.blocks):
        x = left + LABEL + rank * (BLOCK + GAP)
        if block is None:
            words(svg, x + BLOCK / 2, down + 15, "–", 12, "#777777", middle=True)
            continue
        rectangle(svg, x, down, BLOCK, TALL, fill="#ffffff", stroke="#8a8a84")
        (top, bottom), (first, last) = fractions(tensor.shape, block)
        place = (x + first * BLOCK, down + top * TALL, (last - first) * BLOCK, (bottom - top) * TALL)
        rectangle(svg, *place, fill=PALETTE[rank % len(PALETTE)])
        if tensor.partial:
            rectangle(svg, *place, fill="url(#sum)")


def draw_move(svg, left, down, move, middles):
    often = f" × {move.times}" if move.times > 1 else ""
    words(svg, left, down + 9, f"↓ {move.collective}{often}", 9.5, "#8a3b00")
    for middle, sent in zip(middles, move.is_exact and move.sent or []):
        words(svg, middle, down + 9, f"{sent / move.size:.2f}", 10, "#8a3b00", middle=True)


def fractions(sizes, block):
    """Where a block is in the picture of its tensor: ((top, bottom), (left, right)), from 0 to 1."""
    spans = [(start / size, stop / size) for (start, stop), size in zip(block, sizes)]
    return ([(0.0, 1.0)] * 2 + spans)[-2:]


def rectangle(parent, x, y, wide, tall, **attributes):
    numbers = {"x": x, "y": y, "width": wide, "height": tall}
    ElementTree.SubElement(parent, "rect", {**{name: f"{n:.4g}" for name, n in numbers.items()}, **attributes})


def words(parent, x, y, text, size, fill, middle=False, bold=False):
    at = {"x": f"{x:.4g}", "y": f"{y:.4g}", "font-size": str(size), "fill": fill}
    at.update({"text-anchor": "middle"} if middle else {}, **({"font-weight": "bold"} if bold else {}))
    ElementTree.SubElement(parent, "text", at).text = text


def indented(svg):
    """The text of an SVG, one element on each line; ElementTree itself can do that only from Python 3.9 on."""
    return ElementTree.tostring(svg, encoding="unicode").replace("><", ">\n<")
