"""An SVG picture that is drawn from top to bottom, in light and in dark."""

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
