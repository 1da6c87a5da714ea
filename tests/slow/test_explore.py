"""docs/explore in a browser: it draws what ranks did, its programs run, and its formulas hold."""

import ast
import itertools
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from oneflow_cookbook.explore import matmul_runs
from oneflow_cookbook.explore.matmul_runs import CONTROL, MESH_NAMES, RANKS
from oneflow_cookbook.measure.sbp import NAMES, Layout
from oneflow_cookbook.measure.theory import Boxing, lines
from oneflow_cookbook.plan import formulas
from oneflow_cookbook.start.recipe import load, path_of
from tests import atlas
from tests.browser import Browser
from tests.cases import CASES, ROOT, pipelines
from tests.cases.ladder import Checks
from tests.jobs import QUOTED, Run

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
const numbers = (matrix) => [...matrix.querySelectorAll(".cell")].map((cell) => [
  +cell.dataset.row, +cell.dataset.column, +cell.textContent,
]);
const matrices = (stage) => [...stage.querySelectorAll(".matrix:has(.cell)")].map((matrix) => [
  `${stage.dataset.stage} ${matrix.querySelector(".cell").dataset.of} ${matrix.dataset.rank ?? "whole"}`,
  numbers(matrix),
]);
const texts = (row) => [...row.cells].slice(1).map((cell) => cell.textContent);
return states.map(([x, w, to, mode]) => {
  readAddress(`#ranks=${ranks}&x=${short(x)}&w=${short(w)}&to=${short(to)}&mode=${mode}`);
  draw();
  const drawn = [...document.querySelectorAll("#stages > [data-stage]")].flatMap(matrices).reverse();
  return [Object.fromEntries(drawn), [...document.querySelectorAll("#bytes table")].map((table) =>
    [...table.rows].slice(2).map(texts))];
});
"""


def in_mode(entry, mode):
    """The entry of a mode; that of a graph is left out where it is the same."""
    return entry.get(mode, entry["eager"])


def recorded(stage, tensor, which, sbp, blocks):
    """{"stage tensor rank": [[row, column, number]]} of what the ranks have recorded."""
    layout, cells = Layout(sbp.replace(",", ", "), RANKS[which]), {}
    for rank, block in enumerate(blocks):
        [(top, _), (left, _)] = layout.block((4, 4), rank)
        numbers = np.ndenumerate(np.array(block))
        cells[f"{stage} {tensor} {rank}"] = [[top + i, left + j, number] for (i, j), number in numbers]
    return cells


def boxings(moves, which):
    """A Boxing for each (old SBP, new SBP) of a matrix at the size at which bytes are measured."""
    layouts = [[(sbp.replace(",", ", "), RANKS[which]) for sbp in move] for move in moves if move[0] != move[1]]
    return [Boxing(matmul_runs.SHAPES[0], old, new, item=4) for old, new in layouts]


def check_bytes(table, moved, sent, mode, *where):
    """The table shows the bytes of the formula and of the run, and these are near, but for known deviations."""
    by_formula, measured = table
    total = None if any(boxing.total is None for boxing in moved) else sum(boxing.total for boxing in moved)
    assert by_formula[-1] == in_units(total), where
    assert measured[:-1] == [in_units(count) for count in sent] and measured[-1].startswith(in_units(sum(sent))), where
    if total is not None and all(lines(boxing.shape, boxing.old, boxing.new) for boxing in moved):
        expected = 4 * sum(atlas.expected(mode, boxing.shape, boxing.old, boxing.new) for boxing in moved)
        assert abs(sum(sent) - expected) <= 0.02 * expected + CONTROL * len(sent), where
    elif total is not None:  # of several steps: at least what any algorithm must send
        assert sum(sent) >= 0.98 * total, where


def in_units(count):
    if count is None:
        return "no formula"
    if count < 1000:
        return f"{count:g} B"
    return f"{count / 1e3:.{1 if count < 1e5 else 0}f} kB" if count < 1e6 else f"{count / 1e6:.2f} MB"


@pytest.mark.parametrize("which", RANKS)
def test_drawn_numbers_and_bytes_are_those_of_the_runs(opened, which):
    states = [
        (*pair.split(" @ "), to, mode)
        for pair, entry in RUNS["runs"][which].items()
        for to, mode in itertools.product(["", *entry.get("to", {})], matmul_runs.MODES)
    ]
    assert len(states) == (512 if which == "2x2" else 160)
    states = states[::3]
    names = {x for x, *_ in states}
    assert len(names) == (16 if which == "2x2" else 4) and names == {w for _, w, *_ in states}
    assert {mode for *_, mode in states} == set(matmul_runs.MODES)
    whole = [[*place, number] for place, number in np.ndenumerate(VALUES["out"])]
    browser = opened("#lang=en")
    parts = [browser.run(DRAWN, which, states[first : first + 32]) for first in range(0, len(states), 32)]
    for (x, w, to, mode), (drawn, tables) in zip(states, itertools.chain(*parts)):
        pair, where = RUNS["runs"][which][f"{x} @ {w}"], (which, x, w, to, mode)
        run, stages = in_mode(pair, mode), {name.split()[0] for name in drawn}
        expected = recorded("multiply", "out", which, run["out_sbp"], run["out"])
        for name, sbp, multiplied in zip("xw", (x, w), run["inputs"]):
            assert (f"move-{name}" in stages) == (sbp != multiplied), where
            stage = "multiply" if sbp == multiplied else f"move-{name}"
            expected.update(recorded(stage, name, which, sbp, pair[name]))
        moved = boxings(zip((x, w), run.get("large", run)["inputs"]), which)
        if moved or "large" in run:
            check_bytes(tables.pop(0), moved, run["sent"], mode, *where)
        if to and to != run["out_sbp"]:
            change = in_mode(pair["to"][to], mode)
            expected.update(recorded("change", "out-to", which, to, change["out"]))
            check_bytes(tables.pop(0), boxings([(run["out_sbp"], to)], which), change["sent"], mode, *where)
        expected.update({name: whole for name in drawn if name.endswith("whole") and "out" in name})
        assert {**drawn, **expected} == drawn and "multiply out whole" in expected and tables == [], where
        if mode == "eager":  # then what each rank multiplies is known too
            assert all(f"multiply {name} {rank}" in drawn for name in "xw" for rank in range(len(run["out"]))), where


MOVES = """
return arguments[0].map(([shape, from, to, ranks]) => {
  const names = Matmul.collectives(from, to).map(({ axis, name }) => [axis, name]);
  return [names, Matmul.formula(shape, from, to, ranks) ?? { total: null, byRank: null }];
});
"""


@pytest.mark.parametrize("which", RANKS)
def test_moves_are_those_of_the_theory(opened, which):
    names = MESH_NAMES if which == "2x2" else NAMES
    moves = list(itertools.product([(4, 4), (7, 5)], names, names))
    arguments = [[shape, matmul_runs.key(old), matmul_runs.key(new), which] for shape, old, new in moves]
    for (shape, old, new), (steps, formula) in zip(moves, opened().run(MOVES, arguments)):
        boxing = Boxing(shape, (old, RANKS[which]), (new, RANKS[which]))
        along = " along axis {}" if which == "2x2" else ""
        assert (", ".join(name + along.format(axis) for axis, name in steps) or "nothing") == boxing.collective
        assert formula["total"] == (None if boxing.total is None else pytest.approx(boxing.total)), (old, new)
        by_rank = boxing.by_rank and [boxing.by_rank[rank] for rank in sorted(boxing.by_rank)]
        assert formula["byRank"] == (by_rank and pytest.approx(by_rank)), (old, new)


PROGRAMS = [
    ("1", "P", "S(0)", "B", "eager"),
    ("2", "S(1)", "S(0)", "S(1)", "graph"),
    ("3", "P", "S(0)", "P", "eager"),
    ("4", "S(0)", "S(1)", "", "graph"),
    ("2x2", "S(0),B", "B,S(1)", "", "graph"),
    "pipeline",
]


def blocks_in(lines):
    """The matrix that each rank prints."""
    return [ast.literal_eval(re.search(r"\[\[.*|\[\]$", line.strip())[0]) for line in lines]


@pytest.mark.parametrize("state", PROGRAMS, ids=lambda state: "".join(state))
def test_program_prints_what_the_page_shows(pools, opened, state, tmp_path):
    if state == "pipeline":
        ranks, view, blocks = "2", "#ranks=2&x=B&w=B&preset=pipeline", [[], (VALUES["out"] @ VALUES["w"]).tolist()]
    else:
        ranks, x, w, to, mode = state
        view = re.sub(r"[()]", "", f"#ranks={ranks}&x={x}&w={w}&to={to}&mode={mode}")
        pair = RUNS["runs"][ranks][f"{x} @ {w}"]
        blocks = in_mode(pair["to"][to] if to else pair, mode)["out"]
    browser = opened(view)
    if state == "pipeline":
        drawn = browser.run("return [...document.querySelectorAll('[data-of=out]')].map((cell) => +cell.textContent)")
        assert drawn == sum(blocks[1], [])
    (tmp_path / "mine.py").write_text(browser.run("return document.getElementById('code').textContent"))
    lines = pools(len(blocks)).call(PRINTED, path=str(tmp_path / "mine.py"))
    assert blocks_in(lines) == blocks


def test_command_that_the_page_shows_runs_its_program(opened, tmp_path):
    browser, pair = opened(), RUNS["runs"]["2"]["S(1) @ S(0)"]
    (tmp_path / "mine.py").write_text(browser.run("return document.getElementById('code').textContent"))
    [command] = re.findall(r"\./launch\.sh.*", browser.text("#program"))
    job = Run("bash", "-c", command.replace("./launch.sh", QUOTED), cwd=tmp_path).wait()
    assert (job.code, job.err) == (0, "") and blocks_in(sorted(job.out.splitlines())) == pair["to"]["B"]["eager"]["out"]


# ---- the training step

SUM, GATHER, SCATTER = ("P", "B"), ("S(0)", "B"), ("P", "S(0)")
SUM_ON_MESH = ("S(0), P", "S(0), B")
STRATEGIES = {  # forward and backward of a pair of layers in order, and how what is sent changes its SBP
    "data": ("forward forward", "backward gradients backward gradients", {"gradients": SUM}),
    "zero": (
        "weights forward weights forward",
        "backward gradients backward gradients",
        {"weights": GATHER, "gradients": SCATTER},
    ),
    "tensor": (
        "forward forward activations",
        "backward backward activation_gradients",
        {"activations": SUM, "activation_gradients": SUM},
    ),
    "data_tensor": (
        "forward forward activations",
        "backward gradients backward activation_gradients gradients",
        {"activations": SUM_ON_MESH, "activation_gradients": SUM_ON_MESH, "gradients": ("P, S(1)", "B, S(1)")},
    ),
    "pipeline": (),
}
STRATEGIES["sharded"] = STRATEGIES["zero"]
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
STATES = """
const { STRATEGIES, SCHEDULES, microBatches, ROWS } = Steps;
const views = Object.entries(STRATEGIES).flatMap(([strategy, { ranks }]) => {
  const schedules = strategy === "pipeline" ? Object.keys(SCHEDULES) : ["gpipe"];
  return schedules.flatMap((schedule) => ranks.map((n) => ({ strategy, schedule, ranks: n })));
});
return views.flatMap((view) => ROWS.flatMap((rows) =>
  microBatches(rows).filter((m) => (view.strategy === "pipeline" ? m % 3 === 1 : m === 1)).flatMap((micro) =>
    [1, 50].map((link) => {
      const state = { ...view, rows, micro, link };
      return [state, Steps.mesh(state), Steps.step(state)];
    }))));
"""


@pytest.fixture(scope="module")
def steps(browser):
    """(the model, [(state, mesh, step)] of every strategy, number of ranks and of rows on two links)."""
    browser.open(PAGE)
    return browser.run("return Steps.MODEL"), browser.run(STATES)


KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weights"}


def schedule_of(schedule, n, micro):
    """[[(kind, micro-batch) in its order] of each rank] of a pipeline; micro-batches count from 1."""
    return [[(KINDS[op], m + 1) for op, _, m in row] for row in pipelines.rows_of_schedule(schedule, n, micro)]


def seconds_of(rows, seconds, send):
    """When the last rank has made all calls: the times of arrival are corrected until none changes."""
    arrivals, corrected = None, {}
    while corrected != arrivals:
        arrivals, corrected, ends = corrected, {}, []
        for rank, row in enumerate(rows):
            time = 0
            for kind, m in row:
                forward = kind == "forward"
                time = max(time, arrivals.get((rank, forward, m), 0)) + seconds[kind]
                to = rank + 1 if forward else rank - 1
                if kind != "backward_weights" and 0 <= to < len(rows):
                    time += send
                    corrected[to, forward, m] = time
            ends.append(time)
    return max(ends)


def order_of_pipeline(state):
    """What each rank does and sends, in order."""
    n, orders = state["ranks"], []
    for rank, row in enumerate(schedule_of(state["schedule"], n, state["micro"])):
        order = []
        for kind, m in row:
            order.append(f"{kind} {m}")
            if kind == "forward" and rank < n - 1:
                order.append(f"activations {m}")
            if kind in ("backward", "backward_input") and rank > 0:
                order.append(f"activation_gradients {m}")
        orders.append([*order, "update"])
    return orders


def order_and_bytes(state, mesh, model):
    """(what each rank does and sends, in order; {what is sent: bytes by rank}), by STRATEGIES and theory.Boxing."""
    n, activation = state["ranks"], (state["rows"], model["hidden"])
    if state["strategy"] == "pipeline":
        size = 4 * activation[0] * activation[1]
        sent = {"activations": [size] * (n - 1) + [0], "activation_gradients": [0] + [size] * (n - 1)}
        return order_of_pipeline(state), sent
    forward, backward, moves = STRATEGIES[state["strategy"]]
    order = " ".join([forward] * (model["layers"] // 2) + [backward] * (model["layers"] // 2) + ["update"]).split()
    ranks = np.arange(n).reshape(-1, 2) if state["strategy"] == "data_tensor" else np.arange(n)
    sent = {}
    for what, sbps in moves.items():
        shape = activation if "activation" in what else (model["hidden"], model["hidden"])
        boxing = Boxing(shape, *((sbp, ranks.tolist()) for sbp in sbps), 4)
        sent[what] = [order.count(what) * boxing.by_rank[rank] for rank in range(n)]
    return [[word for word in order if word not in moves or n > 1]] * n, sent


def test_step_takes_the_time_of_its_parts_and_sends_their_bytes(steps):
    model, states = steps
    assert {state["strategy"] for state, *_ in states} == set(STRATEGIES)
    for state, mesh, step in states:
        order, sent = order_and_bytes(state, mesh, model)
        n, micro, byte = state["ranks"], state["micro"], 1 / state["link"] / 1e9
        for blocks, words in zip(step["lanes"], order):
            labels = [block.get("of", block["kind"]).replace(" ", "_") for block in blocks]
            numbers = [f" {block['micro']}" if "micro" in block else "" for block in blocks]
            shown = [label + number for label, number in zip(labels, numbers) if label != "idle"]
            assert shown == words, state
            assert blocks[0]["start"] == 0 and blocks[-1]["end"] == pytest.approx(step["seconds"]), state
            assert all(block["end"] == after["start"] for block, after in zip(blocks, blocks[1:])), state
        by_rank = np.sum(list(sent.values()), axis=0)
        assert step["sent"] == pytest.approx(by_rank.tolist()), state
        shown = dict.fromkeys(sent, 0)
        for collective in step["collectives"]:
            shown[collective["of"].replace(" ", "_")] += collective["bytes"]
        assert shown == pytest.approx({what: max(sizes) for what, sizes in sent.items()}), state
        forward = 2 * state["rows"] * model["hidden"] ** 2 * model["layers"] / n / 100e9
        update = step["memory"][0]["optimizer"] / 8 * 1e-9
        times = {"forward": forward, "backward": 2 * forward, "backward_input": 0, "backward_weights": 0}
        if state["schedule"] == "zero_bubble":
            times = {**times, "backward": 0, "backward_input": forward, "backward_weights": forward}
        seconds = 3 * forward + by_rank[0] * byte
        if mesh["pipeline"] > 1:
            of_micro_batch = {kind: time / micro for kind, time in times.items()}
            rows = schedule_of(state["schedule"], n, micro)
            seconds = seconds_of(rows, of_micro_batch, by_rank[0] * byte / micro)
        if mesh["pipeline"] > 1 and state["schedule"] == "gpipe":  # n + micro - 2 times a rank waits for another
            waits = (n + micro - 2) * (3 * forward + 2 * by_rank[0] * byte) / micro
            assert seconds == pytest.approx(waits + 3 * forward / micro), state
        parts = {**times, "move": by_rank.mean() * byte, "update": update}
        parts["idle"] = seconds + update - sum(parts.values())
        assert step["seconds"] == pytest.approx(seconds + update), state
        assert step["shares"] == pytest.approx({kind: part / step["seconds"] for kind, part in parts.items()}, abs=1e-9)


ORDERS = """
const letters = { forward: "F", backward: "B", backward_input: "I", backward_weights: "W" };
return Object.fromEntries(Object.entries(Steps.SCHEDULES).map(([name, { calls }]) => [name, arguments[0].map(([n, m]) =>
  [...Array(n).keys()].map((rank) => calls(rank, n, m).map(([kind, j]) => [letters[kind], rank, j])))]));
"""


def test_schedules_are_those_of_the_recipe(opened):
    sizes = [(n, m) for n in (1, 2, 4, 8) for m in range(1, 17)]
    recipe = load(str(path_of("pipeline_schedules")))
    orders = opened().run(ORDERS, sizes)
    assert set(orders) == set(recipe.SCHEDULES)
    for name, schedule in recipe.SCHEDULES.items():
        for (n, m), order in zip(sizes, orders[name], strict=True):
            assert [[tuple(call) for call in row] for row in order] == schedule(n, m), (name, n, m)


IDLE = """
const micro = [...Array(16).keys()].map((m) => m + 1);
return Object.keys(Steps.SCHEDULES).flatMap((schedule) => [2, 4, 8].flatMap((n) => micro.map((m) => {
  const state = { strategy: "pipeline", schedule, ranks: n, micro: m, rows: 1680, link: 1e30 };
  const { lanes, seconds, shares, idleFormula } = Steps.step(state);
  const [{ start, end }] = lanes[0].filter(({ kind }) => kind === "update");
  return [schedule, n, m, idleFormula, shares.idle * seconds / (seconds - (end - start))];
})));
"""


def test_idle_formula_is_what_is_drawn_where_sends_take_no_time(opened):
    for schedule, n, m, formula, drawn in opened().run(IDLE):
        expected = (n - 1) / (m + n - 1)
        if schedule == "zero_bubble":
            late = max(0, n - m)  # by so many micro-batches the pauses are too short for W
            expected = (n - 1 + late) / (3 * m + n - 1 + late)
        assert formula["above"] / formula["below"] == pytest.approx(expected), (schedule, n, m)
        assert drawn == pytest.approx(expected), (schedule, n, m)


FORMULAS = {  # at 4 stages and so many micro-batches
    ("gpipe", 6): "(p - 1) / (m + p - 1) = 3 / 9 = 33%",
    ("1f1b", 6): "(p - 1) / (m + p - 1) = 3 / 9 = 33%",
    ("zero_bubble", 6): "(p - 1) / (3m + p - 1) = 3 / 21 = 14%",
    ("zero_bubble", 2): "(2p - m - 1) / (2p + 2m - 1) = 5 / 11 = 45%",
}


@pytest.mark.parametrize("schedule, micro", FORMULAS)
def test_texts_follow_the_schedule(opened, schedule, micro):
    view = f"#lang=en&step-strategy=pipeline&step-ranks=4&step-micro={micro}&step-schedule={schedule}"
    text = opened(view).text("#steps")
    assert FORMULAS[schedule, micro] in text and f"{micro} micro-batches." in text
    splits = schedule == "zero_bubble"
    for words in (
        "backward: gradient of the input (I)",
        "backward: gradient of the weights (W)",
        "output gradients kept for W",
    ):
        assert (words in text) == splits


def test_memory_of_a_step_is_that_of_plan(steps):
    model, states = steps
    for state, mesh, step in states:
        strategy, n = state["strategy"], state["ranks"]
        stage = (model["layers"] * model["hidden"] ** 2 / mesh["pipeline"], 0)
        elements = formulas.elements_on_a_rank(stage, mesh["tensor"], mesh["data"] if strategy == "sharded" else 1)
        sizes = zip(("weights", "gradients", "optimizer"), formulas.PRECISIONS["fp32"])
        expected = {part: size * elements for part, size in sizes} | {"pending": 0}
        expected["optimizer"] /= n if strategy == "zero" else 1
        # of the second of a pair only a part
        inputs = (1 + 1 / mesh["tensor"]) / 2 * model["layers"] / mesh["pipeline"]
        expected["activations"] = 4 * state["rows"] / mesh["data"] * model["hidden"] * inputs
        gathered = 4 * (model["layers"] + 1) * model["hidden"] ** 2
        expected["gathered"] = gathered if strategy == "sharded" and n > 1 else 0
        by_rank = [expected] * n
        if strategy == "pipeline":
            micro, rows = state["micro"], pipelines.rows_of_schedule(state["schedule"], n, state["micro"])
            held = [pipelines.most_held(row) for row in rows]
            pending = [max(np.cumsum([(op == "I") - (op == "W") for op, _, _ in row])) for row in rows]
            at_most = {"gpipe": [micro] * n, "1f1b": [min(micro, n - k) for k in range(n)]}
            assert held == at_most.get(state["schedule"], [min(micro, n)] * n), state
            size = expected["activations"] / micro
            by_rank = [{**expected, "activations": k * size, "pending": p * size} for k, p in zip(held, pending)]
        for parts, memory in zip(by_rank, step["memory"], strict=True):
            assert memory == pytest.approx(parts), state
        assert step["fullest"] == np.argmax([sum(memory.values()) for memory in step["memory"]]), state


SMALL = {"layers": 4, "hidden": 720}  # fewer and smaller layers
SMALL_STEPS = [(n, name) for n in (2, 4) for name in STRATEGIES if n == 4 or name != "data_tensor"]


@pytest.fixture(scope="module")
def small_steps(browser):
    """{case: step} of SMALL_STEPS, with 4 micro-batches in a pipeline."""
    state = {"schedule": "gpipe", "rows": 1440, "micro": 4, "link": 1}
    states = [{**state, "strategy": name, "ranks": n} for n, name in SMALL_STEPS]
    browser.open(PAGE)
    steps = browser.run("Object.assign(Steps.MODEL, arguments[0]); return arguments[1].map(Steps.step)", SMALL, states)
    return dict(zip(SMALL_STEPS, steps))


@pytest.mark.parametrize("n, strategy", SMALL_STEPS)
def test_ranks_send_and_keep_what_the_page_says(pools, small_steps, n, strategy):
    step, micro = small_steps[n, strategy], 4 if strategy == "pipeline" else 1
    arguments = {"strategy": strategy, "rows": 1440, "micro_batches": micro, **SMALL}
    by_rank = pools(n).call(f"{ROOT / 'tests' / 'on_rank_steps.py'}:sent_and_kept", **arguments)
    for (sent, inputs, weights), expected, memory in zip(by_rank, step["sent"], step["memory"], strict=True):
        assert sent == pytest.approx(expected, rel=0.02) and inputs == memory["activations"]
        if strategy == "sharded":
            assert weights == memory["gathered"] - 4 * SMALL["hidden"] ** 2


@pytest.mark.parametrize(
    "strategy, recipe", [("data", "train_data_parallel"), ("zero", "zero_optimizer"), ("sharded", "fully_sharded")]
)
def test_step_sends_the_bytes_of_a_recipe(steps, strategy, recipe):
    """As a multiple of the weights."""
    model, states = steps
    for state, _, step in states:
        if state["strategy"] == strategy and state["ranks"] in (2, 4):
            sizes = {"batch": 16, "in_features": 16, "hidden_size": 16, "out_features": 16}
            case = CASES[recipe](state["ranks"], **sizes)
            sent, weights = step["sent"][0] / (4 * model["layers"] * model["hidden"] ** 2), 2 * 16 * 16
            assert sent == pytest.approx(case.sends[0] / weights, rel=0.02), state


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
    clicks += [("", f"#steps input[value={name}]") for name in STRATEGIES]
    clicks += [("#step-strategy=pipeline&step-ranks=8", f"#steps input[value='{name}']") for name in SCHEDULES[1:]]
    browser = opened(width=width, dark=dark)
    for number, (view, click) in enumerate([*clicks, *((view, "") for view in VIEWS)][::every]):
        view = view or "#ranks=2&x=S0&w=B&step-strategy=zero"
        link, text, links = browser.run(SHOWN, f"{view}&lang={lang}", click)
        assert browser.run(PROBLEMS) == [], link
        assert not click or re.search(r"=(\w+)]", click.replace("'", ""))[1] in link
        if "preset" in click:
            [pressed] = browser.all("[data-preset][aria-pressed=true]")
            assert pressed.get_attribute("data-preset") in click and ".py" in browser.text("#about"), link
        if lang == "en" and number % 3 == 0:
            browser.open(PAGE, link)
            assert (browser.view(), browser.text("body")) == (link, text)
        for href in links:
            assert Path(unquote(urlsplit(href).path)).exists(), href
    browser.one("#language").click()
    assert browser.text("body") != text and f"lang={'en' if lang == 'zh' else 'zh'}" in browser.view()


LANES = """
const schedules = (strategy) => (strategy === "pipeline" ? Object.keys(Steps.SCHEDULES) : ["gpipe"]);
const views = Object.entries(Steps.STRATEGIES).flatMap(([strategy, { ranks }]) =>
  schedules(strategy).flatMap((schedule) => ranks.map((n) => ({ strategy, schedule, ranks: n }))));
return views.flatMap((view) =>
  [[1680, 1, 1], [840, 15, 0.1], [6720, 16, 50]].map(([rows, micro, link]) => {
    stepState = { ...view, rows, micro, link };
    drawSteps();
    const drawn = [...document.querySelectorAll(".steps-lanes [data-kind]")];
    const { lanes } = Steps.step(Steps.settle(stepState));
    const blocks = lanes.flatMap((lane, rank) => lane.map(({ kind }) => `${rank} ${kind}`));
    const box = (node) => node.getBoundingClientRect();
    const picture = box(document.querySelector(".steps-lanes"));
    const inside = drawn.every((node) => box(node).left >= picture.left - 1 && box(node).right <= picture.right + 1);
    return [stepState, inside, drawn.map(({ dataset }) => `${dataset.rank} ${dataset.kind}`), blocks];
  }));
"""


def test_every_block_of_a_step_is_drawn(opened):
    for state, inside, drawn, blocks in opened(width=360).run(LANES):
        assert inside and drawn == blocks, state


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
    outline = "return getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    assert browser.run(outline) == "solid"
    browser.run("document.querySelector('#steps-ranks').focus()")
    for key, ranks in (("ARROW_RIGHT", "5"), ("HOME", "1"), ("END", "8")):
        browser.press(key)
        assert browser.run(focus)[0] == "steps-ranks" and f"step-ranks={ranks}&" in browser.view()
    browser.run("document.querySelector('#steps [value=data]').focus()")
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


def test_link_without_a_schedule_shows_gpipe(opened):
    link = "#ranks=2&x=S1&w=S0&to=B&lang=en&step-strategy={}&step-ranks=4&step-micro=4&step-rows=1680&step-link=1"
    browser = opened(link.format("pipeline"))
    assert browser.one("#steps [value=gpipe]").is_selected() and "GPipe: all forwards, then" in browser.text("#steps")
    assert not opened(link.format("zero")).one("#steps [value=gpipe]").is_displayed()


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
