"""The training step of docs/explore.html: its bytes, memory and idle share against the formulas, and against runs."""

import itertools
import re

import numpy as np
import pytest

from harness.measure.sbp import Layout
from harness.measure.theory import Boxing
from harness.plan import formulas
from harness.plan.model import Model
from tests.cases import ROOT
from tests.javascript import evaluate

STACK = f"{ROOT / 'tests' / 'on_rank_steps.py'}:"
ITEM = 4
INSTANT = 1e9  # GB/s: sends take no time
STATES = """
Object.entries(Steps.STRATEGIES).flatMap(([strategy, { ranks }]) => ranks.flatMap((n) => Steps.ROWS.flatMap((rows) =>
  Steps.microBatches(rows).filter((m) => strategy === "pipeline" || m === 1).flatMap((micro) =>
    [1, argument].map((link) => {
      const state = { strategy, ranks: n, rows, micro, link };
      return [state, Steps.mesh(state), Steps.step(state)];
    })))))
"""


@pytest.fixture(scope="module")
def model():
    return evaluate(["steps.js"], "Steps.MODEL")


@pytest.fixture(scope="module")
def states():
    """[(state, mesh, step)]: every strategy, number of ranks and of rows, a slow and an instant link."""
    found = evaluate(["steps.js"], STATES, INSTANT)
    assert {state["strategy"] for state, _, _ in found} == set(LAYOUTS)
    assert {state["ranks"] for state, _, _ in found} == set(range(1, 9))
    assert {state["micro"] for state, _, _ in found} >= {1, 2, 3, 4, 8, 16}
    return found


def line(mesh):
    return list(range(max(mesh.values())))


def grid(mesh):
    return np.arange(mesh["data"] * mesh["tensor"]).reshape(-1, mesh["tensor"]).tolist()


# strategy -> (the placement, the SBPs of x of the layers of a pair, those of their weights).
LAYOUTS = {
    "data": (line, ("S(0)", "S(0)"), ("B", "B")),
    "zero": (line, ("S(0)", "S(0)"), ("B", "B")),
    "sharded": (line, ("S(0)", "S(0)"), ("S(0)", "S(0)")),
    "tensor": (line, ("B", "S(1)"), ("S(1)", "S(0)")),
    "data_tensor": (grid, ("S(0), B", "S(0), S(1)"), ("B, S(1)", "B, S(0)")),
    "pipeline": (None, ("B", "B"), ("B", "B")),
}
# strategy -> [(of what, SBP before, SBP after, how many layers have it)]; a pair's two weights move in different SBPs.
MOVES = {
    "data": [("gradients", "P", "B", 1)],
    "zero": [("weights", "S(0)", "B", 1), ("gradients", "P", "S(0)", 1)],
    "sharded": [("weights", "S(0)", "B", 1), ("gradients", "P", "S(0)", 1)],
    "tensor": [("activations", "P", "B", 1 / 2), ("activation gradients", "P", "B", 1 / 2)],
    "data_tensor": [
        ("activations", "S(0), P", "S(0), B", 1 / 2),
        ("activation gradients", "S(0), P", "S(0), B", 1 / 2),
        ("gradients", "P, S(1)", "B, S(1)", 1 / 2),
        ("gradients", "P, S(0)", "B, S(0)", 1 / 2),
    ],
}


def boxings(state, mesh, model):
    """[(of what, how often in a step, Boxing)] by harness/measure/theory.py."""
    activation, weight = (state["rows"], model["hidden"]), (model["hidden"], model["hidden"])
    if state["strategy"] == "pipeline":
        pairs = [([k], [k + 1]) for k in range(state["ranks"] - 1)]
        found = [("activations", 1, Boxing(activation, ("B", here), ("B", there), ITEM)) for here, there in pairs]
        back = [Boxing(activation, ("B", there), ("B", here), ITEM) for here, there in pairs]
        return [*found, *(("activation gradients", 1, one) for one in back)]
    ranks = LAYOUTS[state["strategy"]][0](mesh)
    found = []
    for of, old, new, part in MOVES[state["strategy"]]:
        shape = activation if "activation" in of else weight
        found.append((of, part * model["layers"], Boxing(shape, (old, ranks), (new, ranks), ITEM)))
    return found


def test_bytes_by_rank_and_collective_are_those_of_the_theory(states, model):
    for state, mesh, step in states:
        by_rank, by_name = dict.fromkeys(range(state["ranks"]), 0), {}
        for of, times, boxing in boxings(state, mesh, model):
            for rank, sent in boxing.by_rank.items():
                by_rank[rank] += times * sent
            key = of, boxing.collective
            by_name[key] = by_name.get(key, 0) + times * max(boxing.by_rank.values())
        assert step["sent"] == pytest.approx([by_rank[rank] for rank in range(state["ranks"])]), state
        shown = {}
        for one in step["collectives"]:
            key = one["of"], one["name"] + (f" along axis {one['axis']}" if one["axis"] is not None else "")
            shown[key] = shown.get(key, 0) + one["bytes"]
        if state["strategy"] == "pipeline":  # the theory has each pair of neighbours, the page one for all
            by_name = {key: sent / (state["ranks"] - 1) for key, sent in by_name.items()}
        assert shown == pytest.approx({key: sent for key, sent in by_name.items() if sent}), state


def test_lanes_send_the_bytes_that_the_tables_show(states):
    for state, _, step in states:
        moves = [[one for one in blocks if one["kind"] == "move"] for blocks in step["lanes"]]
        assert [sum(one["bytes"] for one in lane) for lane in moves] == pytest.approx(step["sent"]), state
        for one in itertools.chain(*moves):
            assert one["end"] - one["start"] == pytest.approx(one["bytes"] / state["link"] / 1e9, rel=1e-6, abs=1e-9)


def test_lanes_have_no_gaps_and_all_the_work(states, model):
    for state, _, step in states:
        rates = {"forward": 1, "backward": 2}
        flops = 2 * state["rows"] * model["hidden"] ** 2 * model["layers"] / state["ranks"]
        for blocks in step["lanes"]:
            assert blocks[0]["start"] == 0
            assert blocks[-1]["end"] == pytest.approx(step["seconds"])
            assert all(one["end"] == other["start"] for one, other in zip(blocks, blocks[1:])), state
            for kind, times in rates.items():
                spent = sum(one["end"] - one["start"] for one in blocks if one["kind"] == kind)
                assert spent == pytest.approx(times * flops / 100e9), state
        assert sum(step["shares"].values()) == pytest.approx(1)


# What happens with a pair of layers, forward and backward: "F{0}" forward of the first, or what a collective moves.
PAIRS = {
    "data": ("F{0} F{1}", "B{1} gradients B{0} gradients"),
    "zero": ("weights F{0} weights F{1}", "B{1} gradients B{0} gradients"),
    "sharded": ("weights F{0} weights F{1}", "B{1} gradients B{0} gradients"),
    "tensor": ("F{0} F{1} activations", "B{1} B{0} activation_gradients"),
    "data_tensor": ("F{0} F{1} activations", "B{1} gradients B{0} activation_gradients gradients"),
}


def test_blocks_are_in_the_order_in_which_a_step_needs_them(states, model):
    for state, _, step in states:
        if state["strategy"] == "pipeline" or state["ranks"] == 1:
            continue
        steps = [
            one["of"].replace(" ", "_") if one["kind"] == "move" else f"{one['kind'][0].upper()}{one.get('layer', '')}"
            for one in step["lanes"][0]
        ]
        expected, pairs = [], range(model["layers"] // 2)
        for way, order in zip(PAIRS[state["strategy"]], (pairs, reversed(pairs))):
            for pair in order:
                expected += way.format(2 * pair + 1, 2 * pair + 2).split()
        assert steps == [*expected, "U"], state


def test_each_rank_updates_the_parameters_whose_moments_it_has(states):
    for state, _, step in states:
        parameters = step["memory"]["optimizer"] / sum(formulas.PRECISIONS["fp32"][2:3])
        for blocks in step["lanes"]:
            [update] = [one for one in blocks if one["kind"] == "update"]
            assert update["end"] - update["start"] == pytest.approx(parameters * 1e-9), state


def test_backward_takes_micro_batches_in_the_opposite_order(states):
    for state, _, step in states:
        if state["strategy"] == "pipeline":
            order = list(range(1, state["micro"] + 1))
            for blocks in step["lanes"]:
                assert [one["micro"] for one in blocks if one["kind"] == "forward"] == order
                assert [one["micro"] for one in blocks if one["kind"] == "backward"] == order[::-1]


def test_stage_begins_when_what_it_needs_has_arrived(states):
    for state, _, step in states:
        if state["strategy"] != "pipeline":
            continue
        done = {}
        for rank, blocks in enumerate(step["lanes"]):
            for one in blocks:
                if "micro" in one:
                    of = one.get("of", one["kind"])
                    done[rank, of, one["micro"]] = one
        last, order = state["ranks"] - 1, range(1, state["micro"] + 1)
        for rank, micro in itertools.product(range(last), order):
            sent, received = done[rank, "activations", micro], done[rank + 1, "forward", micro]
            assert done[rank, "forward", micro]["end"] <= sent["start"] and sent["end"] <= received["start"]
            sent, received = done[rank + 1, "activation gradients", micro], done[rank, "backward", micro]
            assert done[rank + 1, "backward", micro]["end"] <= sent["start"] and sent["end"] <= received["start"]
        assert all(done[last, "forward", micro]["end"] <= done[last, "backward", micro]["start"] for micro in order)


def test_idle_share_is_that_of_gpipe_where_sends_take_no_time(states):
    for state, mesh, step in states:
        expected = formulas.idle_share(state["micro"], mesh["pipeline"])
        assert step["idleFormula"] == pytest.approx(expected)
        if state["link"] == INSTANT:
            shares = step["shares"]
            assert shares["idle"] / (1 - shares["update"]) == pytest.approx(expected, abs=1e-6), state
        if mesh["pipeline"] == 1:
            assert step["shares"]["idle"] == 0


def of_adam(state, mesh, model):
    """{part: bytes on a rank} of weights, gradients and Adam's moments, by harness/plan/formulas.py."""
    sizes = dict(zip(("weights", "gradients", "optimizer"), formulas.PRECISIONS["fp32"]))
    stage = (model["layers"] * model["hidden"] ** 2 / mesh["pipeline"], 0)
    sharded_by = mesh["data"] if state["strategy"] == "sharded" else 1
    elements = formulas.elements_on_a_rank(stage, mesh["tensor"], sharded_by)
    return {part: size * elements for part, size in sizes.items()}


def test_memory_of_weights_gradients_and_moments_is_that_of_plan(states, model, monkeypatch):
    monkeypatch.setitem(formulas.PRECISIONS, "amp", formulas.PRECISIONS["fp32"])  # `zero` knows only that
    for state, mesh, step in states:
        shown, expected = step["memory"], of_adam(state, mesh, model)
        parameters = model["layers"] * model["hidden"] ** 2
        if state["strategy"] == "zero":
            expected["optimizer"] /= state["ranks"]
            assert sum(expected.values()) == pytest.approx(formulas.zero(parameters, state["ranks"], 1))
        if state["strategy"] == "sharded":
            assert sum(expected.values()) == pytest.approx(formulas.zero(parameters, state["ranks"], 3))
        assert {part: shown[part] for part in expected} == pytest.approx(expected), state
        gathered = ITEM * (model["layers"] + 1) * model["hidden"] ** 2
        assert shown["gathered"] == (gathered if state["strategy"] == "sharded" and state["ranks"] > 1 else 0)


def test_memory_of_activations_is_the_input_of_each_layer(states, model):
    for state, mesh, step in states:
        make, inputs, _ = LAYOUTS[state["strategy"]]
        ranks = make(mesh) if make else [0]
        shape, layers = (state["rows"], model["hidden"]), model["layers"] // mesh["pipeline"]
        blocks = [Layout(inputs[k % 2], ranks).block(shape, 0) for k in range(layers)]
        elements = sum(int(np.prod([stop - start for start, stop in block])) for block in blocks)
        assert step["memory"]["activations"] == pytest.approx(ITEM * elements), state


def added_by_a_layer(mesh, layout=()):
    """What one more layer of a GPT sends along an axis, with the weights of the layer and without its norms."""
    sizes = {"hidden_size": 1680, "num_heads": 8, "seq_len": 1680, "vocab_size": 1680, "biases": False}
    one, two = (Model(num_layers=layers, **sizes) for layers in (1, 2))
    more, less = (formulas.moved(model, mesh, 1, layout) for model in (two, one))
    norms = 2 * (mesh[0] - 1) * ITEM * mesh[1] * 2 * 1680
    return {"data": more["data"] - less["data"] - norms, "tensor": more["tensor"] - less["tensor"]}, 12 * 1680**2


def test_bytes_are_those_of_a_gpt_that_meshes_measures(states, model):
    """A layer of a GPT has 12 times the weights of ours, and two pairs of a column- and a row-parallel layer."""
    for state, _, step in states:
        n = state["ranks"]
        if state["strategy"] in ("data", "sharded"):
            layout = () if state["strategy"] == "data" else ("shard_weights",)
            added, weights = added_by_a_layer((n, 1, 1), layout)
            assert n * step["sent"][0] / model["layers"] == pytest.approx(added["data"] * 1680**2 / weights), state
        if state["strategy"] == "tensor" and state["rows"] == 1680:
            added, _ = added_by_a_layer((1, n, 1))
            assert n * step["sent"][0] / (model["layers"] / 2) == pytest.approx(added["tensor"] / 2), state


# Rows of the table of training costs in docs/sbp-atlas.md, and the mode.
MEASURED = {
    "train_data_parallel": ("data", "eager"),
    "zero_optimizer": ("zero", "graph"),
    "fully_sharded": ("sharded", "eager"),
}


@pytest.mark.parametrize("recipe", MEASURED)
def test_bytes_are_those_that_the_atlas_has_of_a_recipe(states, model, recipe):
    strategy, mode = MEASURED[recipe]
    text = (ROOT / "docs" / "sbp-atlas.md").read_text()
    row = re.search(rf"^\| {recipe}\.py \| (.+?) \| (.+?) \|", text, re.M).groups()  # of the first table: what is sent
    measured = dict(zip((2, 4), map(float, row[mode == "graph"].split(" · "))))
    weights = ITEM * model["layers"] * model["hidden"] ** 2
    for state, _, step in states:
        if state["strategy"] == strategy and state["ranks"] in measured:
            assert step["sent"][0] / weights == pytest.approx(measured[state["ranks"]], rel=0.02), state


SMALL = {"layers": 4, "hidden": 720, "rows": 1440}
RUNS = [(n, strategy) for n in (2, 4) for strategy in LAYOUTS if (n, strategy) != (2, "data_tensor")]


@pytest.mark.parametrize("n, strategy", RUNS)
def test_a_run_sends_and_keeps_what_the_page_says(pools, n, strategy):
    """A stack of fewer and smaller layers, in eager mode."""
    micro = 4 if strategy == "pipeline" else 1
    arguments = {"strategy": strategy, "micro_batches": micro, **SMALL}
    state = {"strategy": strategy, "ranks": n, "rows": SMALL["rows"], "micro": micro, "link": 1}
    change = "Object.assign(Steps.MODEL, argument.model) && Steps.step(argument.state)"
    model = {"layers": SMALL["layers"], "hidden": SMALL["hidden"]}
    step = evaluate(["steps.js"], change, {"model": model, "state": state})
    assert pools(n).call(f"{STACK}sent", **arguments) == pytest.approx(step["sent"], rel=0.02)
    for inputs, weights in pools(n).call(f"{STACK}kept", **arguments):
        assert inputs == step["memory"]["activations"]
        if strategy == "sharded":
            gradient = ITEM * SMALL["hidden"] ** 2
            assert weights == step["memory"]["gathered"] - gradient


def test_a_state_that_is_not_possible_becomes_one_that_is():
    bad = ["x", "NaN", "Infinity", "", None, -1, 0, 2.6, 99, "3", {}, [], "__proto__", "constructor"]
    names = ("strategy", "ranks", "micro", "rows", "link")
    wanted = [{name: value} for name in names for value in bad]
    wanted += [{"strategy": name, "ranks": n} for name in LAYOUTS for n in range(10)] + [{}]
    check = """argument.map((wanted) => {
      const state = Steps.settle(wanted);
      const { strategy, ranks, micro, rows, link } = state;
      const possible = Steps.STRATEGIES[strategy].ranks.includes(ranks) && Steps.ROWS.includes(rows) &&
        Steps.microBatches(rows).includes(micro) && Steps.LINKS.includes(link);
      return [possible, JSON.stringify(Steps.settle(state)) === JSON.stringify(state), state];
    })"""
    for one, (possible, same, state) in zip(wanted, evaluate(["steps.js"], check, wanted)):
        assert possible and same, (one, state)
    senseless = [{}, *({name: value} for name in names for value in ("x", "NaN", {}))]
    first = evaluate(["steps.js"], "Steps.FIRST")
    assert [state for _, _, state in evaluate(["steps.js"], check, senseless)] == [first] * len(senseless)


def test_both_languages_say_the_same_things_with_the_same_values():
    english, chinese = (evaluate(["words_steps.js"], f"StepWords.{language}") for language in ("en", "zh"))
    assert list(english) == list(chinese)
    for key, text in english.items():
        assert sorted(set(re.findall(r"{\w+}", text))) == sorted(set(re.findall(r"{\w+}", chinese[key]))), key
        assert "动量" not in chinese[key], "that is momentum; Adam has 一阶矩和二阶矩"
