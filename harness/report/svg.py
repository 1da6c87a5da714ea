"""Plots as SVG text: lines and words on a transparent ground, in colours for light pages and for dark ones."""

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


def wide(text, size=LETTER, bold=False):
    """About how wide a text is, in a wide font."""
    letters = sum(0.34 if one in "ijltfrI.,:;|()[]'- " else 0.92 if one in "mwMW@→←↓×=" else 0.58 for one in text)
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
