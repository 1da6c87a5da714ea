"""docs/explore.json: matmuls in every pair of SBPs, eager and in a graph, as pools of ranks ran them.

Its keys:

- `shape`, `value`: of x and w as they are shown, `measured_shape`: of x and w where bytes are measured.
- `runs`: "1" to "4" ranks in a line and "2x2", a mesh -> "SBP of x @ SBP of w" -> what ran; on a mesh an SBP is "S(0),B".
- `x`, `w`, `out`: by rank, the rows that it holds.
- `eager`, `graph`: with `out_sbp`; `inputs`, the SBPs that are multiplied, which differ from those of x and w where OneFlow
  moves one first; `sent`, bytes by rank; `formula`, bytes that all ranks together should send, null where there is no
  formula: on a mesh where both axes change. `graph` is left out where it is the same, and its bytes are within 2 %.
- `to`: SBP -> `eager`, `graph`: out.to_global(sbp=SBP), in the same form. Not on the mesh.
- `error` instead of the others: OneFlow ended the run so.
"""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from harness.explore.shards import shard
from harness.measure import theory
from harness.measure.sbp import NAMES, Layout
from harness.pool import Pool, PoolError
from harness.report import atlas

PATH = Path(__file__).resolve().parents[2] / "docs" / "explore.json"
VALUES = {
    "x": np.array([[1, 2, 3, 4], [5, 6, 7, 8], [8, 7, 6, 5], [4, 3, 2, 1]]),
    "w": np.array([[1, 4, 2, 3], [3, 1, 4, 2], [2, 3, 1, 5], [4, 2, 3, 1]]),
}
SHAPES = atlas.MATMULS["equal"]  # where bytes are measured: large, so that OneFlow's own messages hardly count
RANKS = {"1": [0], "2": [0, 1], "3": [0, 1, 2], "4": [0, 1, 2, 3], "2x2": [[0, 1], [2, 3]]}
MESH_NAMES = tuple(", ".join(pair) for pair in itertools.product(NAMES, NAMES))
CONTROL = 15_000  # bytes of OneFlow's own messages that a rank sends at most for one call: 5,500 were seen
FUNCTIONS = str(Path(__file__).with_name("record.py"))
CONVERSIONS = str(Path(theory.__file__).with_name("conversions.py"))
LEGAL = list(theory.MATMUL.items())


def pairs_of(which):
    """All pairs of SBPs of x and w on one of RANKS."""
    names = MESH_NAMES if which == "2x2" else NAMES
    return list(itertools.product(names, names))


def key(*names):
    """What the JSON calls an SBP, or a pair of them."""
    return " @ ".join(name.replace(", ", ",") for name in names)


def near(sent, wanted):
    """Whether bytes of a rank are what they should be, within 2 % and OneFlow's own messages."""
    return abs(sent - wanted) <= 0.02 * wanted + CONTROL


def each(pool, function, pairs, **arguments):
    """Call a function of record.py on pairs of SBPs. Returns {pair: results by rank, or the PoolError of it alone}."""
    try:
        by_rank = pool.call(f"{FUNCTIONS}:{function}", pairs=pairs, **arguments)
        return {pair: [results[pair] for results in by_rank] for pair in pairs}
    except PoolError as error:
        if len(pairs) == 1:
            return {pairs[0]: error}
    half = len(pairs) // 2  # fresh ranks run the others
    return {**each(pool, function, pairs[:half], **arguments), **each(pool, function, pairs[half:], **arguments)}


def rows(array):
    """An array as lists, with whole numbers as int; [] where it holds nothing."""
    if not array.size:
        return []
    return [[int(one) if one == int(one) else float(one) for one in row] for row in array.tolist()]


def signatures(out):
    """The pairs of SBPs of x and w whose product has the SBP `out` without a move, on a mesh for each axis."""
    by_axis = [[pair for pair, product in LEGAL if product == one] for one in out.split(", ")]
    return [tuple(", ".join(names) for names in zip(*axes)) for axes in itertools.product(*by_axis)]


def inputs_of(pair, ranks, out, by_rank):
    """The SBPs in which an eager matmul multiplied: those of which every rank's shards give its shard of out.

    A tensor is not made a P for it. On one rank all fit: the one with the fewest moves. Raises ValueError if several fit.
    """
    known = []
    for names in signatures(out):
        layouts = [Layout(name, ranks) for name in names]
        added = [new for old, new in zip(pair, names) if old != new and "P" in new]
        members = layouts[0].members
        parts = [[shard(VALUES[name], layout, rank) for name, layout in zip("xw", layouts)] for rank in members]
        if not added and all(np.array_equal(x @ w, held) for (x, w), held in zip(parts, by_rank)):
            known.append(names)
    known.sort(key=lambda names: sum(old != new for old, new in zip(pair, names)))
    if len(known) != 1 and np.size(ranks) > 1:
        raise ValueError(f"{key(*pair)} on {ranks} gives {out} from one of {known}")
    return known[0]


def moves(pair, inputs, ranks):
    """The theory.Boxing of each input that is moved."""
    changed = [(shape, old, new) for shape, old, new in zip(SHAPES, pair, inputs) if old != new]
    return [theory.Boxing(shape, (old, ranks), (new, ranks), item=4) for shape, old, new in changed]


def total(boxings):
    """The bytes of all by the formulas, None if one has none."""
    totals = [one.total for one in boxings]
    return None if None in totals else round(sum(totals))


def run_of(pair, ranks, shown, measured):
    """The JSON of a matmul in one mode. shown, measured: by rank, see record.py, or a PoolError."""
    for result in (shown, measured):
        if isinstance(result, PoolError):
            return {"error": reason(result)}
    out, shards = shown[0]["out"][0], [one["out"][1] for one in shown]
    inputs = shown[0]["inputs"] or inputs_of(pair, ranks, out, shards)
    out_there, _, inputs_there = measured[0]
    if out_there != out or inputs_there not in (None, inputs):
        raise ValueError(f"{key(*pair)} on {ranks} gives {out} from {inputs}, and at {SHAPES} {measured[0]}")
    return {
        "out_sbp": key(out),
        "out": [rows(one) for one in shards],
        "inputs": [key(one) for one in inputs],
        "sent": [sent for _, sent, _ in measured],
        "formula": total(moves(pair, inputs, ranks)),
    }


def reason(error):
    """The line of a PoolError that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = [line for line in lines if "Check failed" in line or "Error:" in line]
    return (wrong or lines)[0]


def given_to(new, ranks, out, shards, sent):
    """The JSON of out.to_global(sbp=new). shards: by rank; sent: {(old SBP, new SBP): bytes} by rank."""
    boxing = theory.Boxing((SHAPES[0][0], SHAPES[1][1]), (out, ranks), (new, ranks), item=4)
    by_rank = [one[out, new] for one in sent]
    return {"out": [rows(one) for one in shards], "sent": by_rank, "formula": total([boxing])}


def without_equal(modes):
    """{"eager": ..., "graph": ...} without graph where it is equal, and its bytes are near."""
    eager, graph = modes["eager"], modes["graph"]
    rest = [{name: value for name, value in one.items() if name != "sent"} for one in (eager, graph)]
    same = rest[0] == rest[1] and all(near(*both) for both in zip(graph.get("sent", []), eager.get("sent", [])))
    return {"eager": eager} if same else modes


def record(pair, ranks, shown, measured, conversions):
    """The JSON of one pair. shown, measured, conversions: {mode: what it gave}."""
    runs = {mode: run_of(pair, ranks, shown[mode][pair], measured[mode][pair]) for mode in atlas.MODES}
    [held, *_] = [shown[mode][pair] for mode in atlas.MODES if "error" not in runs[mode]] or [[]]
    inputs = {name: [rows(one[name]) for one in held] for name in "xw"}
    to = {}
    for new in NAMES if conversions and held else ():
        one = {}
        for mode in atlas.MODES:
            by_rank = shown[mode][pair]
            shards = [each["to"][new] for each in by_rank]
            one[mode] = given_to(new, ranks, by_rank[0]["out"][0], shards, conversions[mode])
        to[new] = without_equal(one)
    return {**inputs, **without_equal(runs), **({"to": to} if to else {})}


def measured_on(pool, which):
    """{pair: its JSON} of one of RANKS, on a pool of so many ranks."""
    ranks, pairs, line = RANKS[which], pairs_of(which), which != "2x2"
    shown, measured, conversions = {}, {}, {}
    for mode in atlas.MODES:
        how = {"ranks": ranks, "graph": mode == "graph"}
        shown[mode] = each(pool, "products", pairs, values=list(VALUES.values()), targets=NAMES if line else (), **how)
        measured[mode] = {}
        for x, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            measured[mode].update(each(pool, "bytes_sent", list(group), shapes=SHAPES, **how))
        if line:
            where = {"source": ranks, "target": ranks, "shape": SHAPES[0]}
            conversions[mode] = pool.call(f"{CONVERSIONS}:conversions", graph=mode == "graph", **where)
    return {key(*pair): record(pair, ranks, shown, measured, conversions) for pair in pairs}


def measured():
    """All of docs/explore.json, from fresh runs. It takes about two minutes."""

    def on(which):
        with Pool(np.size(RANKS[which]), timeout=300, repeat=True) as pool:
            return measured_on(pool, which)

    with ThreadPoolExecutor(2) as threads:  # ranks mostly wait
        runs = dict(zip(RANKS, threads.map(on, RANKS)))
    return {
        "oneflow": "0.9.0",
        "shape": {name: list(value.shape) for name, value in VALUES.items()},
        "value": {name: value.tolist() for name, value in VALUES.items()},
        "measured_shape": dict(zip("xw", map(list, SHAPES))),
        "runs": runs,
    }


def text(records):
    """The JSON of `measured`, with a line for each pair of SBPs."""
    head = [f"{json.dumps(name)}:{compact(value)}" for name, value in records.items() if name != "runs"]
    runs = []
    for which, pairs in records["runs"].items():
        lines = ",\n".join(f"{json.dumps(pair)}:{compact(value)}" for pair, value in pairs.items())
        runs.append(f'"{which}":{{\n{lines}\n}}')
    return "{" + ",\n".join([*head, '"runs":{' + ",\n".join(runs) + "}"]) + "}\n"


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def write(path=PATH):
    """Measure, and write it to a file."""
    Path(path).write_text(text(measured()))


if __name__ == "__main__":
    write()
