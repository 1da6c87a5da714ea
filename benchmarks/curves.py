"""Losses of many runs as an SVG picture: all curves in a plot, and below it their differences from numpy."""

import math
import textwrap
import xml.etree.ElementTree as ElementTree
from string import Template

WIDTH = 358  # pixels: the width of a page on a phone 390 pixels wide, so that a picture is never scaled down
LETTER = 11  # pixels: the smallest font
THEMES = {  # suffix of the file's name -> colours that stand out on GitHub's background, #ffffff or #0d1117
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
LEFT, TALL = 40, 130  # pixels: width of the scale, height of a plot
RANKS = {
    4: ("out", 6),
    2: ("w", 3.5),
    1: ("x", 1.2),
}  # colour and width of a curve, so that all are visible on top of each other
FLOOR, ALLOWED, TOP = 1e-9, 1e-4, 1e-3  # differences: the smallest that is drawn, what tests allow, the largest


def picture(title, expected, runs):
    """A Picture of losses. expected: by numpy; runs: [(number of ranks, whether in a graph, differences from them)]."""
    drawn = Picture(title)
    runs = sorted(runs, key=lambda run: (-run[0], run[1]))
    plot_losses(drawn, expected, runs)
    legend(drawn)
    plot_differences(drawn, len(expected), runs)
    drawn.lines(0, "solid: eager; dashed: graph")
    return drawn


def plot_losses(drawn, expected, runs):
    """The losses of all runs over those of numpy."""
    low, high = math.floor(min(expected)), math.ceil(max(expected))
    ticks = [(str(loss), loss) for loss in range(low, high + 1)]
    plot = Plot(drawn, "loss", ticks, lambda loss: (loss - low) / (high - low), len(expected))
    plot.curve(expected, stroke="quiet", stroke_width=9)
    for ranks, _, differences in runs:
        colour, width = RANKS[ranks]
        losses = [loss + difference for loss, difference in zip(expected, differences)]
        plot.curve(losses, stroke=colour, stroke_width=width)


def plot_differences(drawn, steps, runs):
    """The differences of all runs from numpy, on a logarithmic scale."""

    def decades(value):
        return math.log10(max(abs(value), FLOOR) / FLOOR) / math.log10(TOP / FLOOR)

    ticks = [(f"1e{k}", 10.0**k) for k in range(round(math.log10(FLOOR)), round(math.log10(TOP)) + 1, 2)]
    plot = Plot(drawn, "difference of the loss from numpy float64", ticks, decades, steps)
    plot.curve([ALLOWED] * steps, stroke="move", stroke_width=1.6)
    drawn.text(WIDTH - 14, drawn.down - 20 - TALL * decades(ALLOWED) - 4, "tests allow 1e-4", fill="move", anchor="end")
    for ranks, graph, differences in runs:
        dashes = {"stroke_dasharray": "3 2"} if graph else {}
        plot.curve(differences, stroke=RANKS[ranks][0], stroke_width=0.8, **dashes)


class Plot:
    """A frame in a picture with the scales of its axes, for curves over the steps of training."""

    def __init__(self, drawn, heading, ticks, height, steps):
        """ticks: [(text, value)] of the vertical axis. height: a function from a value to its height, 0 to 1."""
        self.drawn, self.height = drawn, height
        self.across = (WIDTH - LEFT - 8) / (steps - 1)  # pixels from a step to the next
        drawn.lines(0, heading, fill="text", bold=True)
        self.top = drawn.down + 6
        drawn.rect(LEFT, self.top, WIDTH - LEFT - 8, TALL, stroke="quiet", stroke_width=0.8)
        for text, value in ticks:
            y = self.y(value)
            drawn.add("polyline", points=f"{LEFT - 4},{y:.5g} {LEFT},{y:.5g}", fill="none", stroke="quiet")
            drawn.text(LEFT - 7, y + 4, text, fill="quiet", anchor="end")
        below = self.top + TALL + 14
        for step in (1, *range(10, steps - 5, 10)):
            drawn.text(LEFT + self.across * (step - 1), below, str(step), fill="quiet", anchor="middle")
        drawn.text(WIDTH - 8, below, "step", fill="quiet", anchor="end")
        drawn.down = self.top + TALL + 20

    def y(self, value):
        return self.top + TALL * (1 - self.height(value))

    def curve(self, values, **look):
        """Draw a curve. look: attributes of SVG."""
        points = [f"{LEFT + self.across * i:.1f},{self.y(value):.1f}" for i, value in enumerate(values)]
        self.drawn.add("polyline", points=" ".join(points), fill="none", **look)


def legend(drawn):
    """A short line in the colour of numpy, and of each number of ranks."""
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
    """The approximate width of a text in pixels, in a wide font."""
    narrow, broad = "ijltfrI.,:;|()[]'- ", "mwMW@→←↓×="
    letters = sum(0.34 if letter in narrow else 0.92 if letter in broad else 0.58 for letter in text)
    return letters * size * (1.06 if bold else 1)


class Picture:
    """An SVG that is drawn from top to bottom; `down` is the end so far."""

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
        """Add an element. `fill` and `stroke` name colours of THEMES, which `svg` fills in."""
        for key in ("fill", "stroke"):
            if attributes.get(key, "none") != "none":
                attributes[key] = f"${attributes[key]}"
        written = {
            key.replace("_", "-"): value if isinstance(value, str) else f"{value:.5g}"
            for key, value in attributes.items()
        }
        ElementTree.SubElement(self.root, tag, written).text = text

    def text(self, x, y, text, size=LETTER, fill="text", anchor="start", bold=False):
        """Add a line of text; y: of its baseline."""
        more = {"font_weight": "bold"} if bold else {}
        self.add("text", text, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, **more)

    def lines(self, x, text, size=LETTER, fill="quiet", bold=False):
        """Add a text at `down`, wrapped at the width of the picture."""
        letters = int(WIDTH / (wide(text, size, bold) / len(text)))
        for line in textwrap.wrap(text, letters, break_on_hyphens=False):
            self.down += size + 4
            self.text(x, self.down - 3, line, size, fill, bold=bold)

    def rect(self, x, y, width, height, fill="none", **more):
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def svg(self, theme):
        """The text of the file, in a theme of THEMES."""
        height = f"{self.down + 20:.0f}"
        self.root.attrib.update(width=str(WIDTH), height=height, viewBox=f"0 0 {WIDTH} {height}")
        text = Template(ElementTree.tostring(self.root, encoding="unicode")).substitute(THEMES[theme])
        # each element on a line; ElementTree can do that only from Python 3.9 on
        return text.replace("><", ">\n<") + "\n"
