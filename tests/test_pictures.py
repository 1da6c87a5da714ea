"""The pictures of the docs: they are legible, and what they draw is what they claim of a run; see drawings.py.

That a run does what they claim is seen in slow/test_claims_of_pictures.py.
"""

import ast
import itertools
import re

import numpy as np
import pytest

from harness.measure import theory
from harness.measure.sbp import NAMES as SBPS
from harness.start.recipe import path_of
from tests.cases import ROOT
from tests.drawings import (
    NAMES,
    PICTURES,
    SVG,
    THEMES,
    block_in_words,
    claim,
    claiming,
    drawn_as,
    groups,
    move_in_words,
    near,
    numbers_in,
    picture,
    sbp_in_words,
    spans,
    tensors_of,
    texts,
)

PAGES = [ROOT / "README.md", *sorted((ROOT / "recipes").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
GROUNDS = {"": "#ffffff", "-dark": "#0d1117"}  # of GitHub's pages
MOVES = {"": "#a5308a", "-dark": "#f08bd8"}  # the colour of what ranks send each other, and of nothing else
SHOWN = (830, 358)  # pixels of a page's text on a screen, and on a phone that is 390 wide
ALL = (*NAMES, "gpt_losses")  # this one by ./launch.sh meshes
DRAWN = pytest.mark.parametrize("name, theme", list(itertools.product(ALL, THEMES)))
EQUATIONS, STEPS = claiming("matmuls", "moves"), claiming("steps", "kept")
UNIT = {"kept": 70, "bar": 80, "strategy": 54}  # pixels of a bar of length 1
PAD = 2  # pixels from what is drawn to its dashed outline, so that it covers none of the dashes


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
                assert contrast(colour, GROUNDS[theme]) >= least, (one.tag, colour)


@pytest.mark.parametrize("name", ALL)
def test_light_and_dark_differ_in_colours_only(name):
    light, dark = ((PICTURES / f"{name}{theme}.svg").read_text() for theme in THEMES)
    assert light != dark and re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)


def both_themes(names):
    return pytest.mark.parametrize("name, theme", list(itertools.product(names, THEMES)))


@both_themes(NAMES)
def test_what_moves_has_one_colour(name, theme):
    root = picture(name, theme)
    arrows = [one.get("stroke") for one in root.iter(f"{SVG}polyline")]
    arrows += [one.get("fill") for one in root.iter(f"{SVG}polygon")]
    steps = groups(root, "step")
    local = [one for one in steps if one.get("data-step").split()[0] in ("forward", "backward", "update")]
    collectives = [rect for one in steps if one not in local for rect in one.iter(f"{SVG}rect")]
    assert {*arrows, *(rect.get("fill") for rect in collectives)} <= {MOVES[theme]}
    others = [one for group in (*local, *groups(root, "tensor"), *groups(root, "kept")) for one in group.iter()]
    assert MOVES[theme] not in [one.get(key) for one in others for key in ("fill", "stroke")]


def cells_of(group):
    """({(row, column)} of a tensor that are drawn for a rank, whether they are striped)."""
    [path] = group.iter(f"{SVG}path")
    starts = np.array([numbers(start) for start in re.findall(r"M([^h]+)h", path.get("d"))])
    side = numbers(re.search(r"h([^v]+)v", path.get("d")).group(1))[0] + 1
    outlines = [rect for rect in group.iter(f"{SVG}rect") if rect.get("stroke-dasharray")]  # of the whole tensor
    origin = [float(outlines[0].get(key)) + PAD for key in "xy"] if outlines else starts.min(0)
    columns, rows = ((starts - origin) / side).round(4).T.tolist()
    return set(zip(rows, columns)), path.get("fill").startswith("url(#P-")


@both_themes(EQUATIONS)
def test_blocks_are_those_of_the_layout(name, theme):
    root, wanted, words = picture(name, theme), {}, {}
    for tensor in tensors_of(claim(root)):
        shape, layout = drawn_as(tensor)
        for rank in layout.members:
            rows, columns = (range(start, stop) for start, stop in layout.block(shape, rank))
            cells = {(float(i), float(j)) for i in rows for j in columns}
            wanted[tensor["name"], str(rank)] = (cells, "P" in layout.axes)
            words[tensor["name"], str(rank)] = " ".join(block_in_words(tensor, rank))
    found = [((one.get("data-tensor"), one.get("data-rank")), one) for one in groups(root, "tensor")]
    assert {key for key, _ in found} == set(wanted)
    for key, group in found:
        assert cells_of(group) == wanted[key], key
        assert " ".join(texts(group)) in ("", words[key]), key


@both_themes(EQUATIONS)
def test_blocks_have_the_colour_of_their_heading(name, theme):
    root = picture(name, theme)
    stripes = {f"url(#{one.get('id')})": one[0].get("fill") for one in root.iter(f"{SVG}pattern")}
    colours = {(text.text, text.get("fill")) for text in root.iter(f"{SVG}text") if len(text)}  # bold, then the shape
    assert len(colours) == len({heading for heading, _ in colours})
    for group in groups(root, "tensor"):
        fill = next(group.iter(f"{SVG}path")).get("fill")
        assert (group.get("data-tensor"), stripes.get(fill, fill)) in colours


@both_themes(EQUATIONS)
def test_equations_say_shapes_sbps_and_moves(name, theme):
    root = picture(name, theme)
    said, claimed = texts(root), claim(root)
    headings = [
        (f"{tensor['name']} ({', '.join(map(str, tensor['shape']))})", sbp_in_words(tensor))
        for tensor in tensors_of(claimed)
    ]
    moves = [tuple(move_in_words(move)) for move in claimed["moves"]]
    for lines in [*headings, *moves]:
        assert lines in [tuple(said[k : k + len(lines)]) for k in range(len(said))], lines
    arrows = [f"{amount:.2f}" for amount in claimed.get("sends", {}).values()]
    assert numbers_in(said) == numbers_in([line for lines in moves for line in lines] + arrows)
    in_words = {
        f"{name} {shape}" for line in said for name, shape in re.findall(r"^(\S.*) (\((?:s, )?\d+, \d+\))$", line)
    }
    assert in_words == {words for words, _ in headings}
    assert any(line.startswith("nothing moves: each rank sends 0 bytes") for line in said) == (not moves)


@pytest.mark.parametrize("name", [name for name in (*EQUATIONS, *STEPS) if "part" not in claim(picture(name))])
def test_headings_and_names_are_those_of_the_recipe(name):
    root = picture(name)
    text = ast.get_docstring(ast.parse(path_of(claim(root)["recipe"]).read_text()))
    assert root.find(f"{SVG}title").text == text.split("\n")[0]
    names = {tensor["name"] for tensor in tensors_of(claim(root))} if name in EQUATIONS else set()
    assert {one for one in names if one.isidentifier()} <= {*re.findall(r"\w+", text), "hidden"}


def step_in_words(step, micro_batches):
    """What stands in the block of a step: its number of the micro-batch, or its name and layer."""
    what, *rest = step.split()
    if what in ("forward", "backward"):
        return [rest[1]] if micro_batches > 1 else [what, rest[0]]
    return [] if what == "send" else [" ".join([what, *rest[:1]])]


@both_themes(STEPS)
def test_blocks_of_a_step_are_in_its_order(name, theme):
    root = picture(name, theme)
    claimed, drawn = claim(root), groups(root, "step")
    for rank in range(claimed["ranks"]):
        wanted = [one["step"] for one in claimed["steps"] if rank in one["ranks"] and "to" not in one]
        own = [one for one in drawn if str(rank) in one.get("data-ranks").split() and one.get("data-to") is None]
        own.sort(key=lambda group: spans(group, "x")[0])
        assert [one.get("data-step") for one in own] == wanted
        ends = [sum(spans(one, "x")) for one in own]
        assert all(end <= spans(one, "x")[0] for end, one in zip(ends, own[1:]))
    arrows = [
        (one.get("data-step"), [int(one.get("data-ranks"))], [int(one.get("data-to"))])
        for one in drawn
        if one.get("data-to")
    ]
    assert arrows == [(one["step"], one["ranks"], one["to"]) for one in claimed["steps"] if "to" in one]
    for group in drawn:
        assert texts(group) == step_in_words(group.get("data-step"), claimed["options"].get("micro_batches", 1))


@both_themes(STEPS)
def test_numbers_of_a_step_are_those_that_it_claims(name, theme):
    root = picture(name, theme)
    claimed, said, sends = claim(root), texts(root), {}
    for one in (one for one in claimed["steps"] if "sent" in one):
        amount, kinds = sends.setdefault(one["step"].split()[0], (max(one["sent"]), []))
        assert amount == max(one["sent"])
        kinds += [one["of"]] if one["of"] not in kinds else []
    for what, (amount, kinds) in sends.items():
        who = "" if what == "send" else "each rank sends "
        assert f"{what}: {who}{amount:.2f} × each {' and '.join(kinds)}" in said
    bars = {(one.get("data-kept"), int(one.get("data-rank"))): one for one in groups(root, "kept")}
    assert len(bars) == 3 * claimed["ranks"]
    for (kind, rank), group in bars.items():
        kept, beside = claimed["kept"][kind][rank], claimed["kept beside"][kind][rank]
        assert texts(group) == [f"{kept:.2f}"] and spans(group, "x")[1] == pytest.approx(UNIT["kept"] * kept)
        outlines = [float(rect.get("width")) for rect in group.iter(f"{SVG}rect") if rect.get("stroke-dasharray")]
        assert outlines == pytest.approx([UNIT["kept"] * beside + 2 * PAD] if kept < beside else [])
    amounts = [amount for amount, _ in sends.values()] + [kept for ranks in claimed["kept"].values() for kept in ranks]
    assert numbers_in(said) == {f"{amount:.2f}" for amount in amounts}


@both_themes([name for name in STEPS if "micro_batches" in claim(picture(name))["options"]])
def test_ranks_of_a_pipeline_are_idle_for_the_share_of_the_formula(name, theme):
    root = picture(name, theme)
    n, m = claim(root)["ranks"], claim(root)["options"]["micro_batches"]
    share = (n - 1) / (m + n - 1)
    assert f"idle: (n-1)/(m+n-1) = {share:.0%} with n = {n}, m = {m}" in texts(root)
    drawn = [one for one in groups(root, "step") if one.get("data-to") is None and one.get("data-step") != "update"]
    first, last = min(spans(one, "x")[0] for one in drawn), max(sum(spans(one, "x")) for one in drawn)
    for rank in range(n):
        own = [spans(one, "x")[1] + 2 for one in drawn if one.get("data-ranks") == str(rank)]  # and what is between two
        assert 1 - sum(own) / (last + 2 - first) == pytest.approx(share, abs=0.005)


@both_themes(["sbp_conversions"])
def test_cells_of_the_conversions_have_their_collective_and_their_bytes(name, theme):
    root = picture(name, theme)
    cells = {one.get("data-conversion"): one for one in groups(root, "conversion")}
    sent, places = claim(root)["sent"], {}
    assert set(cells) == set(sent) and len(cells) == 16
    for change, group in cells.items():
        old, new = change.split(" -> ")
        boxing, amount = theory.Boxing((4, 6), (old, [0, 1]), (new, [0, 1])), max(sent[change])
        formula = boxing.total / 2 / 24
        wanted = f"{amount:.2f}" + ("" if near(amount, formula) else f" ({formula:.2f})")
        assert "".join(texts(group)) == boxing.collective + (wanted if amount else "")
        box = next(group.iter(f"{SVG}rect"))
        assert float(box.get("fill-opacity")) == pytest.approx(0.3 * round(4 * amount) / 4)
        places[old, new] = float(box.get("y")), float(box.get("x"))
    rows, columns = sorted({y for y, _ in places.values()}), sorted({x for _, x in places.values()})
    assert places == {(old, new): (rows[i], columns[j]) for i, old in enumerate(SBPS) for j, new in enumerate(SBPS)}


@both_themes(["parameter_server", "hybrid_parallel"])
def test_arrows_have_what_is_sent(name, theme):
    root = picture(name, theme)
    claimed = claim(root)
    parts = [claimed, *(part for part in claimed.values() if isinstance(part, dict))]
    roles = [part["sends"] for part in parts if "sends" in part]
    arrows = [(one.get("data-sends"), *texts(one)) for one in groups(root, "sends")]
    assert sorted(arrows) == sorted((ends, f"{amount:.2f}") for sends in roles for ends, amount in sends.items())


@both_themes(["parameter_server"])
def test_bars_have_what_a_rank_sends(name, theme):
    root = picture(name, theme)
    roles = [claim(root)[role]["sends"] for role in ("server", "ring")]
    sums = [
        sum(amount for ends, amount in sends.items() if ends.startswith(f"{rank} "))
        for sends in roles
        for rank in range(4)
    ]
    bars = groups(root, "bar")
    assert [(texts(bar)[-1], spans(bar, "x")[1]) for bar in bars] == [
        (f"{amount:.2f}", pytest.approx(UNIT["bar"] * amount)) for amount in sums
    ]


@both_themes(["partial_sum"])
def test_partial_sums_add_up_to_the_product(name, theme):
    root = picture(name, theme)
    claimed = claim(root)
    product = np.array(claimed["x"]) @ claimed["w"]
    assert (np.sum(claimed["partial"], axis=0) == product).all() and (product == claimed["out"]).all()
    wanted = {("sum", ""): claimed["out"]}
    wanted.update({("partial", str(rank)): part for rank, part in enumerate(claimed["partial"])})
    wanted.update({("out", str(rank)): claimed["out"] for rank in range(claimed["ranks"])})
    found = {(one.get("data-values"), one.get("data-rank")): texts(one) for one in groups(root, "values")}
    assert found == {key: [str(number) for row in rows for number in row] for key, rows in wanted.items()}


@both_themes(["ring_attention"])
def test_blocks_of_a_ring_are_where_they_are_claimed(name, theme):
    root = picture(name, theme)
    claimed, places, lines = claim(root), {}, {}
    for group in groups(root, "attends"):
        step, rank, block = map(int, group.get("data-attends").split())
        assert texts(group) == [f"k, v {block}"]
        places[step, rank] = spans(group, "x"), spans(group, "y")
        lines.setdefault(("x", rank), set()).add(spans(group, "x"))
        lines.setdefault(("y", step), set()).add(spans(group, "y"))
    assert all(len(spans_of_line) == 1 for spans_of_line in lines.values())
    assert sorted(places) == sorted((step, rank) for step, rank, _ in claimed["attends"])
    assert [list(map(int, one.get("data-attends").split())) for one in groups(root, "attends")] == claimed["attends"]
    arrows = {tuple(map(int, one.get("data-moves").split())): one for one in groups(root, "moves")}
    assert sorted(arrows) == sorted(map(tuple, claimed["moves"]))
    for (step, _, old, new), group in arrows.items():
        first, *_, last = np.array(numbers(next(group.iter(f"{SVG}polyline")).get("points"))).reshape(-1, 2)
        for (x, y), place in ((first, places[step - 1, old]), (last, places[step, new])):
            (left, width), (top, height) = place
            assert left <= x <= left + width and top - 8 <= y <= top + height + 8
    assert numbers_in(texts(root)) == {f"{amount:.2f}" for amount in claimed["sent"]}


@both_themes(["all_to_all"])
def test_slots_hold_the_tokens_that_are_claimed(name, theme):
    root = picture(name, theme)
    claimed, seen, colours = claim(root), set(), {}
    for one in groups(root, "slots"):
        kind, rank, other = one.get("data-slots"), int(one.get("data-rank")), int(one.get("data-other"))
        group, expert = (other, rank) if kind == "arrived" else (rank, other)
        tokens = int(claimed["slots"][group][expert])
        fills = [rect.get("fill") for rect in one.iter(f"{SVG}rect")]
        assert texts(one) == [str(group)] * tokens and fills.count("none") == claimed["capacity"] - tokens
        colours.setdefault(expert, set()).update(set(fills) - {"none"})
        seen.add((kind, rank, other))
    assert seen == set(itertools.product(("sent", "arrived", "returned"), range(4), range(4)))
    assert sorted(map(len, colours.values())) == [1] * 4 and len(set.union(*colours.values())) == 4
    [amount] = {f"{sent:.2f}" for move in claimed["moves"] for sent in move["sent"]}
    assert numbers_in(texts(root)) == {amount}
    said = " ".join(texts(root))
    assert f"{claimed['dropped']:.0f} tokens found none free" in said


@both_themes(["memory"])
def test_bars_of_the_strategies_have_what_a_rank_keeps(name, theme):
    root = picture(name, theme)
    bars = {(one.get("data-strategy"), int(one.get("data-rank"))): one for one in groups(root, "strategy")}
    claimed = {one["strategy"]: one["kept"] for one in claim(root)["strategies"]}
    assert set(bars) == {(name, rank) for name, kept in claimed.items() for rank in range(len(kept["weights"]))}
    for (strategy, rank), group in bars.items():
        kept = [claimed[strategy][kind][rank] for kind in ("weights", "gradients", "state")]
        widths = [float(rect.get("width")) for rect in group.iter(f"{SVG}rect")]
        assert widths == pytest.approx([UNIT["strategy"] * amount for amount in kept])
        assert texts(group) == [f"{amount:.2f}" for amount in [*kept, sum(kept)]]


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
    assert [name for name in ALL if f"pictures/{name}.svg" not in text] == []
