"""docs/explore.json: matmuls in every pair of SBPs, eager and in a graph, as pools of ranks ran them.

Its keys:

- `shape`, `value`: of x and w as they are shown; `measured_shape`: of x and w where bytes are measured.
- `runs`: "1" to "4" ranks in a line and "2x2", a mesh -> "SBP of x @ SBP of w" -> what ran. On it an SBP is "S(0),B".
- `x`, `w`, `out`: by rank, the rows that it holds.
- `eager` and `graph`: the latter is left out where it is the same, its bytes within 2 %.
- `out_sbp`: of the product. `inputs`: the SBPs in which x and w are multiplied; where they differ from the given ones,
  OneFlow moves that tensor first.
- `sent`: the bytes that each rank sends for that at `measured_shape`, with OneFlow's own messages.
- `formula`: what all ranks together should send; where both axes of the mesh change, or both split one dimension, the
  least that any algorithm must send, or null if there is a P.
- `large`: on the mesh a graph may choose other SBPs at `measured_shape`; `sent` and `formula` are of these.
- `to`: SBP -> `eager`, `graph`: out.to_global(sbp=SBP), in the same form; not on the mesh.
- `error` instead of all others: OneFlow ended the run so.
"""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np

from harness.explore.inputs import inputs_of
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


def moves(pair, inputs, ranks):
    """The theory.Boxing of each input that is moved."""
    changed = [(shape, old, new) for shape, old, new in zip(SHAPES, pair, inputs) if old != new]
    return [theory.Boxing(shape, Layout(old, ranks), Layout(new, ranks), item=4) for shape, old, new in changed]


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
    inputs = shown[0]["inputs"] or inputs_of(VALUES.values(), pair, ranks, out, shards)
    out_there, inputs_there = measured[0][0], measured[0][2] or inputs
    run = {
        "out_sbp": key(out),
        "out": [rows(one) for one in shards],
        "inputs": [key(one) for one in inputs],
        "sent": [sent for _, sent, _ in measured],
        "formula": total(moves(pair, inputs_there, ranks)),
    }
    if (out_there, inputs_there) == (out, inputs):
        return run
    if not shown[0]["inputs"]:
        raise ValueError(f"{key(*pair)} on {ranks} gives {out}, and {out_there} at {SHAPES}, in eager mode")
    return {**run, "large": {"out_sbp": key(out_there), "inputs": [key(one) for one in inputs_there]}}


def reason(error):
    """What was wrong, of a PoolError: OneFlow's own line, or else that ranks died or hung; which rank is chance."""
    wrong = [line.strip() for line in str(error).splitlines() if "Check failed" in line or "Error:" in line]
    if wrong:
        return wrong[0]
    if error.hung:
        return "the ranks gave no answer"
    return f"a rank died ({error.signal.name})" if error.signal else "a rank ended"


def given_to(new, ranks, shown, sent):
    """The JSON of out.to_global(sbp=new). shown: by rank, see record.py; sent: {(old SBP, new SBP): bytes} by rank."""
    old = shown[0]["out"][0]
    boxing = theory.Boxing((SHAPES[0][0], SHAPES[1][1]), Layout(old, ranks), Layout(new, ranks), item=4)
    by_rank = [one[old, new] for one in sent]
    return {"out": [rows(one["to"][new]) for one in shown], "sent": by_rank, "formula": total([boxing])}


def without_equal(modes):
    """{"eager": ..., "graph": ...} without graph where that is the same, its bytes as `near` allows."""
    return modes if differences(modes["eager"], modes["graph"]) else {"eager": modes["eager"]}


def record(pair, ranks, shown, measured, conversions):
    """The JSON of one pair. shown, measured, conversions: {mode: what it gave}; no conversions on a mesh."""
    by_mode = {mode: shown[mode][pair] for mode in atlas.MODES}
    modes = {mode: run_of(pair, ranks, by_rank, measured[mode][pair]) for mode, by_rank in by_mode.items()}
    ran = [by_rank for mode, by_rank in by_mode.items() if "error" not in modes[mode]]
    inputs = {name: [rows(one[name]) for one in ran[0]] for name in "xw"} if ran else {}
    to = {}
    for new in NAMES if conversions and len(ran) == len(by_mode) else ():
        given = {mode: given_to(new, ranks, by_rank, conversions[mode]) for mode, by_rank in by_mode.items()}
        to[new] = without_equal(given)
    return {**inputs, **without_equal(modes), **({"to": to} if to else {})}


def measured_on(pool, which, pairs=None):
    """{pair: its JSON} of one of RANKS, on a pool of so many ranks. pairs: of SBPs, by default all."""
    ranks, pairs, line = RANKS[which], pairs or pairs_of(which), which != "2x2"
    shown, measured, conversions = {}, {}, {}
    for mode in atlas.MODES:
        how = {"ranks": ranks, "graph": mode == "graph"}
        values = [value.tolist() for value in VALUES.values()]
        shown[mode] = each(pool, "products", pairs, values=values, targets=NAMES if line else (), **how)
        measured[mode] = {}
        for first in range(0, len(pairs), 16):  # so that the pool can free the memory of many graphs
            measured[mode].update(each(pool, "bytes_sent", pairs[first : first + 16], shapes=SHAPES, **how))
        if line:
            where = {"source": ranks, "target": ranks, "shape": SHAPES[0]}
            conversions[mode] = pool.call(f"{CONVERSIONS}:conversions", graph=mode == "graph", **where)
    return {key(*pair): record(pair, ranks, shown, measured, conversions) for pair in pairs}


def measured():
    """All of docs/explore.json, from fresh runs: three minutes."""

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


def differences(old, new, where=()):
    """The paths in two of such JSONs at which they differ, bytes that were sent by more than `near` allows."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(name, old.get(name), new.get(name)) for name in {**old, **new}]
        return [one for name, *both in pairs for one in differences(*both, (*where, name))]
    if where[-1:] == ("sent",) and old and new and len(old) == len(new):
        return [] if all(map(near, new, old)) else [where]
    return [] if old == new else [where]


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
    """Measure, and write it to a file unless that has the same already. Returns whether it was written."""
    path, records = Path(path), measured()
    changed = not path.exists() or bool(differences(json.loads(path.read_text()), records))
    if changed:
        path.write_text(text(records))
    return changed


if __name__ == "__main__":
    write()
