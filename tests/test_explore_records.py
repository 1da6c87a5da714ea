"""docs/explore.json against numpy and the formulas: what each rank holds, what it multiplies, and what it sends."""

import json

import numpy as np
import pytest

from harness.explore import records
from harness.measure import theory
from harness.measure.sbp import NAMES
from harness.report import atlas
from tests.cases.ladder import Checks

RECORDS = json.loads(records.PATH.read_text())
X, W = (np.array(RECORDS["value"][name]) for name in "xw")
WHERE = {"1": [0], "2": [0, 1], "3": [0, 1, 2], "4": [0, 1, 2, 3], "2x2": [[0, 1], [2, 3]]}


def blocks(value, sbp, ranks):
    """What each rank must hold of a tensor: np.array_split for S, whole numbers as equal as they can be for P."""
    held = [value]
    for one, n in zip(sbp.split(","), np.shape(ranks)):
        held = [part for before in held for part in parts(before, one, n)]
    return held


def parts(value, sbp, n):
    if sbp == "B":
        return [value] * n
    if sbp == "P":
        return [value // n + (position < value % n) for position in range(n)]
    return np.array_split(value, n, axis=int(sbp[2]))


def whole(held, sbp, ranks):
    """The tensor of which ranks hold these parts."""
    held = [np.array(one) for one in held]
    for one, n in reversed(list(zip(sbp.split(","), np.shape(ranks)))):
        lines = [held[first : first + n] for first in range(0, len(held), n)]
        held = [together(line, one) for line in lines]
    return held[0]


def together(line, sbp):
    if sbp == "P":
        return sum(line)
    if sbp == "B":
        Checks.that(all(np.array_equal(one, line[0]) for one in line), "replicas differ:", line)
        return line[0]
    return np.concatenate(line, axis=int(sbp[2]))


def moved_blocks(value, old, new, ranks):
    """What each rank must hold after a move: where a P becomes something else, its parts are added."""
    n, shape = np.size(ranks), np.shape(ranks)
    sums = "".join("P" if one == "P" else "B" for one in old.split(","))
    held = np.array(blocks(value, ",".join(sums), ranks)).reshape(*shape, *value.shape)
    for axis, (before, after) in enumerate(zip(old.split(","), new.split(","))):
        if before == "P" != after:
            held = held.sum(axis, keepdims=True).repeat(shape[axis], axis)
    cut = ",".join("B" if one == "P" else one for one in new.split(","))
    return [blocks(part, cut, ranks)[rank] for rank, part in zip(range(n), held.reshape(n, *value.shape))]


def same(held, wanted, *what):
    Checks.equal([np.array(one).tolist() for one in held], [one.tolist() for one in wanted], *what)


def modes(run):
    """(mode, what ran), where a graph that is left out is as eager mode."""
    return [(mode, run.get(mode, run["eager"])) for mode in atlas.MODES]


def pairs(which):
    """(SBPs of x and w, run) of each pair."""
    return [(pair.split(" @ "), run) for pair, run in RECORDS["runs"][which].items()]


def check_tensor(held, sbp, ranks, *what):
    """The parts are x @ w in this SBP: the value, and without P each block."""
    same([whole(held, sbp, ranks)], [X @ W], *what, "value")
    if "P" not in sbp:
        same(held, blocks(X @ W, sbp, ranks), *what)


def test_every_pair_is_there():
    names = {
        which: [",".join(one) for one in np.array(np.meshgrid(NAMES, NAMES)).T.reshape(-1, 2)] for which in ["2x2"]
    }
    assert list(RECORDS["runs"]) == list(WHERE)
    for which, runs in RECORDS["runs"].items():
        one = names.get(which, NAMES)
        assert sorted(runs) == sorted(f"{x} @ {w}" for x in one for w in one)
        assert all(sorted(run["to"]) == sorted(NAMES) for run in runs.values() if which != "2x2")


@pytest.mark.parametrize("which", WHERE)
def test_ranks_hold_blocks_of_x_and_w(which):
    for (x, w), run in pairs(which):
        same(run["x"], blocks(X, x, WHERE[which]), which, "x", x)
        same(run["w"], blocks(W, w, WHERE[which]), which, "w", w)


@pytest.mark.parametrize("which", WHERE)
def test_each_rank_multiplies_its_blocks_of_the_inputs(which):
    ranks = WHERE[which]
    for pair, run in pairs(which):
        for mode, one in modes(run):
            what = (which, mode, *pair)
            x, w = (moved_blocks(value, *sbps, ranks) for value, *sbps in zip((X, W), pair, one["inputs"]))
            same(one["out"], [a @ b for a, b in zip(x, w)], *what, "out")
            for larger in (one, one.get("large", one)):
                axes = zip(*(sbp.split(",") for sbp in (*larger["inputs"], larger["out_sbp"])))
                Checks.that(all(theory.MATMUL.get((i, j)) == out for i, j, out in axes), *what, larger, "is not legal")
            check_tensor(one["out"], one["out_sbp"], ranks, *what)


@pytest.mark.parametrize("which", [which for which in WHERE if which != "2x2"])
def test_conversions_of_out_give_the_product(which):
    for pair, run in pairs(which):
        outs = dict(modes(run))
        for new, conversion in run["to"].items():
            for mode, one in modes(conversion):
                check_tensor(one["out"], new, WHERE[which], which, mode, *pair, "to", new)
                if new == outs[mode]["out_sbp"]:
                    Checks.equal(one["out"], outs[mode]["out"], which, mode, *pair, "to", new)


def moves(pair, one):
    """(shape, old SBP, new SBP) of each input that was moved at the size at which bytes were measured."""
    shapes = [RECORDS["measured_shape"][name] for name in "xw"]
    inputs = one.get("large", one)["inputs"]
    return [(shape, old, new) for shape, old, new in zip(shapes, pair, inputs) if old != new]


def check_bytes(one, moved, ranks, mode, *what):
    """Bytes are those of the formula, or of a known deviation; more, if a move on a mesh takes several steps."""
    layouts = [(shape, (old.replace(",", ", "), ranks), (new.replace(",", ", "), ranks)) for shape, old, new in moved]
    formulas = [theory.Boxing(*move, item=4) for move in layouts]
    totals = [boxing.total for boxing in formulas]
    Checks.equal(one["formula"], None if None in totals else sum(totals), *what, "formula")
    if one["formula"] is None:
        return
    sent, messages = sum(one["sent"]), records.CONTROL * len(one["sent"])
    if all(theory.lines(boxing.shape, boxing.old, boxing.new) for boxing in formulas):
        wanted = sum(4 * atlas.expected(mode, *move) for move in layouts)
        Checks.that(abs(sent - wanted) <= 0.02 * wanted + messages, *what, "sent", sent, "not", wanted)
    else:
        Checks.that(sent >= 0.98 * one["formula"], *what, "sent", sent, "less than", one["formula"])


@pytest.mark.parametrize("which", WHERE)
def test_bytes_are_those_of_the_formulas(which):
    for pair, run in pairs(which):
        for mode, one in modes(run):
            check_bytes(one, moves(pair, one), WHERE[which], mode, which, mode, *pair)


@pytest.mark.parametrize("which", [which for which in WHERE if which != "2x2"])
def test_bytes_of_conversions_are_those_of_the_formulas(which):
    shape = (RECORDS["measured_shape"]["x"][0], RECORDS["measured_shape"]["w"][1])
    for pair, run in pairs(which):
        outs = dict(modes(run))
        for new, conversion in run["to"].items():
            for mode, one in modes(conversion):
                old = outs[mode]["out_sbp"]
                moved = [(shape, old, new)] if old != new else []
                check_bytes(one, moved, WHERE[which], mode, which, mode, *pair, "to", new)


def test_legal_pairs_move_nothing():
    for pair, run in pairs("2x2") + pairs("4"):
        if all(axes in theory.MATMUL for axes in zip(*(sbp.split(",") for sbp in pair))):
            for mode, one in modes(run):
                Checks.equal(one.get("large", one)["inputs"], pair, mode, *pair)


def test_differences_between_records_are_seen():
    for change in ({"out": [[1]]}, {"sent": [600_000, 500_000]}, {"sent": [500_000]}, {"large": {}}, {"formula": None}):
        old = {"S(0) @ B": {"eager": {"out": [[2]], "sent": [500_000, 500_000], "formula": 0}}}
        new = {"S(0) @ B": {"eager": {**old["S(0) @ B"]["eager"], **change}}}
        assert records.differences(old, old) == [] != records.differences(old, new)
        assert records.differences(new, old) != []
    near = {"sent": [500_000, 0]}, {"sent": [509_000, 5_000]}
    assert records.differences(*near) == []
