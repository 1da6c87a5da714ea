"""Pictures as SVG text: shapes on a transparent ground, one colour for each tensor, for light and for dark pages."""

import re
import textwrap
import xml.etree.ElementTree as ElementTree
from string import Template

WIDTH = 358  # pixels of a page that a phone 390 wide shows: a picture is never shown smaller than it is
LETTER = 11  # the smallest letter
THEMES = {  # by the end of a file's name; each colour stands out from GitHub's ground, #ffffff or #0d1117
    "": {
        **{"x": "#2f6fd0", "w": "#b55c06", "w0": "#b55c06", "w1": "#8a6d00", "out": "#1f7f45", "partial": "#0b8080"},
        **{"gradient": "#cf3b3b", "state": "#7a55c0", "text": "#1f2328", "quiet": "#59636e", "move": "#a5308a"},
    },
    "-dark": {
        **{"x": "#6ea8fe", "w": "#f0943f", "w0": "#f0943f", "w1": "#d3b13a", "out": "#4fbf7a", "partial": "#3cc4c4"},
        **{"gradient": "#ff7b72", "state": "#b392f0", "text": "#e6edf3", "quiet": "#9198a1", "move": "#f08bd8"},
    },
}
GROUNDS = {"": "#ffffff", "-dark": "#0d1117"}


def colour_of(name):
    """The colour of a tensor, by its name: what is computed from others has that of out."""
    if name.endswith(("grad", "gradient")):
        return "gradient"
    known = re.match(r"(partial|x|w0|w1|w)\d*$", name)
    return known.group(1) if known else "out"


def wide(text, size=LETTER, bold=False):
    """About how wide a text is, in a wide font."""
    letters = sum(0.34 if one in "ijltfrI.,:;|()[]'- " else 0.92 if one in "mwMW@→←↓×=" else 0.58 for one in text)
    return letters * size * (1.06 if bold else 1)


class Picture:
    """What is drawn so far, from top to bottom; `down` is where it ends."""

    def __init__(self, title):
        """title: "name: what it does.", which becomes the heading."""
        self.down, self.striped = 0.0, set()
        self.root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self.root.set("font-family", "Helvetica, Arial, sans-serif")
        self.add("title", title)
        name, _, rest = title.rstrip(".").partition(": ")
        self.lines(0, name, size=14, fill="text", bold=True)
        self.lines(0, rest, size=12)
        self.down += 8

    def add(self, tag, text=None, inside=None, **attributes):
        """One element. `fill` and `stroke` name a colour of THEMES, which `svg` puts in."""
        for key in ("fill", "stroke"):
            if attributes.get(key, "none") != "none":
                attributes[key] = f"${attributes[key]}"
        written = {
            key.replace("_", "-"): value if isinstance(value, str) else f"{value:.5g}"
            for key, value in attributes.items()
        }
        element = ElementTree.SubElement(self.root if inside is None else inside, tag, written)
        element.text = text
        return element

    def text(self, x, y, text, size=LETTER, fill="text", anchor="start", bold=False, turned=False, then=None):
        """A line of text; y is where its letters stand. then: what follows on the line, thin and quiet."""
        more = {"font_weight": "bold"} if bold else {}
        more.update({"transform": f"rotate(-90 {x:.5g} {y:.5g})"} if turned else {})
        line = self.add("text", text, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, **more)
        if then:
            self.add("tspan", f" {then}", line, fill="quiet", font_weight="normal")

    def lines(self, x, text, size=LETTER, fill="quiet", bold=False):
        """A text from `down` on, broken where it would be wider than the picture."""
        letters = int(WIDTH / (wide(text, size, bold) / len(text)))
        for line in textwrap.wrap(text, letters, break_on_hyphens=False):
            self.down += size + 4
            self.text(x, self.down - 3, line, size, fill, bold=bold)

    def heading(self, text):
        self.lines(0, text, size=12, fill="text", bold=True)

    def move(self, x, y, lines, anchor="start", size=12):
        """What moves, in words: the first line is its name, in letters of this size."""
        for number, line in enumerate(lines):
            self.text(x, y + 15 * number, line, LETTER if number else size, "move", anchor, bold=not number)

    def rect(self, x, y, width, height, fill="none", **more):
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def dashed(self, x, y, width, height):
        self.rect(x, y, width, height, stroke="quiet", stroke_dasharray="2 2")

    def tinted(self, x, y, width, height, colour):
        self.rect(x, y, width, height, colour, fill_opacity="0.3", stroke=colour)

    def legend(self, *entries):
        """One line: a square of each colour and what it means; entries: (x, colour, words)."""
        for x, colour, words in entries:
            self.tinted(x, self.down + 4, 9, 9, colour)
            self.text(x + 14, self.down + 13, words, fill="quiet")
        self.down += 20

    def cells(self, x, y, cell, block, shape, colour, partial=False):
        """A tensor as a rank holds it: its cells, striped if partial, in a dashed outline of the whole tensor."""
        (top, bottom), (first, last) = ([(0, 1)] * 2 + list(block))[-2:]
        rows, columns = ([1, 1] + list(shape))[-2:]
        if (top, bottom, first, last) != (0, rows, 0, columns):
            self.dashed(x, y, columns * cell - 1, rows * cell - 1)
        side = f"h{cell - 1}v{cell - 1}h-{cell - 1}z"
        places = [(x + j * cell, y + i * cell) for i in range(top, bottom) for j in range(first, last)]
        squares = self.add("path", d="".join(f"M{left:.5g} {up:.5g}{side}" for left, up in places), fill=colour)
        if partial:
            squares.set("fill", f"url(#P-{colour})")
            self.stripe(colour)

    def stripe(self, colour):
        """The pattern of stripes in a colour, once."""
        if colour not in self.striped:
            self.striped.add(colour)
            pattern = {"width": 4, "height": 4, "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
            stripes = self.add("pattern", id=f"P-{colour}", **pattern)
            self.add("rect", inside=stripes, width=2.4, height=4, fill=colour)

    def arrow(self, *points, fill="move", width=1.6):
        """A line through points with a head at its end, which is drawn upright or level."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = ((x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0))
        head = [(x1, y1), (x1 - 6 * dx - 3.5 * dy, y1 - 6 * dy - 3.5 * dx)]
        head.append((x1 - 6 * dx + 3.5 * dy, y1 - 6 * dy + 3.5 * dx))
        line = [*points[:-1], (x1 - 4 * dx, y1 - 4 * dy)]
        self.add("polyline", points=at(line), fill="none", stroke=fill, stroke_width=width)
        self.add("polygon", points=at(head), fill=fill)

    def svg(self, theme):
        """The file's text in one of THEMES."""
        height = f"{self.down + 20:.0f}"
        self.root.attrib.update(width=str(WIDTH), height=height, viewBox=f"0 0 {WIDTH} {height}")
        text = Template(ElementTree.tostring(self.root, encoding="unicode")).substitute(THEMES[theme])
        # one element on each line; ElementTree itself can do that only from Python 3.9 on
        return re.sub("><(?!tspan)", ">\n<", text) + "\n"


def at(points):
    return " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
