"""The chapter of pipelines: stages on ranks of their own, and the order in which they work."""

from pathlib import Path

import numpy as np

from oneflow_cookbook.start.recipe import ROOT
from tests.cases import reference
from tests.cases.recipe_case import Case, Main, case_of_recipe, shares
from tests.cases.train import MICRO, UNEVEN


@case_of_recipe(
    {"other": MICRO, "many": {"batch": 9, "micro_batches": 9}},
    variants=[{"micro_batches": 8}],
    main=Main(
        ranks=3,  # on 2, n-1 is 1
        prints=["[0] pipeline bubble, (n-1)/(m+n-1) with n = 3 and m = 2: 50% of the time"],
        refused_expressions=["train(placements('cpu', 2), batch=7)"],
    ),
)
def train_pipeline(n, graph=False, steps=3, micro_batches=2, matmul_scale=1.0, **sizes):
    values = reference.trained(steps=steps, matmul_scale=matmul_scale, layers=n, weights_divided_by=2, **sizes)
    batch = len(values["x"].exact)
    boundary = batch * values["w0"].exact.shape[1]
    return Case(
        values,
        [2 * batch * values[f"w{k}"].exact.size for k in range(n)],
        {**{f"w{k}": ("B", [k]) for k in range(n)}, "y": ("B", [n - 1])},
        micro_batches=micro_batches,
        stages=[(k, [k]) for k in range(n)],
        sends=[boundary * ((k < n - 1) + (k > 0)) for k in range(n)],
    )


@case_of_recipe({"uneven": UNEVEN})
def train_data_pipeline(n, graph=False, steps=3, matmul_scale=1.0, **sizes):
    momentum = reference.Optimizer("momentum")
    values, parts = reference.train_mlp(reference.mlp_inputs(**sizes), momentum, steps, matmul_scale, parts=2)
    batch, hidden = values["x"].exact.shape[0], values["w0"].exact.shape[1]
    return Case(
        values,
        [work for w in ("w0", "w1") for work in shares(2, batch, 2 * values[w].exact.size)],
        parts=parts if graph else {},
        sends=[values[w].exact.size + hidden * batch / 2 for w in ("w0", "w1") for _ in range(2)],
    )


def one_in_turn(n, micro_batches):
    """1F1B as a rule: backward where it can, else forward while stage k holds less than n - k micro-batches."""
    rows, forward, backward = [[] for _ in range(n)], [0] * n, [0] * n
    while any(count < micro_batches for count in backward):
        before, after = (
            [micro_batches, *forward],
            [*backward, micro_batches],
        )  # as they are at the beginning of the turn
        for k in range(n):
            held = forward[k] - backward[k]
            if backward[k] < min(forward[k], after[k + 1]) and (k < n - 1 or held):
                rows[k].append(("B", k, backward[k]))
                backward[k] += 1
            elif forward[k] < before[k] and held < n - k:
                rows[k].append(("F", k, forward[k]))
                forward[k] += 1
    return rows


def rows_of_schedule(schedule, n, micro_batches):
    """The calls of each stage in its order, by the rule that the paper states."""
    if schedule == "gpipe":
        return [[(op, k, m) for op in "FB" for m in range(micro_batches)] for k in range(n)]
    rows = one_in_turn(n, micro_batches)
    if schedule == "1f1b":
        return rows
    for k, row in enumerate(rows):  # ZB-H1: W is k micro-batches late
        late = [("W", k, m) for m in range(micro_batches)]
        for m in reversed(range(micro_batches)):
            at = row.index(("B", k, m))
            row[at : at + 1] = [("I", k, m), *([late[m - k]] if m >= k else [])]
        row += late[max(micro_batches - k, 0) :]
    return rows


def in_turns(rows, stages):
    """The calls of all ranks, turn by turn; in a turn, from rank 0 on. B takes two turns, and is the second of them."""
    waiting = [
        [half for call in row for half in ([("b", *call[1:]), call] if call[0] == "B" else [call])] for row in rows
    ]
    turns, end = [], {}  # call -> the turn in which it ends
    while any(waiting):
        turn = []
        for row in filter(None, waiting):
            op, k, m = row[0]
            before = {"F": [("F", k - 1, m)] * (k > 0), "W": [("I", k, m)], "B": []}
            needed = before.get(op, [("F", k, m)] + [("I", k + 1, m)] * (k < stages - 1))
            if all(end.get(call, len(turns)) < len(turns) for call in needed):
                turn.append(row.pop(0))
        assert turn, "no rank can go on"
        end.update({("I" if op == "B" else op, k, m): len(turns) for op, k, m in turn})
        turns.append(turn)
    return turns


def in_order(turns, values, stages, parts, ranks, by_hand):
    """(matmuls, moves) of a step: each turn computes, and then sends. ranks: those of each stage.

    by_hand: whether the recipe computes the gradients of weights itself.
    """
    widths = [values[f"w{k}"].exact.shape for k in range(stages)]
    matmuls, moves = [], []
    for turn in turns:
        for op, k, m in turn:
            (features, out_features), here = widths[k], ranks[k]
            x, out = (("B", here, (parts[m], size)) for size in (features, out_features))
            w = ("B", here, widths[k])
            if op == "F":
                matmuls.append((x, w, out))
            if by_hand and op in "BW":
                matmuls.append((x, out, w))  # of x, transposed, and the gradient of out
        for op, k, _ in turn:
            to = k + 1 if op == "F" else k - 1 if op in "BI" else k
            if to != k and 0 <= to < stages:
                moves.append((("B", ranks[k]), ("B", ranks[to])))
    return matmuls, moves


def micro_batches_of(values, count):
    """The values with x0, x1, ..., y0, y1, ... for x and y, and their numbers of rows."""
    parts = {name: np.array_split(np.arange(len(values[name].exact)), count) for name in ("x", "y")}
    split = {f"{name}{m}": values[name][rows] for name in parts for m, rows in enumerate(parts[name])}
    return {**split, **values}, [len(rows) for rows in parts["x"]]


def scheduled(n, rows, ranks, steps, matmul_scale, sizes, by_hand=True):
    """The case of a table of calls. rows: the calls of each rank; ranks: those of each stage; by_hand: see in_order."""
    stages, micro_batches = len(ranks), 1 + max(m for _, _, m in rows[0])
    values = reference.trained(steps=steps, matmul_scale=matmul_scale, layers=stages, weights_divided_by=2, **sizes)
    boundary = values["x"].exact.shape[0] * values["w0"].exact.shape[1]
    values, parts = micro_batches_of(values, micro_batches)
    del values["x"], values["y"]
    places = {name: ("B", ranks[0 if name.startswith("x") else -1]) for name in values if name[0] in "xy"}
    matmuls, moves = in_order(in_turns(rows, stages), values, stages, parts, ranks, by_hand)
    borders = [[*ranks[k], *ranks[k + 1]] for k in range(stages - 1)]
    return Case(
        values,
        layout={**places, **{f"w{k}": ("B", ranks[k]) for k in range(stages)}},
        matmuls=matmuls * steps,
        moves=moves * steps,
        sends=[boundary * sum(rank in border for border in borders) for rank in range(n)],
    )


def most_held(row):
    """For how many micro-batches a rank holds activations at most: from F to B or W."""
    counts = np.cumsum([{"F": 1, "I": 0}.get(op, -1) for op, _, _ in row])
    return int(counts.max())


OWN_TABLE = str(ROOT / "tests" / "data" / "pipeline_table.txt")
WRONG_TABLES = {
    "lines": "F0 B0\n",
    "word": "F0 F1 B0 B1\nF0 B0 F1 X1\n",
    "missing": "F0 F1 B0 B1\nF0 B0 F1\n",
    "no_weight": "F0 I0\nF0 I0\n",
    "skips": "F0 B0 F2 B2\nF0 B0 F2 B2\n",
    "huge": "F900000000 B900000000\nF0 B0\n",
    "late": "F0 B0 F1 B1\nF1 F0 B1 B0\n",
}


def wrong_tables(folder):
    for name, text in WRONG_TABLES.items():
        (Path(folder) / name).write_text(text)


@case_of_recipe(
    {
        "other": {**UNEVEN, "micro_batches": 3, "schedule": "zero_bubble"},
        "gpipe": {"schedule": "gpipe"},
        "1f1b": {**UNEVEN, "micro_batches": 6},
        "few": {"micro_batches": 1},
    },
    tests=["tests/slow/test_pipelines.py", "-k", "reader or measure"],
    equivalent={
        r"^flow\.comm\.barrier\(\) -> pass$": "a step is timed from the last rank that begins to the last that ends",
        r"^raise ValueError\(f\"line ": "such a word is refused a line later, in other words",
    },
    main=Main(
        prints=[
            "[0] rank 0: F0 F1 .  .  b0 B0 F2 b1 B1 F3 b2 B2 .  b3 B3  waits 20%, holds 2",
            "[0] rank 1: .  F0 b0 B0 F1 b1 B1 F2 b2 B2 F3 b3 B3 .  .   waits 20%, holds 1",
        ],
        other_lines=["--schedule gpipe --micro-batches 6"],
        elsewhere=("table", "measure"),
        make_files=wrong_tables,
        refused=[
            *(f"--table FOLDER/{name}" for name in (*WRONG_TABLES, "no_file")),
            f"--table {OWN_TABLE} --micro-batches 2",
            f"--table {OWN_TABLE} --schedule gpipe",
        ],
        refused_expressions=["make(placements('cpu', 2), 9, 8, 4, 8, 4)", "check(gpipe(2, 4)[::-1], 2, 4)"],
        defaults={"micro_batches": (None, 4)},
    ),
)
def pipeline_schedules(n, graph=False, schedule="1f1b", steps=3, micro_batches=4, matmul_scale=1.0, **sizes):
    rows = rows_of_schedule(schedule, n, micro_batches)
    return scheduled(n, rows, [[k] for k in range(n)], steps, matmul_scale, sizes)


def rows_of_chunks(n, micro_batches, chunks):
    """Megatron-LM's order: units of work by group of n micro-batches, then by chunk, then by micro-batch."""
    rows = []
    for rank in range(n):
        units = [(m, chunk) for m in range(micro_batches) for chunk in range(chunks)]
        ahead = sorted(units, key=lambda unit: (unit[0] // n, unit[1], unit[0]))
        back = sorted(units, key=lambda unit: (unit[0] // n, -unit[1], unit[0]))
        forward, backward = ([(op, c * n + rank, m) for m, c in order] for op, order in (("F", ahead), ("B", back)))
        warm_up = min(2 * (n - 1 - rank) + (chunks - 1) * n, len(units))
        both = [call for pair in zip(forward[warm_up:], backward) for call in pair]
        rows.append([*forward[:warm_up], *both, *backward[len(units) - warm_up :]])
    return rows


@case_of_recipe(
    {"other": {**UNEVEN, "batch": 13, "rounds": 3, "chunks": 3}},
    main=Main(
        arguments=["--rounds", "2"],  # with 1, rounds * n is n
        prints=[
            "[0] rank 0 holds w0, w2",
            "[0] rank 0: F0a F1a F0b F1b F2a .   b0b B0b F3a b1b B1b F2b b0a B0a F3b b1a B1a .   b2b B2b .   b3b B3b "
            "b2a B2a b3a B3a  waits 11%, holds 2.5",
            "[0] rank 1: .   F0a F1a F0b b0b B0b F1b b1b B1b F2a b0a B0a F3a b1a B1a F2b b2b B2b F3b b3b B3b b2a B2a "
            "b3a B3a .   .    waits 11%, holds 1.5",
            "[0] F0a is forward of micro-batch 0 in chunk a; 1F1B waits 20%",
            "[1] rank 1 holds w1, w3",
        ],
        refused_expressions=["in_turns([[('B', 0, 0), ('F', 0, 0)]])"],
    ),
)
def interleaved_pipeline(n, graph=False, chunks=2, steps=3, rounds=1, batch=24, matmul_scale=1.0, **sizes):
    ranks = [[stage % n] for stage in range(n * chunks)]
    rows = rows_of_chunks(n, rounds * n, chunks)
    return scheduled(n, rows, ranks, steps, matmul_scale, {"batch": batch, **sizes}, by_hand=False)
