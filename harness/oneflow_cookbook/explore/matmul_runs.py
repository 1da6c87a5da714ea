"""docs/explore/runs.js: matmuls in every pair of SBPs, eager and in a graph, as pools of ranks ran them.

Its keys:

- `shape`, `value`: of x and w as they are shown; `measured_shape`: of x and w where bytes are measured.
- `runs`: "1" to "4" ranks in a line and "2x2", a mesh -> "SBP of x @ SBP of w" -> what ran. On it an SBP is "S(0),B".
- `x`, `w`, `out`: by rank, the rows that it holds.
- `eager` and `graph`: the latter is left out where it is the same, its bytes within 2 %.
- `out_sbp`: of the product. `inputs`: the SBPs in which x and w are multiplied; where they differ from those of the
  pair, OneFlow moves that tensor first.
- `sent`: the bytes that each rank sends for that at `measured_shape`, with OneFlow's own messages.
- `large`: on the mesh a graph may choose other SBPs at `measured_shape`; `sent` is for these.
- `to`: SBP -> `eager`, `graph`: out.to_global(sbp=SBP), in the same form; not on the mesh.
"""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import numpy as np

from oneflow_cookbook.explore.shards import multiplied_sbps
from oneflow_cookbook.measure.sbp import NAMES
from oneflow_cookbook.pool import Pool
from oneflow_cookbook.start.recipe import ROOT

PATH = ROOT / "docs" / "explore" / "runs.js"
BEGIN, END = "const RUNS = ", ";\n"  # around the JSON: a page from disk may load a script, but no JSON
VALUES = {
    "x": np.array([[1, 2, 3, 4], [5, 6, 7, 8], [8, 7, 6, 5], [4, 3, 2, 1]]),
    "w": np.array([[1, 4, 2, 3], [3, 1, 4, 2], [2, 3, 1, 5], [4, 2, 3, 1]]),
}
MODES = ("eager", "graph")
SHAPES = ((720, 720), (720, 720))  # where bytes are measured: large, so that OneFlow's own messages hardly count
RANKS = {"1": [0], "2": [0, 1], "3": [0, 1, 2], "4": [0, 1, 2, 3], "2x2": [[0, 1], [2, 3]]}
MESH_NAMES = tuple(", ".join(pair) for pair in itertools.product(NAMES, NAMES))
CONTROL = 15_000  # bytes of OneFlow's own messages that a rank sends at most for one call: 5,500 were seen
FUNCTIONS = "oneflow_cookbook.explore.matmul_on_rank"


def pairs_of(which):
    """All pairs of SBPs of x and w on one of RANKS."""
    names = MESH_NAMES if which == "2x2" else NAMES
    return list(itertools.product(names, names))


def key(*names):
    """What runs.js calls an SBP, or a pair of them."""
    return " @ ".join(name.replace(", ", ",") for name in names)


def is_same(sent, expected):
    """Whether bytes of a rank are what they should be, within 2 % and OneFlow's own messages."""
    return abs(sent - expected) <= 0.02 * expected + CONTROL


def call_on_pairs(pool, function, pairs, **arguments):
    """Call a function of matmul_on_rank.py. Returns {pair: results by rank}."""
    by_rank = pool.call(f"{FUNCTIONS}:{function}", pairs=pairs, **arguments)
    return {pair: [results[pair] for results in by_rank] for pair in pairs}


def rows(array):
    """An array as lists, with whole numbers as int; [] where it holds nothing."""
    if not array.size:
        return []
    return [[int(number) if number == int(number) else float(number) for number in row] for row in array.tolist()]


def matmul(pair, ranks, shown, measured):
    """The record of a matmul in one mode. shown, measured: by rank, see matmul_on_rank.py."""
    out, shards = shown[0]["out"][0], [result["out"][1] for result in shown]
    inputs = shown[0]["inputs"] or multiplied_sbps(VALUES.values(), pair, ranks, out, shards)
    large_out, large_inputs = measured[0][0], measured[0][2] or inputs
    record = {
        "out_sbp": key(out),
        "out": [rows(shard) for shard in shards],
        "inputs": [key(sbp) for sbp in inputs],
        "sent": [sent for _, sent, _ in measured],
    }
    if (large_out, large_inputs) == (out, inputs):
        return record
    if not shown[0]["inputs"]:
        raise ValueError(f"{key(*pair)} on {ranks} gives {out}, and {large_out} at {SHAPES}, in eager mode")
    return {**record, "large": {"out_sbp": key(large_out), "inputs": [key(sbp) for sbp in large_inputs]}}


def conversion(new, shown, sent):
    """The record of out.to_global(sbp=new). shown: see matmul_on_rank.py; sent: {(old, new): bytes}; both by rank."""
    old = shown[0]["out"][0]
    return {"out": [rows(result["to"][new]) for result in shown], "sent": [by_change[old, new] for by_change in sent]}


def without_equal(modes):
    """{"eager": ..., "graph": ...} without graph where that is the same, its bytes as `is_same` allows."""
    return modes if changed(modes["eager"], modes["graph"]) else {"eager": modes["eager"]}


def record_of(pair, ranks, shown, measured, conversions):
    """The record of one pair. shown, measured, conversions: {mode: results}; no conversions on a mesh."""
    by_mode = {mode: shown[mode][pair] for mode in MODES}
    modes = {mode: matmul(pair, ranks, results, measured[mode][pair]) for mode, results in by_mode.items()}
    record = {name: [rows(result[name]) for result in by_mode["eager"]] for name in "xw"}
    record.update(without_equal(modes))
    if conversions:
        record["to"] = {
            new: without_equal({mode: conversion(new, shown, conversions[mode]) for mode, shown in by_mode.items()})
            for new in NAMES
        }
    return record


def measured_on(pool, which, pairs=None):
    """{pair: its record} for one of RANKS, on a pool of its size. pairs: of SBPs, by default all."""
    ranks, pairs, line = RANKS[which], pairs or pairs_of(which), which != "2x2"
    shown, measured, conversions = {}, {}, {}
    for mode in MODES:
        options = {"ranks": ranks, "graph": mode == "graph"}
        values = [value.tolist() for value in VALUES.values()]
        shown[mode] = call_on_pairs(pool, "products", pairs, values=values, targets=NAMES if line else (), **options)
        measured[mode] = {}
        for first in range(0, len(pairs), 16):  # so that the pool can free the memory of many graphs
            measured[mode].update(
                call_on_pairs(pool, "bytes_sent", pairs[first : first + 16], shapes=SHAPES, **options)
            )
        if line:
            shape = {"source": ranks, "target": ranks, "shape": SHAPES[0]}
            conversions[mode] = pool.call(f"{FUNCTIONS}:conversions", graph=mode == "graph", **shape)
    return {key(*pair): record_of(pair, ranks, shown, measured, conversions) for pair in pairs}


def measured():
    """All of runs.js, from fresh runs: three minutes."""

    def on(which):
        with Pool(np.size(RANKS[which]), timeout=300, repeat=True) as pool:
            return measured_on(pool, which)

    with ThreadPoolExecutor(2) as threads:  # ranks mostly wait
        runs = dict(zip(RANKS, threads.map(on, RANKS)))
    return {
        "oneflow": version("oneflow"),
        "shape": {name: list(value.shape) for name, value in VALUES.items()},
        "value": {name: value.tolist() for name, value in VALUES.items()},
        "measured_shape": dict(zip("xw", map(list, SHAPES))),
        "runs": runs,
    }


def changed(old, new, path=()):
    """The paths at which two results of `measured`, or parts of them, differ: bytes by more than `is_same` allows."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(name, old.get(name), new.get(name)) for name in {**old, **new}]
        return [change for name, *both in pairs for change in changed(*both, (*path, name))]
    if path[-1:] == ("sent",) and old and new and len(old) == len(new):
        return [] if all(map(is_same, new, old)) else [path]
    return [] if old == new else [path]


def read():
    """What runs.js has, in the form of `measured`."""
    return json.loads(PATH.read_text("utf-8")[len(BEGIN) : -len(END)])


def text(runs):
    """runs.js for a result of `measured`, with a line for each pair of SBPs."""
    head = [f"{json.dumps(name)}:{compact(value)}" for name, value in runs.items() if name != "runs"]
    by_ranks = []
    for which, pairs in runs["runs"].items():
        lines = ",\n".join(f"{json.dumps(pair)}:{compact(record)}" for pair, record in pairs.items())
        by_ranks.append(f'"{which}":{{\n{lines}\n}}')
    return BEGIN + "{" + ",\n".join([*head, '"runs":{' + ",\n".join(by_ranks) + "}"]) + "}" + END


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def main():
    """Measure, and write runs.js unless it has the same already."""
    print("measuring the matmuls of the explorable page: 3 minutes", flush=True)
    runs = measured()
    is_new = bool(changed(read(), runs))
    if is_new:
        PATH.write_text(text(runs), "utf-8")
    print(f"{PATH.relative_to(ROOT)}: {'updated' if is_new else 'unchanged'}")
    return 0
