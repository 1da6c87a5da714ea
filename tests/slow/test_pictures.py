"""The pictures of the docs: each colour has a dark one, no text is cut off, and the numbers are those of a case.

What a picture claims of a recipe is JSON in its <metadata>: layouts, moves, what each rank sends and holds in units of
the tensor. Where a case differs, change the picture and its claim by hand.
The times in pipeline_schedules.svg are a record, which no test repeats.
"""

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from oneflow_cookbook.measure.sbp import Layout, parse
from oneflow_cookbook.measure.theory import product_on_axis
from tests import atlas
from tests.cases import CASES, ROOT, gpt_meshes, reference_transformer
from tests.cases.ladder import Checks

PICTURES = ROOT / "docs" / "pictures"
ALL = sorted(path.stem for path in PICTURES.glob("*.svg"))
NAMES = [name for name in ALL if not name.endswith(".zh-CN")]
ROUNDED = 0.006  # of a tensor: two decimals
SVG = "{http://www.w3.org/2000/svg}"


def picture(name):
    return ElementTree.parse(PICTURES / f"{name}.svg").getroot()


def claim(name):
    return json.loads(picture(name).find(f"{SVG}metadata").text)


CLAIMS = {name: claim(name) for name in NAMES}
EQUATIONS = [name for name in NAMES if "matmuls" in CLAIMS[name]]
TRAINED = [claimed for claimed in CLAIMS.values() if "kept" in claimed]
HELD = [  # on 2 ranks
    *TRAINED,
    *({**claimed["beside"], "kept": claimed["kept beside"]} for claimed in TRAINED),
    *CLAIMS["memory"]["strategies"],
]


@pytest.mark.parametrize("name", ALL)
def test_colours_have_a_light_and_a_dark_value(name):
    text = (PICTURES / f"{name}.svg").read_text()
    light, dark = (re.findall(r"--(\w+): #", half) for half in text.split("@media (prefers-color-scheme: dark)"))
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {"page"} <= used <= set(light) and light == dark and '="#' not in text


@pytest.mark.parametrize("name", ALL)
def test_no_text_is_cut_off_or_too_small(name):
    """A letter of a narrow font is about 0.45 times as wide as high. On a phone, 358 pixels wide, 10.5 are legible."""
    root = picture(name)
    left_edge, top, width, height = map(float, root.get("viewBox").split())
    right_edge, bottom = left_edge + width, top + height
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(key)) for key in ("font-size", "x", "y"))
        assert size * min(1, 358 / width) >= 10.5
        if not text.get("transform"):
            long = 0.45 * size * len("".join(text.itertext()))
            left = x - {"start": 0, "middle": long / 2, "end": long}[text.get("text-anchor")]
            assert left_edge + 8 <= left and left + long <= right_edge - 8, "".join(text.itertext())
            assert top + 4 <= y - 0.7 * size and y <= bottom - 4, "".join(text.itertext())


WORDS = re.compile(r">[^<>]*</|>[^<>]*<tspan|font-family=\"[^\"]*\"")


@pytest.mark.parametrize("name", NAMES)
def test_picture_in_chinese_differs_in_words_alone(name):
    english, chinese = ((PICTURES / f"{stem}.svg").read_text() for stem in (name, f"{name}.zh-CN"))
    (before, claimed, drawn), others = (text.partition("</metadata>") for text in (english, chinese))
    assert before.partition("<metadata>")[2] == others[0].partition("<metadata>")[2] and claimed
    assert WORDS.sub("", drawn) == WORDS.sub("", others[2])
    numbers = [re.findall(r"\d(?:[\d.]*\d)?", "".join(WORDS.findall(text))) for text in (drawn, others[2])]
    assert sorted(numbers[0]) == sorted(numbers[1])


def amounts(claimed):
    """All numbers in a claim, and the sums of what a rank holds, with two decimals."""
    if isinstance(claimed, dict):
        sums = [sum(by_kind) for by_kind in zip(*claimed.get("kept", {}).values())]
        return set().union(*map(amounts, claimed.values()), {f"{number:.2f}" for number in sums})
    if isinstance(claimed, list):
        return set().union(*map(amounts, claimed))
    return {f"{claimed:.2f}"} if isinstance(claimed, (int, float)) else set()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "parameter_server"])
def test_numbers_are_claimed(name):
    """Numbers in parentheses are formulas; parameter_server also adds up what a rank sends."""
    text = " ".join("".join(element.itertext()) for element in picture(name).iter(f"{SVG}text"))
    numbers = set(re.findall(r"(?<!\()\b\d+\.\d\d\b", text))
    assert numbers <= amounts(CLAIMS[name])


def test_partial_sums_add_up_to_the_product():
    claimed = CLAIMS["partial_sum"]
    x, w, partial = (np.array(claimed[name]) for name in ("x", "w", "partial"))
    assert (x @ w == claimed["out"]).all()
    assert all((partial[k] == np.outer(x[:, k], w[k])).all() for k in range(claimed["ranks"]))
    for group in picture("partial_sum").iter(f"{SVG}g"):  # what each rank holds, as it is drawn
        name, rank = group.get("data-tensor"), int(group.get("data-rank"))
        held = {"x": x[:, rank], "w": w[rank], "partial": partial[rank], "out": np.array(claimed["out"])}[name]
        assert [int(text.text) for text in group.iter(f"{SVG}text")] == held.ravel().tolist()


def numbers_in(group):
    return [int(text.text) for text in group.iter(f"{SVG}text")]


def test_column_then_row_is_drawn_as_it_is_computed():
    """Above the right pair, below the wrong one: each rank's numbers are those of its columns and rows."""
    claimed = CLAIMS["column_row"]
    names = ("x", "w0", "hidden", "w1", "partial", "out")
    x, w0, hidden, w1, partial, out = (np.array(claimed[name]) for name in names)
    ranks = [slice(0, 2), slice(2, 4)]
    assert (hidden == np.maximum(x @ w0, 0)).all() and (out == partial.sum(0)).all() and (out == hidden @ w1).all()
    assert all((partial[rank] == hidden[:, units] @ w1[units]).all() for rank, units in enumerate(ranks))
    whole, drawn = {"x": x, "hidden": hidden, "out": out}, []
    for group in picture("column_row").iter(f"{SVG}g"):
        drawn.append((group.get("data-tensor"), group.get("data-rank"), numbers_in(group)))
    right, wrong = drawn[: drawn.index(("out", "all", out.ravel().tolist())) + 1], drawn[-7:]
    own = [{"w0": w0[:, units], "hidden": hidden[:, units], "w1": w1[units]} for units in ranks]
    own = [{**tensors, "partial": partial[rank]} for rank, tensors in enumerate(own)]
    for name, rank, numbers in [*right, *wrong[:3]]:
        held = whole[name] if rank == "all" else own[int(rank)][name]
        assert numbers == held.ravel().tolist(), (name, rank)
    sbps = {name: CASES["train_tensor_parallel"](2).layout[name][0] for name in ("x", "w0", "w1")}
    sbps["hidden"] = str(product_on_axis(*parse(sbps["x"]), *parse(sbps["w0"]), 2, 2, (False, False)))
    headings = {"".join(text.itertext()) for text in picture("column_row").iter(f"{SVG}text")}
    assert {f"{name} {sbp}" for name, sbp in sbps.items()} <= headings
    columns = [
        (name, str(rank), whole[:, rank].tolist()) for name, whole in (("w1", w1), ("out", out)) for rank in (0, 1)
    ]
    assert len(right) + len(wrong) == len(drawn) and wrong[3:] == columns


def test_mesh_is_drawn_as_its_ranks_hold_it():
    claimed = CLAIMS["mesh"]
    for group in picture("mesh").iter(f"{SVG}g"):
        rank, sbp = int(group.get("data-rank")), group.get("data-sbp")
        block = Layout(sbp, claimed["mesh"]).block(claimed["shape"], rank)
        cells = [rect.get("fill-opacity") is not None for rect in group.iter(f"{SVG}rect")]
        held = np.zeros(claimed["shape"], dtype=bool)
        held[tuple(slice(*span) for span in block)] = sbp == "S(0), B" or rank not in claimed["asked"]
        assert cells == held.ravel().tolist(), (sbp, rank)
    labels = {"".join(text.itertext()) for text in picture("mesh").iter(f"{SVG}text")}
    assert {f"({sbp})" for sbp in claimed["sbp"]} <= labels


def case_of(claimed):
    """The case of a claim's recipe, in eager mode."""
    options = {name: option for name, option in claimed["options"].items() if name not in ("graph", "ranks")}
    if claimed["recipe"] == "gpt":
        mesh, steps = [options.pop(axis) for axis in ("data", "tensor")] + [1], options.pop("steps")
        return gpt_meshes.case_of(mesh, gpt_meshes.known(steps=steps, sums=0, **options), options, {"steps": steps})
    ranks = claimed["options"].get("ranks", range(claimed.get("ranks", 2)))
    return CASES[claimed["recipe"]](len(ranks), **options)


def layouts_of(case):
    """{name of a tensor, without that of its module: (shape, SBP, ranks)}."""
    shapes = {name: list(case.values[name].exact.shape) for name in case.layout}
    return {name.split(".")[-1]: (shapes[name], *place) for name, place in case.layout.items()}


def layout_of(tensor):
    return tensor["shape"], tensor["sbp"], tensor["ranks"]


def sent_by(n, shape, old, new):
    """What each of n ranks sends for a move in eager mode, in units of the tensor. old, new: (SBP, ranks)."""
    senders = Layout(*old).members
    total = atlas.expected("eager", shape, old, new) / np.prod(shape)
    return pytest.approx([total / len(senders) if rank in senders else 0 for rank in range(n)], abs=ROUNDED)


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_are_those_of_the_case(name):
    """Each tensor has the layout of the case, each product that of its factors; a move sends what the atlas says."""
    claimed, layouts = CLAIMS[name], layouts_of(case_of(CLAIMS[name]))
    moves = [(move["old"], move["new"]) for move in claimed["moves"]]
    for tensor in sum([*claimed["matmuls"], *map(list, moves)], []):
        Checks.equal(layout_of(tensor), layouts.get(tensor["name"], layout_of(tensor)), name, tensor["name"])
    for x, w, out in claimed["matmuls"]:
        dims = len(x["shape"]), len(w["shape"])
        axes = zip(parse(x["sbp"]), parse(w["sbp"]))
        product = ", ".join(str(product_on_axis(*axis, *dims, (False, False))) for axis in axes)
        shape = [*x["shape"][:-1], w["shape"][-1]]
        Checks.equal(layout_of(out), (shape, product, w["ranks"]), name, out["name"])
        assert x["ranks"] == w["ranks"] and x["shape"][-1] == w["shape"][0], name
    known = [*layouts.values(), *map(layout_of, sum(claimed["matmuls"], []))]
    for move, tensors in zip(claimed["moves"], moves):
        (shape, *old), (new_shape, *new) = map(layout_of, tensors)
        assert (shape, *old) in known and (shape, *new) in known and new_shape == shape, move
        sizes = [480 if size == "s" else 240 * size for size in shape]
        assert move["sent"] == sent_by(claimed["ranks"], sizes, old, new), move


def test_slots_are_those_that_tokens_take():
    claimed = CLAIMS["all_to_all"]
    options = {name: option for name, option in claimed["options"].items() if name != "graph"}
    values = reference_transformer.mixture_of_experts(**options)
    taken = (values["sent"].exact != 0).any(-1).sum(-1)  # (sequence, expert): one of each on a rank
    assert taken.tolist() == claimed["slots"] and values["dropped"].exact.tolist() == [claimed["dropped"]]
    for group in picture("all_to_all").iter(f"{SVG}g"):
        if group.get("data-slots") == "sent":
            rank, expert = int(group.get("data-rank")), int(group.get("data-other"))
            assert len(list(group.iter(f"{SVG}rect"))) == claimed["capacity"]
            assert [text.text for text in group.iter(f"{SVG}text")] == [str(rank)] * taken[rank, expert]


def held_by(case, kind):
    """What each rank holds of the weights, of their gradients or of Adam's two moments, in units of all weights."""
    weights = [name for name in case.layout if f"new {name}" in case.layout]
    moment = next(name.split()[1] for name in case.layout if name.endswith((" exp_avg", " momentum_buf")))
    name, count = {"weights": ("new {}", 1), "gradients": ("{} grad", 1), "state": (f"{{}} {moment}", 2)}[kind]
    shapes = [case.values[weight].exact.shape for weight in weights]
    layouts = [Layout(*case.layout[name.format(weight)]) for weight in weights]
    ranks = sorted({rank for layout in layouts for rank in layout.members})
    sizes = [sum(layout.size(shape, rank) for layout, shape in zip(layouts, shapes)) for rank in ranks]
    return [count * size / sum(map(np.prod, shapes)) for size in sizes]


@pytest.mark.parametrize("claimed", HELD, ids=lambda claimed: claimed.get("strategy", claimed["recipe"]))
def test_ranks_hold_what_is_claimed(claimed):
    case = case_of(claimed)
    for kind, by_rank in claimed["kept"].items():
        Checks.equal(held_by(case, kind), by_rank, kind)


def test_conversions_send_what_is_claimed():
    claimed = CLAIMS["sbp_conversions"]["sent"]
    assert set(claimed) == {" -> ".join(pair) for pair in atlas.PAIRS}
    for old, new in atlas.PAIRS:
        assert claimed[f"{old} -> {new}"] == sent_by(2, atlas.SHAPE, (old, [0, 1]), (new, [0, 1])), (old, new)
