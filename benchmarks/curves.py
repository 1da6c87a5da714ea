"""Losses of many runs as an SVG picture: the curves over each other, and below how far each is from numpy."""

import math
import textwrap
import xml.etree.ElementTree as ElementTree
from string import Template

WIDTH = 358  # pixels of a page that a phone 390 wide shows: a picture is never shown smaller than it is
LETTER = 11  # the smallest letter
THEMES = {  # by the end of a file's name; each colour stands out from GitHub's ground, #ffffff or #0d1117
    "": {"x": "#2f6fd0", "w": "#b55c06", "out": "#1f7f45", "text": "#1f2328", "quiet": "#59636e", "move": "#a5308a"},
    "-dark": {
        "x": "#6ea8fe",
        "w": "#f0943f",
        "out": "#4fbf7a",
        "text": "#e6edf3",
        "quiet": "#9198a1",
        "move": "#f08bd8",
    },
}
LEFT, TALL = 40, 130  # pixels: of the scale's numbers, of a plot
RANKS = {4: ("out", 6), 2: ("w", 3.5), 1: ("x", 1.2)}  # colour and width of a curve: each is seen beside those above it
FLOOR, ALLOWED, TOP = 1e-9, 1e-4, 1e-3  # differences: what is less is drawn here; what tests allow; the plot's end


def picture(title, expected, runs):
    """expected: the losses by numpy; runs: (number of ranks, whether in a graph, differences of its losses from it)."""
    drawn = Picture(title)
    across = (WIDTH - LEFT - 8) / (len(expected) - 1)
    low, high = math.floor(min(expected)), math.ceil(max(expected))

    def plot(words, ticks, height):
        """A frame with its scale; returns a function that draws a curve in it."""
        drawn.lines(0, words, fill="text", bold=True)
        top = drawn.down = drawn.down + 6
        drawn.rect(LEFT, top, WIDTH - LEFT - 8, TALL, stroke="quiet", stroke_width=0.8)
        for text, value in ticks:
            y = top + TALL * (1 - height(value))
            drawn.add("polyline", points=f"{LEFT - 4},{y:.5g} {LEFT},{y:.5g}", fill="none", stroke="quiet")
            drawn.text(LEFT - 7, y + 4, text, fill="quiet", anchor="end")
        for step in (1, *range(10, len(expected) - 5, 10)):
            drawn.text(LEFT + across * (step - 1), top + TALL + 14, str(step), fill="quiet", anchor="middle")
        drawn.text(WIDTH - 8, top + TALL + 14, "step", fill="quiet", anchor="end")
        drawn.down = top + TALL + 20

        def curve(values, **look):
            points = [(LEFT + across * i, top + TALL * (1 - height(value))) for i, value in enumerate(values)]
            drawn.add("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **look)

        return curve

    curve = plot("loss", [(str(k), k) for k in range(low, high + 1)], lambda loss: (loss - low) / (high - low))
    curve(expected, stroke="quiet", stroke_width=9)
    in_turn = sorted(runs, key=lambda run: (-run[0], run[1]))
    for ranks, _, off in in_turn:
        colour, width = RANKS[ranks]
        curve([loss + difference for loss, difference in zip(expected, off)], stroke=colour, stroke_width=width)
    legend(drawn)

    def decades(value):
        return math.log10(max(abs(value), FLOOR) / FLOOR) / math.log10(TOP / FLOOR)

    ticks = [(f"1e{k}", 10.0**k) for k in range(round(math.log10(FLOOR)), round(math.log10(TOP)) + 1, 2)]
    curve = plot("difference of the loss from numpy float64", ticks, decades)
    curve([ALLOWED] * len(expected), stroke="move", stroke_width=1.6)
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


def wide(text, size=LETTER, bold=False):
    """About how wide a text is, in a wide font."""
    narrow, broad = "ijltfrI.,:;|()[]'- ", "mwMW@→←↓×="
    letters = sum(0.34 if letter in narrow else 0.92 if letter in broad else 0.58 for letter in text)
    return letters * size * (1.06 if bold else 1)


class Picture:
    """What is drawn so far, from top to bottom; `down` is where it ends."""

    def __init__(self, title):
        """title: "name: what it does.", which becomes the heading."""
        self.down = 0.0
        self.root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self.root.set("font-family", "Helvetica, Arial, sans-serif")
        self.add("title", title)
        name, _, rest = title.rstrip(".").partition(": ")
        self.lines(0, name, size=14, fill="text", bold=True)
        self.lines(0, rest, size=12)
        self.down += 8

    def add(self, tag, text=None, **attributes):
        """One element. `fill` and `stroke` name a colour of THEMES, which `svg` puts in."""
        for key in ("fill", "stroke"):
            if attributes.get(key, "none") != "none":
                attributes[key] = f"${attributes[key]}"
        written = {
            key.replace("_", "-"): value if isinstance(value, str) else f"{value:.5g}"
            for key, value in attributes.items()
        }
        ElementTree.SubElement(self.root, tag, written).text = text

    def text(self, x, y, text, size=LETTER, fill="text", anchor="start", bold=False):
        """A line of text; y is where its letters stand."""
        more = {"font_weight": "bold"} if bold else {}
        self.add("text", text, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, **more)

    def lines(self, x, text, size=LETTER, fill="quiet", bold=False):
        """A text from `down` on, broken where it would be wider than the picture."""
        letters = int(WIDTH / (wide(text, size, bold) / len(text)))
        for line in textwrap.wrap(text, letters, break_on_hyphens=False):
            self.down += size + 4
            self.text(x, self.down - 3, line, size, fill, bold=bold)

    def rect(self, x, y, width, height, fill="none", **more):
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def svg(self, theme):
        """The file's text in one of THEMES."""
        height = f"{self.down + 20:.0f}"
        self.root.attrib.update(width=str(WIDTH), height=height, viewBox=f"0 0 {WIDTH} {height}")
        text = Template(ElementTree.tostring(self.root, encoding="unicode")).substitute(THEMES[theme])
        # one element on each line; ElementTree itself can do that only from Python 3.9 on
        return text.replace("><", ">\n<") + "\n"
