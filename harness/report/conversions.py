"""The table of SBP conversions as a picture: what 2 ranks hold before and after, the collective, and its bytes."""

from harness.measure.sbp import NAMES, Layout
from harness.report.atlas import formula
from harness.report.forward import in_words
from harness.report.svg import Picture

SHAPE, CELL, RANKS = (4, 6), 4, [0, 1]
LEFT, ACROSS, TALL = 64, 73, 58  # pixels: of what is before, of a cell


def blocks(drawn, x, y, sbp):
    """A tensor as each of the ranks holds it, side by side."""
    for rank in RANKS:
        block = Layout(sbp, RANKS).block(SHAPE, rank)
        colour = "partial" if sbp == "P" else "x"
        drawn.cells(x + rank * (SHAPE[1] * CELL + 4), y, CELL, block, SHAPE, colour, sbp == "P")


def picture(text, sent):
    """The Picture of the table. sent: {(old, new): what each rank sends, in units of the tensor}, in eager mode."""
    drawn = Picture(text)
    top = drawn.down
    drawn.text(0, top + 10, "rank 0, 1", fill="quiet")
    drawn.text(0, top + 26, "from ↓  to →", fill="quiet")
    for k, sbp in enumerate(NAMES):
        x = LEFT + k * ACROSS + 6
        drawn.text(x, top + 10, in_words(sbp))
        blocks(drawn, x, top + 16, sbp)
    drawn.down = top + 42
    for old in NAMES:
        drawn.text(0, drawn.down + 18, in_words(old))
        blocks(drawn, 0, drawn.down + 25, old)
        for k, new in enumerate(NAMES):
            cell(drawn, LEFT + k * ACROSS, drawn.down, old, new, sent[old, new])
        drawn.down += TALL
    drawn.down += 4
    drawn.lines(
        0, "numbers: what each of 2 ranks sends, in units of the tensor; in brackets: the formula, where it differs"
    )
    drawn.lines(0, "filled: what the rank holds; striped: one part of a sum")
    return drawn


def cell(drawn, x, y, old, new, sent):
    """One conversion: the darker, the more is sent."""
    dark = 0.3 * round(4 * max(sent)) / 4
    drawn.rect(x, y, ACROSS - 3, TALL - 3, "move" if dark else "none", fill_opacity=f"{dark:.3f}")
    drawn.rect(x, y, ACROSS - 3, TALL - 3, stroke="quiet", stroke_width=0.6)
    one = formula(RANKS, RANKS, old, new)
    words, middle = one.collective.split("-scatter"), x + (ACROSS - 3) / 2
    lines = [f"{words[0]}-", "scatter"] if len(words) > 1 else [one.collective]
    for number, line in enumerate(lines):
        drawn.text(middle, y + 16 + 13 * number, line, anchor="middle", fill="quiet" if max(sent) < 0.02 else "text")
    if max(sent) >= 0.02:
        theirs = one.total / len(RANKS)
        off = f" ({theirs:.2f})" if abs(max(sent) - theirs) > 0.02 else ""
        drawn.text(middle, y + 47, f"{max(sent):.2f}{off}", 12, bold=True, anchor="middle")
