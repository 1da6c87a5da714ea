"""docs/explore.html, one file that needs no other: a template, styles, scripts, and what records.py has measured."""

import json
from pathlib import Path

from harness.explore import records

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "explore.html"
STYLES = ("explore.css", "timeline.css")
PARTS = ("words", "words_steps", "matmul", "steps", "timeline", "picture", "details", "explore")
SCRIPTS = tuple(f"{name}.js" for name in PARTS)


def together(names):
    return "\n".join((HERE / name).read_text() for name in names)


def packed(measured):
    """The records without repetition: what ranks hold of x, w and out are places in a list. See Matmul.unpack."""
    places = {}

    def pack(name, value):
        if isinstance(value, dict):
            return {key: pack(key, one) for key, one in value.items()}
        if name in ("x", "w", "out"):
            return places.setdefault(json.dumps(value, separators=(",", ":")), len(places))
        return value

    runs = pack("runs", measured["runs"])
    return {**measured, "held": [json.loads(held) for held in places], "runs": runs}


def page(measured):
    """The text of the page; measured: the text of docs/explore.json."""
    compact = json.dumps(packed(json.loads(measured)), separators=(",", ":"))
    parts = {
        "/* STYLES */": together(STYLES),
        "/* RECORDS */": compact.replace("</", "<\\/"),  # nothing in it may end the element that holds it
        "/* SCRIPTS */": together(SCRIPTS),
    }
    text = (HERE / "explore.html").read_text()
    for mark, part in parts.items():
        before, after = text.split(mark)
        text = f"{before}{part.strip()}{after}"
    return text


def write():
    """Make the page of docs/explore.json. Returns whether it has changed."""
    text = page(records.PATH.read_text())
    changed = not PAGE.exists() or PAGE.read_text() != text
    if changed:
        PAGE.write_text(text)
    return changed


def main():
    print("measuring the matmuls of the explorable page: 3 minutes", flush=True)
    for path, changed in ((records.PATH, records.write()), (PAGE, write())):
        print(f"{path.relative_to(ROOT)}: {'made anew' if changed else 'as it was'}")
    return 0


if __name__ == "__main__":
    write()
