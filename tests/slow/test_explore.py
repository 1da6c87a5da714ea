"""docs/explore in a browser: it draws its model, the model is that of runs, and its programs run."""

import ast
import itertools
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from oneflow_cookbook.explore import matmul_runs
from oneflow_cookbook.explore.matmul_runs import MODES, RANKS
from oneflow_cookbook.measure.sbp import Layout
from oneflow_cookbook.measure.theory import Boxing
from oneflow_cookbook.plan import formulas
from oneflow_cookbook.start.recipe import load, path_of
from tests.browser import Browser
from tests.cases import ROOT
from tests.cases.ladder import Checks

PAGE = ROOT / "docs" / "explore" / "index.html"
RUNS = matmul_runs.read()
VALUES = {name: np.array(value) for name, value in RUNS["value"].items()}
VALUES["out"] = VALUES["x"] @ VALUES["w"]
EVERY = {"1": 5, "2": 3, "3": 3, "4": 3, "2x2": 13}  # each k-th pair is run again; each SBP of x and of w is among them
FIRST = (
    "On 2 ranks, x S(1) @ w S(0) gives out P. No communication before the multiplication. "
    "Converting out to B: all-reduce."
)
PRINTED = f"{ROOT / 'tests' / 'on_rank_your_model.py'}:printed"
PRESETS = ("data", "column", "row", "megatron", "pipeline", "mesh", "sharded")
VIEWS = [  # on each kind of placement: what moves first, what moves then, and partial sums
    "#ranks=1&x=B&w=P",
    "#ranks=3&x=S0&w=S1&to=P&mode=graph",
    "#ranks=4&x=P&w=S0&to=S1",
    "#ranks=2x2&x=S0,P&w=P,S1",
    "#ranks=2x2&x=S0,S1&w=S1,S0&mode=graph",
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture
def opened(browser):
    """A function that opens the page from disk. At the end the console is empty, and no network was asked."""

    def open_at(view="", **shown):
        browser.show(**shown)
        browser.open(PAGE, view)
        return browser

    yield open_at
    assert browser.errors() == []
    assert {url.partition(":")[0] for url in browser.requests()} <= {"file", "data", "about"}


# ---- the recorded runs


@pytest.mark.parametrize("which", RANKS)
def test_recorded_runs_are_those_of_new_ones(pools, which):
    pairs = matmul_runs.pairs_of(which)
    assert list(RUNS["runs"][which]) == [matmul_runs.key(*pair) for pair in pairs]
    pairs = pairs[:: EVERY[which]]
    fresh = matmul_runs.measured_on(pools(np.size(RANKS[which])), which, pairs)
    Checks.equal(len(fresh), len(pairs), which, "pairs")
    recorded = {pair: RUNS["runs"][which][pair] for pair in fresh}
    for path in matmul_runs.changed(recorded, fresh):
        raise AssertionError(f"{which}: {path} differs; ./launch.sh docs measures again")


# ---- the matmul: what is drawn of each pair of SBPs

DRAWN = """
const [ranks, states] = arguments;
const numbers = (cells) => cells.map(({ dataset, textContent }) => [+dataset.row, +dataset.column, +textContent]);
const matrices = (stage) => [...stage.querySelectorAll(".matrix:has(.cell)")].map((matrix) => {
  const cells = [...matrix.querySelectorAll(".cell")];
  return [`${stage.dataset.stage} ${cells[0].dataset.of} ${matrix.dataset.rank ?? "whole"}`, numbers(cells)];
});
const texts = (row) => [...row.cells].slice(1).map((cell) => cell.textContent);
const all = (selector) => [...document.querySelectorAll(selector)];
return states.map(([x, w, to, mode]) => {
  readAddress(`#ranks=${ranks}&x=${short(x)}&w=${short(w)}&to=${short(to)}&mode=${mode}`);
  draw();
  const drawn = Object.fromEntries(all("#stages > [data-stage]").flatMap(matrices).reverse());
  const tables = all("#bytes table").map((table) => [...table.rows].slice(1).map(texts));
  return [drawn, tables, document.getElementById("summary").textContent];
});
"""


def in_mode(entry, mode):
    """The entry of a mode; that of a graph is left out where it is the same."""
    return entry.get(mode, entry["eager"])


def layout(sbp, which):
    return Layout(sbp.replace(",", ", "), RANKS[which])


def recorded(stage, tensor, which, sbp, blocks):
    """{"stage tensor rank": [[row, column, number]]} of what the ranks have recorded."""
    cells = {}
    for rank, block in enumerate(blocks):
        [(top, _), (left, _)] = layout(sbp, which).block((4, 4), rank)
        numbers = np.ndenumerate(np.array(block))
        cells[f"{stage} {tensor} {rank}"] = [[top + i, left + j, number] for (i, j), number in numbers]
    return cells


def formula_of(shape, moves, which):
    """(the bytes of each rank and of all by the formula, as the table shows them; their number; the collectives)."""
    boxings = [Boxing(shape, *(layout(sbp, which) for sbp in move), item=4) for move in moves if move[0] != move[1]]
    total, n = sum(boxing.total or 0 for boxing in boxings), np.size(RANKS[which])
    by_rank = ["–"] * n
    if all(boxing.by_rank for boxing in boxings):
        by_rank = [in_units(sum(boxing.by_rank[rank] for boxing in boxings)) for rank in range(n)]
    is_known = all(boxing.total is not None for boxing in boxings)
    names = ", ".join(boxing.collective for boxing in boxings).split(", ")
    return [*by_rank, in_units(total) if is_known else "no formula"], total, names


def in_units(count):
    if count < 1000:
        return f"{count:.1f} B".replace(".0 ", " ")
    return f"{count / 1e3:.{1 if count < 1e5 else 0}f} kB" if count < 1e6 else f"{count / 1e6:.2f} MB"


@pytest.mark.parametrize("which", RANKS)
def test_drawn_numbers_and_bytes_are_those_of_the_runs(opened, which):
    states = [
        (*pair.split(" @ "), to, mode)
        for pair, entry in RUNS["runs"][which].items()
        for to, mode in itertools.product(["", *entry.get("to", {})], MODES)
    ]
    states = states[::3]  # each SBP of x and of w in both modes, as neither 2 nor 5 can be divided by 3
    browser = opened("#lang=en")
    parts = [browser.run(DRAWN, which, states[first : first + 32]) for first in range(0, len(states), 32)]
    for (x, w, to, mode), (drawn, tables, summary) in zip(states, itertools.chain(*parts)):
        pair, where, sends = RUNS["runs"][which][f"{x} @ {w}"], (which, x, w, to, mode), []
        run = in_mode(pair, mode)
        stages = {name.split()[0] for name in drawn}
        expected = recorded("multiply", "out", which, run["out_sbp"], run["out"])
        moves, large = ([*zip((x, w), of["inputs"])] for of in (run, run.get("large", run)))
        for name, (sbp, multiplied) in zip("xw", moves):
            assert (f"move-{name}" in stages) == (sbp != multiplied), where
            stage = "multiply" if sbp == multiplied else f"move-{name}"
            expected.update(recorded(stage, name, which, sbp, pair[name]))
        if len(stages - {"multiply", "change"}) or "large" in run:
            sends.append((moves, large, run["sent"]))
        if to and to != run["out_sbp"]:
            change, moves = in_mode(pair["to"][to], mode), [(run["out_sbp"], to)]
            expected.update(recorded("change", "out-to", which, to, change["out"]))
            sends.append((moves, moves, change["sent"]))
        for table, (moves, large, sent) in zip(tables, sends, strict=True):
            small, _, names = formula_of((4, 4), moves, which)
            of_large, total, _ = formula_of(matmul_runs.SHAPES[0], large, which)
            assert table[:2] == [small, of_large] and all(name in summary for name in names), where
            assert table[2][:-1] == list(map(in_units, sent)) and table[2][-1].startswith(in_units(sum(sent))), where
            assert sum(sent) >= 0.98 * total, where
        whole = [[*place, number] for place, number in np.ndenumerate(VALUES["out"])]
        expected.update({name: whole for name in drawn if name.endswith("whole") and "out" in name})
        assert {**drawn, **expected} == drawn and "multiply out whole" in expected, where
        if mode == "eager":  # then what each rank multiplies is known too
            assert all(f"multiply {name} {rank}" in drawn for name in "xw" for rank in range(len(run["out"]))), where


PROGRAMS = [
    ("1", "P", "S(0)", "B", "eager", ""),
    ("2", "S(1)", "S(0)", "S(1)", "graph", ""),
    ("3", "P", "S(0)", "P", "eager", ""),
    ("4", "S(0)", "S(1)", "", "graph", ""),
    ("2x2", "S(0),B", "B,S(1)", "", "graph", ""),
    ("2", "B", "B", "", "eager", "pipeline"),
]


@pytest.mark.parametrize("state", PROGRAMS, ids="".join)
def test_program_prints_what_the_page_shows(pools, opened, state, tmp_path):
    ranks, x, w, to, mode, preset = state
    browser = opened(re.sub(r"[()]", "", f"#ranks={ranks}&x={x}&w={w}&to={to}&mode={mode}&preset={preset}"))
    pair, n = RUNS["runs"][ranks][f"{x} @ {w}"], np.size(RANKS[ranks])
    blocks = in_mode(pair["to"][to] if to else pair, mode)["out"]
    if preset:
        drawn = browser.run("return [...document.querySelectorAll('[data-of=out]')].map((cell) => +cell.textContent)")
        blocks = [[], np.reshape(drawn, (4, 4)).tolist()]
        assert blocks[1] == (VALUES["out"] @ VALUES["w"]).tolist()
    (tmp_path / "mine.py").write_text(browser.text("#code"))
    lines = pools(n).call(PRINTED, path=str(tmp_path / "mine.py"))
    assert [ast.literal_eval(re.search(r"\[\[.*|\[\]$", line.strip())[0]) for line in lines] == blocks
    assert f"./launch.sh -n {n} mine.py" in browser.text("#program")


# ---- the training step

LAYERS, HIDDEN = 8, 1680
STRATEGIES = {  # forward and backward of a pair of layers in order
    "data": ("forward forward", "backward gradients backward gradients"),
    "zero": ("weights forward weights forward", "backward gradients backward gradients"),
    "sharded": ("weights forward weights forward", "backward gradients backward gradients"),
    "tensor": ("forward forward activations", "backward backward activation_gradients"),
    "data_tensor": ("forward forward activations", "backward gradients backward activation_gradients gradients"),
    "pipeline": (),
}
KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weights"}
NEEDED = {"forward": "activations", "backward": "activation gradients", "backward_input": "activation gradients"}
STATES = """
const { STRATEGIES, SCHEDULES, ROWS, microBatches, step } = Steps;
const states = Object.entries(STRATEGIES).flatMap(([strategy, { ranks }]) => ranks.flatMap((n) =>
  Object.keys(SCHEDULES).flatMap((schedule) => ROWS.flatMap((rows) => microBatches(rows).flatMap((micro) =>
    [1, 1e30].map((link) => ({ strategy, ranks: n, schedule, rows, micro, link })))))));
return states.filter(({ strategy, schedule, micro }) =>
  strategy === "pipeline" ? micro % 3 === 1 : schedule === "gpipe" && micro === 1).map((state) => [state, step(state)]);
"""


@pytest.fixture(scope="module")
def steps(browser):
    """[(state, step)] of every strategy, number of ranks and of rows; a link is of 1 GB/s, or takes no time."""
    browser.open(PAGE)
    return browser.run(STATES)


def test_step_takes_the_time_of_its_parts_and_sends_the_bytes_of_formulas(steps):
    assert {state["strategy"] for state, _ in steps} == set(STRATEGIES)
    for state, step in steps:
        forward, by_rank = 2 * state["rows"] * HIDDEN**2 * LAYERS / state["ranks"] / 100e9, []
        for blocks, memory, sent in zip(step["lanes"], step["memory"], step["sent"], strict=True):
            assert [block["start"] for block in blocks] == [0, *(block["end"] for block in blocks[:-1])], state
            seconds = dict.fromkeys(step["shares"], 0)
            for block in blocks:
                seconds[block["kind"]] += block["end"] - block["start"]
            expected = [forward, 2 * forward, sent / state["link"] / 1e9, memory["optimizer"] / 8 * 1e-9]
            backward = sum(seconds[kind] for kind in list(KINDS.values())[1:])
            assert [seconds["forward"], backward, seconds["move"], seconds["update"]] == pytest.approx(expected), state
            assert blocks[-1]["end"] == pytest.approx(step["seconds"]), state
            by_rank.append(seconds)
        shares = {kind: np.mean([seconds[kind] for seconds in by_rank]) / step["seconds"] for kind in step["shares"]}
        assert step["shares"] == pytest.approx(shares), state
        for collective in step["collectives"]:
            part = (collective["among"] - 1) / collective["among"]
            part = {"all-reduce": 2 * part, "send": 1}.get(collective["name"], part)
            assert collective["bytes"] == pytest.approx(part * collective["times"] * collective["whole"]), state
        if state["strategy"] == "pipeline" and state["link"] == 1e30:
            idle = step["idleFormula"]["above"] / step["idleFormula"]["below"]
            assert seconds["idle"] == pytest.approx(idle * (step["seconds"] - seconds["update"])), state


def order_of(rank, state, schedules):
    """What a rank does and sends, in order."""
    if state["strategy"] != "pipeline":
        forward, backward = (f"{words} " * (LAYERS // 2) for words in STRATEGIES[state["strategy"]])
        words = f"{forward}{backward}update".split()
        return [word for word in words if state["ranks"] > 1 or word in ("forward", "backward", "update")]
    words = []
    for op, _, m in schedules[state["schedule"]](state["ranks"], state["micro"])[rank]:
        words.append(f"{KINDS[op]}_{m + 1}")
        if op == "F" and rank < state["ranks"] - 1:
            words.append(f"activations_{m + 1}")
        if op in "BI" and rank > 0:
            words.append(f"activation_gradients_{m + 1}")
    return [*words, "update"]


def test_ranks_do_in_order_what_a_strategy_says_and_wait_only_for_what_they_need(steps):
    schedules = load(str(path_of("pipeline_schedules"))).SCHEDULES
    for state, step in steps:
        moves = [block for blocks in step["lanes"] for block in blocks if "to" in block]
        arrivals = {(move["to"], move["of"], move["micro"]): move["end"] for move in moves}
        for rank, blocks in enumerate(step["lanes"]):
            words = [f"{block.get('of', block['kind'])} {block.get('micro', '')}".strip() for block in blocks]
            order = [word.replace(" ", "_") for word in words if word != "idle"]
            assert order == order_of(rank, state, schedules), state
            for before, block in zip([{}, *blocks], blocks):
                arrival = arrivals.get((rank, NEEDED.get(block["kind"]), block.get("micro")), 0)
                assert block["start"] == arrival if before.get("kind") == "idle" else block["start"] >= arrival, state


def most(blocks, more, *less):
    """How many micro-batches a rank keeps at most, from a call of the kind `more` to one of the kinds `less`."""
    return max(np.cumsum([(block["kind"] == more) - (block["kind"] in less) for block in blocks]))


def test_memory_of_a_step_is_that_of_plan_and_of_its_blocks(steps):
    for state, step in steps:
        n, strategy = state["ranks"], state["strategy"]
        split = {"data": 1, "zero": 1, "data_tensor": 2}.get(strategy, n)
        for blocks, memory in zip(step["lanes"], step["memory"], strict=True):
            sizes = [size * LAYERS * HIDDEN**2 / split for size in formulas.PRECISIONS["fp32"][:3]]
            sizes[2] /= n if strategy == "zero" else 1
            kept = [memory["activations"], 0]
            if strategy == "pipeline":
                inputs = most(blocks, "forward", "backward", "backward_weights")
                counts = inputs, most(blocks, "backward_input", "backward_weights")
                kept = [4 * state["rows"] * HIDDEN * LAYERS / n / state["micro"] * count for count in counts]
            parts = [memory[part] for part in ("weights", "gradients", "optimizer", "activations", "pending")]
            assert parts == pytest.approx([*sizes, *kept]), state
        assert step["fullest"] == np.argmax([sum(memory.values()) for memory in step["memory"]]), state


FORMULAS = {  # at 4 stages and so many micro-batches
    ("gpipe", 6): "(p - 1) / (m + p - 1) = 3 / 9 = 33%",
    ("1f1b", 6): "(p - 1) / (m + p - 1) = 3 / 9 = 33%",
    ("zero_bubble", 6): "(p - 1) / (3m + p - 1) = 3 / 21 = 14%",
    ("zero_bubble", 2): "(2p - m - 1) / (2p + 2m - 1) = 5 / 11 = 45%",
}


@pytest.mark.parametrize("schedule, micro", FORMULAS)
def test_texts_follow_the_schedule(opened, schedule, micro):
    chosen = "" if schedule == "gpipe" else f"&step-schedule={schedule}"  # an address need not have one
    browser = opened(f"#lang=en&step-strategy=pipeline&step-ranks=4&step-micro={micro}{chosen}")
    text = browser.text("#steps")
    assert browser.one(f"#steps [value='{schedule}']").is_selected()
    assert FORMULAS[schedule, micro] in text and f"{micro} micro-batches." in text
    splits = schedule == "zero_bubble"
    for words in ("gradient of the input (I)", "gradient of the weights (W)", "output gradients kept for W"):
        assert (words in text) == splits


SMALL = {"layers": 4, "hidden": 720}  # fewer and smaller layers
SMALL_STEPS = [(n, name) for n in (2, 4) for name in STRATEGIES if n == 4 or name != "data_tensor"]


@pytest.mark.parametrize("n, strategy", SMALL_STEPS)
def test_ranks_send_and_keep_what_the_page_says(pools, opened, n, strategy):
    micro = 4 if strategy == "pipeline" else 1
    state = {"strategy": strategy, "ranks": n, "schedule": "gpipe", "rows": 1440, "micro": micro, "link": 1}
    step = opened().run("Object.assign(Steps.MODEL, arguments[0]); return Steps.step(arguments[1])", SMALL, state)
    arguments = {"strategy": strategy, "rows": 1440, "micro_batches": micro, **SMALL}
    by_rank = pools(n).call(f"{ROOT / 'tests' / 'on_rank_steps.py'}:sent_and_kept", **arguments)
    for (sent, inputs, weights), expected, memory in zip(by_rank, step["sent"], step["memory"], strict=True):
        assert sent == pytest.approx(expected, rel=0.02) and inputs == memory["activations"]
        if strategy == "sharded":
            assert weights == memory["gathered"] - 4 * SMALL["hidden"] ** 2


# ---- the page

PROBLEMS = """
const scrolls = (node) => node && (getComputedStyle(node).overflowX === "auto" || scrolls(node.parentElement));
const boxes = [...document.querySelectorAll("body *")].filter((node) => !scrolls(node));
const wide = boxes.filter((node) => node.getBoundingClientRect().right > innerWidth + 1);
const all = (selector) => [...document.querySelectorAll(selector)];
const cut = all(".arrow-head, .head").filter((node) => node.scrollWidth > node.clientWidth + 1);
const named = (node) => node.matches("[aria-label], [aria-labelledby]") || node.textContent.trim();
const parts = all("svg:not([aria-hidden]), [role=img], [role=grid], [role=group], [role=gridcell], button, a, legend");
const nameless = [...parts.filter((node) => !named(node)), ...all("input").filter((node) => node.labels.length !== 1)];
const ids = all("[id]").map((node) => node.id);
const words = [document.body.innerText, ...all("title").map((node) => node.textContent)].join(" ");
return [
  ...[...wide, ...cut, ...nameless].map((node) => node.outerHTML.slice(0, 80)),
  ...(document.documentElement.scrollWidth > innerWidth ? ["wide"] : []),
  ...ids.filter((id, place) => ids.indexOf(id) !== place),
  ...["undefined", "NaN", "null", "Infinity", "{", "}"].filter((wrong) => words.includes(wrong)),
];
"""


SHOWN = """
const [view, click] = arguments;
readAddress(view);
drawAll();
writeAddress();
if (click) document.querySelector(click).click();
return [location.hash, document.body.innerText, [...document.links].map((link) => link.href)];
"""


@pytest.mark.parametrize(
    "lang, width, dark, every", [("en", 360, False, 1), ("zh", 360, True, 3), ("en", 1280, True, 5)]
)
def test_view_fits_and_opens_again_by_its_link(opened, lang, width, dark, every):
    """All views on a narrow page; where it has more room, or is in Chinese, one of so many. In English links open."""
    clicks = [("", f"[data-preset={name}]") for name in PRESETS]
    clicks += [("", f"#steps input[value='{name}']") for name in STRATEGIES]
    clicks += [("#step-strategy=pipeline", f"#steps input[value='{name}']") for name in ("1f1b", "zero_bubble")]
    browser = opened(width=width, dark=dark)
    for view, click in [*clicks, *((view, "") for view in VIEWS)][::every]:
        view = view or "#ranks=2&x=S0&w=B&step-strategy=zero"
        link, text, links = browser.run(SHOWN, f"{view}&lang={lang}", click)
        assert browser.run(PROBLEMS) == [], link
        assert not click or re.search(r"=(\w+)]", click.replace("'", ""))[1] in link
        if "preset" in click:
            [pressed] = browser.all("[data-preset][aria-pressed=true]")
            assert pressed.get_attribute("data-preset") in click and ".py" in browser.text("#about"), link
        if lang == "en":
            browser.open(PAGE, link)
            assert (browser.view(), browser.text("body")) == (link, text)
        for href in links:
            assert Path(unquote(urlsplit(href).path)).exists(), href
    browser.one("#language").click()
    link, text = browser.view(), browser.text("body")
    browser.open(PAGE, link)
    assert f"lang={'en' if lang == 'zh' else 'zh'}" in link and browser.text("body") == text


LANES = """
return arguments[0].map((state) => {
  stepState = state;
  drawSteps();
  const step = Steps.step(Steps.settle(state));
  const nodes = [...document.querySelectorAll(".steps-lanes [data-kind]")];
  const box = (node) => node.getBoundingClientRect();
  const [left, right] = [box(nodes[0]).left, box(nodes[nodes.length - 1]).right];
  const drawn = nodes.map((node) => [+node.dataset.rank, node.dataset.kind, (box(node).left - left) / (right - left)]);
  return [step, drawn, document.querySelector(".steps-summary").textContent];
});
"""


def test_every_block_of_a_step_is_drawn_and_its_numbers_are_in_the_summary(opened, steps):
    states = [{**state, "link": 0.1} for state, _ in steps[::7]]
    for state, (step, drawn, summary) in zip(states, opened("#lang=en", width=360).run(LANES, states)):
        blocks = [(rank, block) for rank, blocks in enumerate(step["lanes"]) for block in blocks]
        assert [tuple(place) for *place, _ in drawn] == [(rank, block["kind"]) for rank, block in blocks], state
        starts = [block["start"] / step["seconds"] for _, block in blocks]
        assert [start for *_, start in drawn] == pytest.approx(starts, abs=0.01), state
        sizes = sum(step["memory"][step["fullest"]].values()), max(step["sent"])
        texts = [f"{size / 1e9:.3g} GB" if size >= 999.5e6 else f"{size / 1e6:.3g} MB" for size in sizes if size]
        texts += [f"{step['seconds']:.3g} s" if step["seconds"] >= 0.9995 else f"{1e3 * step['seconds']:.3g} ms"]
        assert all(text in summary for text in texts), (state, summary, texts)


BAD = (
    *("#nonsense", "#ranks=9&x=B&w=B", "#ranks=2x2&x=B&w=B", "#ranks=2&x=B&w=B&to=%zz&mode=fast"),
    *("#ranks=2&x=B&w=B&preset=toString", "#ranks=2x2&x=B,B&w=B,B&to=B"),
    *("#step-strategy=__proto__&step-ranks=-1&lang=xx", "#step-strategy=pipeline&step-schedule=toString"),
)


def test_bad_address_shows_the_first_view(opened):
    browser = opened(BAD[0])
    for view in BAD:
        browser.run("location.hash = arguments[0]", view)
        browser.wait_for(lambda: browser.text("#summary") == FIRST, "the first view")
        assert "out[0, 0] = 29 = 7 + 22" in browser.text("#readout"), view
        assert browser.run(PROBLEMS) == [] and "./launch.sh -n 2 mine.py" in browser.text("#program"), view
        browser.run("location.hash = '#ranks=3&x=S0&w=B'")
        browser.wait_for(lambda: "On 3 ranks, x S(0) @ w B" in browser.text("#summary"), "the view of a good address")


CHOICES = """
return arguments[0].map((input) => {
  const { x, y, width, height } = input.getBoundingClientRect();
  document.elementFromPoint(x + width / 2, y + height / 2).click();
  const chosen = Object.fromEntries(new FormData(input.form));
  return [input.name, input.value, chosen, document.getElementById("summary").textContent];
});
"""


def test_each_choice_by_clicking(opened):
    for ranks in ("1", "4", "2", "3", "2x2"):
        browser = opened("#ranks=3&x=S0&w=B" if ranks == "2" else "#ranks=2&x=S0&w=B")
        browser.one(f"#controls input[name=ranks][value='{ranks}']").click()
        inputs = browser.all("#controls input:not([name=ranks], [name=mode])")
        assert len(inputs) == (16 if ranks == "2x2" else 13)
        for name, value, chosen, summary in browser.run(CHOICES, inputs):
            x, w = (chosen.get(name) or f"{chosen[f'{name}0']}, {chosen[f'{name}1']}" for name in "xw")
            assert chosen[name] == value and chosen["ranks"] == ranks and f"x {x} @ w {w}" in summary
        browser.one("#controls input[value=graph]").click()
        assert "mode=graph" in browser.view() and "flow.nn.Graph" in browser.text("#code")


def test_keyboard(opened):
    browser = opened()
    focus = "const { name, value, id, dataset } = document.activeElement; return [name || dataset.preset || id, value];"
    browser.press("TAB", "TAB", "ENTER")  # the button of the language, then the first preset
    assert browser.run(focus)[0] == "data" and "preset=data" in browser.view()
    browser.run("document.querySelector('#controls [name=ranks]:checked').focus()")
    for ranks in ("3", "4", "2x2"):  # the focus stays, although a mesh has other controls
        browser.press("ARROW_RIGHT")
        assert browser.run(focus) == ["ranks", ranks] and f"ranks={ranks}&" in browser.view()
        assert ("preset=data" in browser.view()) == (ranks != "2x2")  # its SBPs are still chosen
    outline = "return getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    assert browser.run(outline) == "solid"
    browser.run("document.querySelector('#steps-ranks').focus()")
    for key, ranks in (("ARROW_RIGHT", "5"), ("HOME", "1"), ("END", "8")):
        browser.press(key)
        assert browser.run(focus)[0] == "steps-ranks" and f"step-ranks={ranks}&" in browser.view()
    browser.run("document.querySelector('#steps [value=data]').focus()")
    assert not browser.one("#steps-micro").is_displayed() and not browser.one("#steps [value=gpipe]").is_displayed()
    browser.press("ARROW_RIGHT", "ARROW_RIGHT")  # the focus stays; only a pipeline has micro-batches
    assert browser.run(focus)[1] == "pipeline" and browser.one("#steps-micro").is_displayed()
    browser.press("TAB", "ARROW_RIGHT", "ARROW_RIGHT")  # and a schedule
    assert browser.run(focus) == ["steps-schedule", "zero_bubble"] and "step-schedule=zero_bubble&" in browser.view()
    opened("#ranks=2&x=S1&w=S0&to=B")
    browser.run("document.querySelector('[data-stage=multiply] [role=grid] [tabindex=\"0\"]').focus()")
    browser.press("ARROW_DOWN", *["ARROW_RIGHT"] * 4)  # not beyond the last
    assert browser.text("#readout").splitlines()[1:] == [
        "out[1, 3] = 70 = 27 + 43",
        "rank 0: 5·3 + 6·2 = 27",
        "rank 1: 7·5 + 8·1 = 43",
    ]


def test_buttons(opened):
    browser = opened("#ranks=2&x=B&w=S1&preset=megatron")
    browser.one("[data-step='1']").click()
    assert "On 2 ranks, x S(1) @ w S(0) gives out P" in browser.text("#summary") and "megatron" in browser.view()
    browser.one("[data-stage=multiply] [data-rank='1'] [data-of=out][data-row='2'][data-column='1']").click()
    assert "out[2, 1] = 67 = 39 + 28" in browser.text("#readout") and len(browser.all(".cell.seen")) == 6
    browser.one("#about .as-link").click()
    assert browser.run("return document.activeElement.id") == "steps-title"
    browser.one("#steps summary").click()
    assert "all-reduce of activations, layer 8" in browser.text(".steps-words")
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    browser.one("#copy").click()
    browser.wait_for(lambda: browser.text("#copy") == "Copied", "the copy")
    read = "navigator.clipboard.readText().then(arguments[0], (error) => arguments[0](String(error)))"
    assert browser.driver.execute_async_script(read) == browser.text("#code")


def test_language_is_that_of_the_user(opened):
    browser = opened(language="zh-CN")
    assert browser.run("return document.documentElement.lang") == "zh-CN" and "lang=" not in browser.view()
    assert "在 2 个 rank 上" in browser.text("#summary")
    browser.one("#language").click()
    assert browser.text("#summary") == FIRST and "lang=en" in browser.view()


def test_both_languages_have_the_same_texts_and_values(opened):
    for words in opened().run("return [Words, StepWords]"):
        assert list(words) == ["en", "zh"] and list(words["en"]) == list(words["zh"])
        for key, text in words["en"].items():
            values = [sorted(set(re.findall(r"{\w+}", language))) for language in (text, words["zh"][key])]
            assert values[0] == values[1], key


CONTRASTS = """
const light = (name) => {
  const node = document.getElementById("steps");
  node.style.outlineColor = `var(${name})`;
  const parts = getComputedStyle(node).outlineColor.match(/[\\d.]+/g).map((part) => part / 255);
  const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
};
const pairs = [["--quiet", "--raised"], ["--text", "--raised"], ["--move", "--ground"]];
for (const kind of ["forward", "backward", "backward-weights", "move", "update"]) pairs.push(["--letter", `--${kind}`]);
for (const rank of [0, 1, 2, 3]) pairs.push(["--text", `--tint${rank}`], [`--rank${rank}`, "--ground"]);
return pairs.map(([text, ground]) => [text, ground, light(text) / light(ground)]);
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_and_prints(opened, dark):
    browser = opened(dark=dark)
    for text, ground, contrast in browser.run(CONTRASTS):
        assert max(contrast, 1 / contrast) >= 4.5, (text, ground)
    browser.show(media="print", dark=dark)
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not browser.one("#presets").is_displayed() and len(browser.driver.print_page()) > 20_000
