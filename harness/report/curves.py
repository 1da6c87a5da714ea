"""Losses of many runs as a picture: the curves over each other, and below them how far each is from numpy."""

import math

from harness.report.svg import WIDTH, Picture, wide

LEFT, TALL = 40, 130  # pixels: of the scale's numbers, of a plot
RANKS = {4: ("out", 6), 2: ("w", 3.5), 1: ("x", 1.2)}  # colour and width of a curve: each is seen beside those above it
FLOOR, ALLOWED, TOP = 1e-9, 1e-4, 1e-3  # differences: what is less is drawn here; what tests allow; the plot's end


def picture(title, wanted, runs):
    """wanted: the losses by numpy; runs: (number of ranks, whether in a graph, differences of its losses from them)."""
    drawn = Picture(title)
    across = (WIDTH - LEFT - 8) / (len(wanted) - 1)
    low, high = math.floor(min(wanted)), math.ceil(max(wanted))

    def plot(words, ticks, height):
        """A frame with its scale; returns a function that draws a curve in it."""
        drawn.lines(0, words, fill="text", bold=True)
        top = drawn.down = drawn.down + 6
        drawn.rect(LEFT, top, WIDTH - LEFT - 8, TALL, stroke="quiet", stroke_width=0.8)
        for text, value in ticks:
            y = top + TALL * (1 - height(value))
            drawn.add("polyline", points=f"{LEFT - 4},{y:.5g} {LEFT},{y:.5g}", fill="none", stroke="quiet")
            drawn.text(LEFT - 7, y + 4, text, fill="quiet", anchor="end")
        for step in (1, *range(10, len(wanted) - 5, 10)):
            drawn.text(LEFT + across * (step - 1), top + TALL + 14, str(step), fill="quiet", anchor="middle")
        drawn.text(WIDTH - 8, top + TALL + 14, "step", fill="quiet", anchor="end")
        drawn.down = top + TALL + 20

        def curve(values, **look):
            points = [(LEFT + across * i, top + TALL * (1 - height(value))) for i, value in enumerate(values)]
            drawn.add("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **look)

        return curve

    curve = plot("loss", [(str(k), k) for k in range(low, high + 1)], lambda loss: (loss - low) / (high - low))
    curve(wanted, stroke="quiet", stroke_width=9)
    in_turn = sorted(runs, key=lambda run: (-run[0], run[1]))
    for ranks, _, off in in_turn:
        colour, width = RANKS[ranks]
        curve([loss + one for loss, one in zip(wanted, off)], stroke=colour, stroke_width=width)
    legend(drawn)

    def decades(value):
        return math.log10(max(abs(value), FLOOR) / FLOOR) / math.log10(TOP / FLOOR)

    ticks = [(f"1e{k}", 10.0**k) for k in range(round(math.log10(FLOOR)), round(math.log10(TOP)) + 1, 2)]
    curve = plot("difference of the loss from numpy float64", ticks, decades)
    curve([ALLOWED] * len(wanted), stroke="move", stroke_width=1.6)
    drawn.text(WIDTH - 14, drawn.down - 20 - TALL * decades(ALLOWED) - 4, "tests allow 1e-4", fill="move", anchor="end")
    for ranks, graph, off in in_turn:
        dashes = {"stroke_dasharray": "3 2"} if graph else {}
        curve(off, stroke=RANKS[ranks][0], stroke_width=0.8, **dashes)
    drawn.lines(0, "solid: eager; dashed: graph")
    return drawn


def legend(drawn):
    """A short line in its colour for each number of ranks, and for numpy."""
    x = 0
    entries = [(f"{ranks} rank{'s' * (ranks > 1)}", *look) for ranks, look in RANKS.items()]
    drawn.down += 14
    for words, colour, width in [("numpy", "quiet", 9), *entries]:
        y = drawn.down - 4
        drawn.add("polyline", points=f"{x},{y} {x + 14},{y}", fill="none", stroke=colour, stroke_width=width)
        drawn.text(x + 18, drawn.down, words)
        x += 18 + wide(words) + 8
    drawn.down += 10
