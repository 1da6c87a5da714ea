"""The pictures of the docs: each colour has a dark one, no text is cut off, and the numbers are those of a run.

What a picture claims of a run is JSON in its <metadata>: layouts, moves, what each rank sends and holds in units of the
tensor. Where a run differs, change the picture and its claim by hand.
The times in pipeline_schedules.svg are a record, which no test repeats.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from functools import partial

import numpy as np
import pytest

from oneflow_cookbook.measure.events import layout
from oneflow_cookbook.measure.steps import bytes_of
from oneflow_cookbook.start import recipe
from tests import atlas
from tests.cases import ROOT, reference_transformer
from tests.cases.ladder import Checks
from tests.cases.measuring import MEASURE_SCRIPT, with_mode

PICTURES = ROOT / "docs" / "pictures"
NAMES = sorted(path.stem for path in PICTURES.glob("*.svg"))
ROUNDED = 0.011  # of a tensor: two decimals, and OneFlow's own messages
SVG = "{http://www.w3.org/2000/svg}"
HELD = f"{ROOT / 'tests' / 'on_rank_memory.py'}:kept"


def picture(name):
    return ElementTree.parse(PICTURES / f"{name}.svg").getroot()


def claim(name):
    return json.loads(picture(name).find(f"{SVG}metadata").text)


CLAIMS = {name: claim(name) for name in NAMES}
EQUATIONS = [name for name in NAMES if "matmuls" in CLAIMS[name]]
STRATEGIES = {  # what a rank holds: name -> {"recipe", "options", "ranks", "kept"}
    **{name: CLAIMS[name] for name in NAMES if "kept" in CLAIMS[name]},
    **{row["strategy"]: {**row, "ranks": CLAIMS["memory"]["ranks"]} for row in CLAIMS["memory"]["strategies"]},
}


@pytest.mark.parametrize("name", NAMES)
def test_colours_have_a_light_and_a_dark_value(name):
    text = (PICTURES / f"{name}.svg").read_text()
    light, dark = (re.findall(r"--(\w+): #", half) for half in text.split("@media (prefers-color-scheme: dark)"))
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {"page"} <= used <= set(light) and light == dark and '="#' not in text


@pytest.mark.parametrize("name", NAMES)
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


def background_calls(item):
    """What a test needs: see pools.py."""
    test = item.originalname
    if test == "test_conversions_send_what_is_claimed":
        return {("atlas", 2): (2, atlas.measured_on)}
    if test == "test_equations_are_those_of_a_run":
        name = item.callspec.params["name"]
        return {("claim", name, size): script_call(CLAIMS[name], size) for size in ("options", "large")}
    if test == "test_ranks_hold_what_is_claimed":
        strategy = item.callspec.params["strategy"]
        claimed = STRATEGIES[strategy]
        run = partial(call, HELD, path=str(recipe.path_of(claimed["recipe"])), **claimed["options"])
        return {("held", strategy): (claimed["ranks"], run)}
    return {}


def script_call(claimed, size):
    path = recipe.path_of(claimed["recipe"])
    keywords = with_mode(claimed[size], "eager" if "graph" in recipe.entry_options(path) else "only")
    return claimed["ranks"], partial(call, MEASURE_SCRIPT, path=str(path), keywords=keywords)


def call(function, pool, **arguments):
    return pool.call(function, **arguments)


def is_as_claimed(tensor, claimed):
    """Whether shape, SBP and ranks are those of the claim; a first dimension "s" has any size."""
    first = ["s"] if claimed["shape"][0] == "s" else list(tensor["shape"][:1])
    layout_of_run = [*first, *tensor["shape"][1:]], tensor["sbp"], tensor["ranks"]
    return layout_of_run == (claimed["shape"], claimed["sbp"], claimed["ranks"])


def steps_of(result):
    """The events of a run; without flow.tensor, which is one at large sizes only."""
    return [event for event in result["events"] if event.kind != "create"]


def place_of(claimed, candidates, begin):
    """The first event of `candidates`, {number: tensors}, from `begin` on, whose tensors have the claimed layouts."""
    for number, tensors in candidates.items():
        if number >= begin and all(map(is_as_claimed, tensors, claimed)):
            return number
    raise AssertionError(f"no such step in a run: {claimed}")


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_are_those_of_a_run(measured, name):
    """Matmuls and moves in order, with the layout of each tensor, and what each rank sends for a move."""
    claimed, small, large = CLAIMS[name], measured("claim", name, "options"), measured("claim", name, "large")
    events = steps_of(small[0])
    matmuls = {k: [*e.inputs[:2], *e.outputs] for k, e in enumerate(events) if e.kind == "matmul"}
    moves = {
        k: [*e.inputs[:1], *e.outputs]
        for k, e in enumerate(events)
        if e.kind == "to_global" and layout(e.inputs[0]) != layout(e.outputs[0])
    }
    place = 0
    for tensors in claimed["matmuls"]:
        place = place_of(tensors, matmuls, place) + 1
    place = 0
    for move in claimed["moves"]:
        place = place_of([move["old"], move["new"]], moves, place) + 1
        for rank, sent in enumerate(move["sent"]):
            event = steps_of(large[rank])[place - 1]
            Checks.sent(event.sent / bytes_of(event.inputs[0]), sent, ROUNDED, move, "rank", rank)


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_hold_what_is_claimed(measured, strategy):
    results = measured("held", strategy)
    for kind, by_rank in STRATEGIES[strategy]["kept"].items():
        held = [result[kind] / result["whole"] for result in results]
        assert held[: len(by_rank)] == by_rank, kind


def test_conversions_send_what_is_claimed(measured):
    table = measured("atlas", 2)["conversions", (0, 1), (0, 1), "eager"]
    claimed = CLAIMS["sbp_conversions"]["sent"]
    assert set(claimed) == {" -> ".join(pair) for pair in table}
    for pair, by_rank in table.items():
        for rank, (sent, wanted) in enumerate(zip(by_rank, claimed[" -> ".join(pair)])):
            Checks.sent(sent, wanted, ROUNDED, pair, "rank", rank)
