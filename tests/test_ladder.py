"""Each rung of the proof ladder can fail: a run that is right in all but one thing is refused for that thing."""

import copy

import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import CASES
from tests.cases.ladder import OBSERVE, SCALE, check_operations, check_tensors


def spoil(result, name, **changes):
    result["tensors"][name].update(changes)


# What one rank reports wrongly -> the words of the refusal.
SPOILT = {
    "a rank does not report a tensor": (lambda r: r["tensors"].pop("w"), "there is no tensor w"),
    "shape": (lambda r: spoil(r, "out", shape=(8, 4)), "out: global shape"),
    "dtype": (lambda r: spoil(r, "out", dtype="float64"), "out: dtype"),
    "SBP": (lambda r: spoil(r, "x", sbp="B"), "x: SBP"),
    "ranks": (lambda r: spoil(r, "x", ranks=[0]), "x: placement"),
    "device": (lambda r: spoil(r, "x", device="cuda"), "x: placement"),
    "shard missing": (lambda r: spoil(r, "out", shard=None), "out: holds something"),
    "shard is whole": (lambda r: spoil(r, "x", shard=r["tensors"]["x"]["value"]), "x: shard shape"),
    "shard of another rank": (lambda r: spoil(r, "x", shard=r["tensors"]["x"]["value"][:2]), "x: shard differs"),
    "an input off by one bit": (
        lambda r: spoil(r, "w", shard=r["tensors"]["w"]["shard"] * 1.0000002),
        "w: shard differs",
    ),
    "value": (lambda r: spoil(r, "out", value=r["tensors"]["out"]["value"] * 1.00001), "out: value differs"),
    "matmul of a replicated input": (
        lambda r: r["matmuls"][0].__setitem__(0, ("B", [0, 1], (4, 5))),
        "operations in matmuls",
    ),
    "no matmul": (lambda r: r["matmuls"].clear(), "operations in matmuls"),
    "a matmul too many": (lambda r: r["matmuls"].append(r["matmuls"][0]), "operations in matmuls"),
    "no call of a graph": (lambda r: r["calls"].clear(), "no call of a graph"),
    "eager in place of graph": (lambda r: r["lazy"].__setitem__(0, False), "a matmul is eager"),
    "a move too many": (lambda r: r["moves"].append([("S(0)", [0, 1]), ("B", [0, 1])]), "moves"),
}


@pytest.fixture(scope="module")
def right(pools):
    return pools(2).call(OBSERVE, path=str(path_of("data_parallel")), graph=True)


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_run_is_refused(right, what):
    change, words = SPOILT[what]
    case, seen = CASES["data_parallel"](2, True), copy.deepcopy(right)

    def check():
        check_tensors(case, seen)
        check_operations(case, True, seen)

    check()
    change(seen[1])
    with pytest.raises(AssertionError, match=words):
        check()


def test_output_that_does_not_depend_on_the_ranks_matmuls_is_refused(right):
    case = CASES["data_parallel"](2, True, matmul_scale=SCALE)
    with pytest.raises(AssertionError, match="out: shard differs"):
        check_tensors(case, right)
