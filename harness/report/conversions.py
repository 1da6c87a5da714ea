"""The table of SBP conversions as a picture: what 2 ranks hold before and after, the collective, and its bytes."""

from harness.measure.sbp import NAMES, Layout
from harness.report.atlas import formula
from harness.report.forward import in_words
from harness.report.svg import Picture

SHAPE, CELL, RANKS = (4, 6), 4, [0, 1]
LEFT, ACROSS, TALL = 64, 73, 58  # pixels: of what is before, of a cell


def picture(text, sent):
    """The Picture of the table. sent: {(old, new): what each rank sends, in units of the tensor}, in eager mode."""
    drawn = Picture(text)
    drawn.text(0, drawn.down + 10, "rank 0, 1", fill="quiet")
    drawn.text(0, drawn.down + 26, "from ↓  to →", fill="quiet")
    for k, sbp in enumerate(NAMES):
        held(drawn, LEFT + k * ACROSS + 6, drawn.down + 10, sbp)
    drawn.down += 42
    for old in NAMES:
        held(drawn, 0, drawn.down + 18, old)
        for k, new in enumerate(NAMES):
            cell(drawn, LEFT + k * ACROSS, drawn.down, old, new, max(sent[old, new]))
        drawn.down += TALL
    drawn.down += 4
    drawn.lines(
        0, "numbers: what each of 2 ranks sends, in units of the tensor; in brackets: the formula, where it differs"
    )
    drawn.lines(0, "filled: what the rank holds; striped: one part of a sum")
    return drawn


def held(drawn, x, y, sbp):
    """The name of an SBP, and below it a tensor as each of the ranks holds it, side by side."""
    drawn.text(x, y, in_words(sbp))
    for rank in RANKS:
        block, colour = Layout(sbp, RANKS).block(SHAPE, rank), "partial" if sbp == "P" else "x"
        drawn.cells(x + rank * (SHAPE[1] * CELL + 4), y + 7, CELL, block, SHAPE, colour, sbp == "P")


def cell(drawn, x, y, old, new, sent):
    """One conversion: the darker, the more is sent."""
    dark, middle = 0.3 * round(4 * sent) / 4, x + (ACROSS - 3) / 2
    drawn.rect(x, y, ACROSS - 3, TALL - 3, "move" if dark else "none", fill_opacity=f"{dark:.3f}")
    drawn.rect(x, y, ACROSS - 3, TALL - 3, stroke="quiet", stroke_width=0.6)
    one = formula(RANKS, RANKS, old, new)
    for number, line in enumerate(one.collective.replace("-scatter", "-\nscatter").split("\n")):
        drawn.text(middle, y + 16 + 13 * number, line, anchor="middle", fill="quiet" if sent < 0.02 else "text")
    if sent >= 0.02:
        theirs = one.total / len(RANKS)
        off = f" ({theirs:.2f})" if abs(sent - theirs) > 0.02 else ""
        drawn.text(middle, y + 47, f"{sent:.2f}{off}", 12, bold=True, anchor="middle")
