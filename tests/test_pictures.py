"""The pictures of the docs, as a reader meets them: letters large enough, colours that stand out, nothing cut off."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from harness.report import pictures, svg, timeline
from tests.cases import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "recipes").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = (830, 358)  # pixels of a page's text on a screen, and on a phone that is 390 wide
SVG = "{http://www.w3.org/2000/svg}"
MADE = (*pictures.NAMES, "gpt_losses")  # this one by ./launch.sh meshes
DRAWN = pytest.mark.parametrize("name, theme", list(itertools.product(MADE, svg.THEMES)))


def picture(name, theme=""):
    return ElementTree.parse(pictures.PICTURES / f"{name}{theme}.svg").getroot()


def luminance(colour):
    """The relative luminance of #rrggbb, as WCAG 2 defines it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def box(one):
    """(left, top, right, bottom) of an element; of a text about, in a narrow font. None: it draws nothing itself."""
    tag = one.tag.replace(SVG, "")
    if tag == "rect":
        x, y, width, height = (float(one.get(key)) for key in ("x", "y", "width", "height"))
        return x, y, x + width, y + height
    if tag in ("polyline", "polygon"):
        points = np.array(numbers(one.get("points"))).reshape(-1, 2)
        return (*points.min(0), *points.max(0))
    if tag == "path":  # squares: where each begins, and their side
        starts = np.array([numbers(start) for start in re.findall(r"M([^h]+)h", one.get("d"))])
        side = numbers(re.search(r"h([^v]+)v", one.get("d")).group(1))[0]
        return (*starts.min(0), *(starts.max(0) + side))
    if tag != "text":
        return None
    size, x, y = (float(one.get(key)) for key in ("font-size", "x", "y"))
    long = 0.45 * size * len("".join(one.itertext()))
    before = {"start": 0, "middle": long / 2, "end": long}[one.get("text-anchor")]
    if one.get("transform"):
        return x - 0.7 * size, y - long + before, x, y + before
    return x - before, y - 0.7 * size, x - before + long, y


@DRAWN
def test_letters_are_large_enough_on_a_screen_and_on_a_phone(name, theme):
    root = picture(name, theme)
    natural = float(root.get("width"))
    letters = [float(text.get("font-size")) for text in root.iter(f"{SVG}text")]
    for page in SHOWN:  # a page never shows a picture larger than it is
        assert min(letters) * min(natural, page) / natural >= 11
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


@DRAWN
def test_nothing_is_cut_off_and_no_text_covers_another(name, theme):
    root = picture(name, theme)
    width, height = float(root.get("width")), float(root.get("height"))
    in_patterns = [one for pattern in root.iter(f"{SVG}pattern") for one in pattern]
    boxes = {one: box(one) for one in root.iter() if one.get("id") is None and one not in in_patterns and box(one)}
    for one, (left, top, right, bottom) in boxes.items():
        assert left >= -0.5 and top >= -0.5 and right <= width + 0.5 and bottom <= height + 0.5, one.attrib
    for one, other in itertools.combinations([one for one in boxes if one.tag == f"{SVG}text"], 2):
        (left, top, right, bottom), there = boxes[one], boxes[other]
        apart = right <= there[0] or there[2] <= left or bottom <= there[1] or there[3] <= top
        assert apart, ("".join(one.itertext()), "".join(other.itertext()))


@DRAWN
def test_colours_stand_out_from_the_page(name, theme):
    for one in picture(name, theme).iter():
        for colour in (one.get("fill"), one.get("stroke")):
            if colour and colour.startswith("#"):
                least = 4.5 if one.tag in (f"{SVG}text", f"{SVG}tspan") else 3
                assert contrast(colour, svg.GROUNDS[theme]) >= least, (one.tag, colour)


@pytest.mark.parametrize("name", MADE)
def test_light_and_dark_differ_in_colours_only(name):
    light, dark = ((pictures.PICTURES / f"{name}{theme}.svg").read_text() for theme in svg.THEMES)
    assert light != dark and re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)


def test_each_rank_of_the_first_picture_has_the_cells_that_it_holds():
    cells = {}
    for path in picture("data_parallel").iter(f"{SVG}path"):
        cells.setdefault(path.get("fill"), []).append(path.get("d").count("M"))
    colours = svg.THEMES[""]
    rows = [len(part) for part in np.array_split(range(4), 2)]
    assert cells == {
        colours["x"]: [5 * n for n in rows],
        colours["w"]: [5 * 8, 5 * 8],
        colours["out"]: [8 * n for n in rows],
    }


def test_a_tensor_has_the_same_colour_under_each_of_its_names():
    assert [svg.colour_of(name) for name in ("x", "x0", "w", "w1", "out", "out0", "hidden")] == [
        *("x", "x", "w", "w1", "out", "out", "out")
    ]
    assert svg.colour_of("w0 grad") == "gradient" and svg.colour_of("x @ w0") == "out"
    for colours in svg.THEMES.values():
        kinds = [colours[kind] for kind in ("x", "w0", "w1", "out", "partial", "gradient", "state")]
        assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_show_pictures_in_light_and_dark_and_say_what_is_in_them(path):
    text = path.read_text()
    parts = re.findall(r"<picture>(.*?)</picture>", text, flags=re.DOTALL)
    assert len(parts) == text.count("<picture>") == text.count("<img")
    for part in parts:
        [dark] = re.findall(r'<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">', part)
        [(words, light)] = re.findall(r'<img align="top" alt="([^"]+)" src="([^"]+)">', part)
        assert dark == light.replace(".svg", "-dark.svg") and len(words) > 20
        assert (path.parent / light).exists() and (path.parent / dark).exists()


def test_every_picture_is_on_a_page():
    text = "".join(path.read_text() for path in PAGES)
    assert [name for name in MADE if f"pictures/{name}.svg" not in text] == []


@pytest.mark.parametrize("n, m", [(2, 4), (2, 1), (3, 6), (4, 8)])
def test_ranks_of_a_drawn_pipeline_are_idle_for_the_share_of_the_formula(n, m):
    """All micro-batches forward, then all backward, as eager mode runs them; a backward takes twice as long."""
    blocks = []
    for what, colour, step in (("forward", "out", 1), ("backward", "gradient", -1)):
        for part, stage in ((part, stage) for part in range(m)[::step] for stage in range(n)[::step]):
            source = stage - step
            if source in range(n):
                layer = stage if what == "forward" else source
                blocks.append(timeline.Block("send", layer, part, [source], colour, [1.0], [stage]))
            blocks.append(timeline.Block(what, stage, part, [stage], colour))
    blocks += [timeline.Block("update", None, None, [rank], "state") for rank in range(n)]
    places = timeline.placed(blocks, lambda block: {"forward": 10, "backward": 20, "update": 5}.get(block.what, 0))
    whole = max(end for _, end in places) - 5
    for rank in range(n):
        waits = sum(end - start for start, end in timeline.idle(blocks, places, rank))
        assert np.isclose(waits / whole, (n - 1) / (m + n - 1))
