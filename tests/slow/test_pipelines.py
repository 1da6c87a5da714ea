"""Pipeline schedules: every size, orders drawn at random, tables of a user, and what ranks hold and wait."""

import random
import re

import pytest

from oneflow_cookbook.pool import Pool
from oneflow_cookbook.start.recipe import load, path_of
from tests.cases import pipelines, reference
from tests.cases.ladder import MAIN, OBSERVE, Checks, assert_close
from tests.jobs import launch

SIZES = [(n, m) for n in range(2, 9) for m in range(1, 13)]
MEMORY = "oneflow_cookbook.measure.rank_memory:memory"


def made(path, name, sizes):
    """On a rank: what the function `name` of the recipe returns for each of these lists of arguments."""
    make = getattr(load(path), name)
    return [make(*arguments) for arguments in sizes]


def tables(pools, name, function, sizes):
    return pools(2).call(f"{__file__}:made", path=str(path_of(name)), name=function, sizes=sizes)[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_schedules_of_every_size_are_those_of_the_papers(pools, name):
    function = {"1f1b": "one_f_one_b"}.get(name, name)
    for (n, m), table in zip(SIZES, tables(pools, "pipeline_schedules", function, SIZES)):
        rows = pipelines.rows_of_schedule(name, n, m)
        Checks.equal(table, rows, name, n, m)
        turns = pipelines.in_turns(rows, n)
        if m >= n:  # the papers assume it
            waits = n - 1 if name == "zero_bubble" else 3 * (n - 1)
            Checks.equal(len(turns) - 3 * m, waits, "turns that a rank waits")
        for k, row in enumerate(rows):
            wanted = {"gpipe": m, "1f1b": min(n - k, m), "zero_bubble": min(n, m)}[name]
            Checks.equal(pipelines.most_held(row), wanted, name, n, m, "micro-batches that rank", k, "holds")


def test_chunks_of_every_size_wait_as_the_paper_says(pools):
    sizes = [(n, n * rounds, chunks) for n in range(2, 9) for rounds in range(1, 5) for chunks in range(2, 5)]
    for (n, m, chunks), table in zip(sizes, tables(pools, "interleaved_pipeline", "interleaved", sizes)):
        rows = pipelines.rows_of_chunks(n, m, chunks)
        Checks.equal(table, rows, n, m, chunks)
        waits = len(pipelines.in_turns(rows, n * chunks)) - 3 * m * chunks
        Checks.equal(waits, 3 * (n - 1), "turns that a rank waits")


def random_rows(rng, n, m):
    """The calls of n stages in an order that is legal, and else anything."""
    halves = [[rng.random() < 0.5 for _ in range(m)] for _ in range(n)]
    left = {("F", k, i) for k in range(n) for i in range(m)}
    done, rows = set(), [[] for _ in range(n)]
    while left:
        legal = [call for call in left if needed(call, n) <= done]
        op, k, i = call = rng.choice(sorted(legal))
        left.remove(call)
        rows[k].append(call)
        done.add(("I" if op == "B" else op, k, i))
        if op == "F":
            left.add(("I" if halves[k][i] else "B", k, i))
        if op == "I":
            left.add(("W", k, i))
    return rows


def needed(call, n):
    op, k, i = call
    if op == "F":
        return {("F", k - 1, i)} if k else set()
    return {("F", k, i)} | ({("I", k + 1, i)} if op in "BI" and k < n - 1 else set())


@pytest.mark.parametrize("n, count", [(2, 4), (3, 4), (4, 6)])
def test_any_legal_order_gives_the_values_of_a_single_device(pools, n, count):
    rng = random.Random(n)
    for _ in range(count):
        m = rng.randint(1, 6)
        values = reference.trained(steps=2, layers=n, weights_divided_by=2)
        sizes = {"schedule": random_rows(rng, n, m), "micro_batches": m, "steps": 2}
        seen = pools(n).call(OBSERVE, path=str(path_of("pipeline_schedules")), names=["losses", "new w0"], **sizes)
        for result in seen:
            assert_close(result["arrays"]["losses"], values["losses"], sizes, "losses")
            assert_close(result["tensors"]["new w0"]["value"], values["new w0"], sizes, "new w0")


def test_tables_of_the_reader_run_and_are_drawn(pools, tmp_path):
    """Also one that main has printed, with pauses, and B in two turns."""
    (tmp_path / "table").write_text(f"{' '.join(f'F{m} b{m} B{m}' for m in range(9))}\n".replace("b8", ". b8") * 2)
    path, tables = str(path_of("pipeline_schedules")), (pipelines.OWN_TABLE, tmp_path / "table")
    jobs = [pools(2).call(MAIN, path=path, arguments=["--table", str(table)]) for table in tables]
    assert all(code == 0 and not err for ranks in jobs for code, _, err in ranks), jobs
    assert "as on a single device" in jobs[1][0][1]
    assert [line for line in jobs[0][0][1].splitlines() if "rank " in line] == [
        "rank 0: F0 F1 .  b0 B0 F2 .  I1 .  .  b2 B2 W1  waits 31%, holds 2",
        "rank 1: .  F0 I0 W0 F1 b1 B1 F2 b2 B2 .  .  .   waits 31%, holds 1",
    ]


def test_measure_says_how_long_a_step_takes():
    job = launch("-n", 2, path_of("pipeline_schedules"), "--measure")
    assert job.code == 0, job.err
    line = r"a step takes (\d+) ms, on one rank (\d+): each rank waits or sends (-?\d+)% of the time, with"
    together, alone, share = map(int, re.search(line, job.out).groups())
    assert min(together, alone) >= 5  # its 24 matmuls are 3 GFLOP
    assert abs(share - 100 * (1 - alone / 2 / together)) <= 100 / together + 1  # all three are rounded


ROWS, HIDDEN, MICRO_BATCHES = 8192, 256, 8
LARGE = {"batch": MICRO_BATCHES * ROWS, "in_features": 16, "hidden_size": HIDDEN, "out_features": 16, "steps": 1}


def peaks(n, name, **arguments):
    """The peak of each rank, on new ranks, in which no memory is left over."""
    with Pool(n, timeout=300, repeat=True) as pool:
        results = pool.call(MEMORY, path=str(path_of(name)), keywords={**LARGE, **arguments})
    return [result["peak"] for result in results]


def test_ranks_hold_the_micro_batches_of_the_formula():
    """GPipe holds m micro-batches, 1F1B n-k on rank k, zero bubble n: what a rank saves by that shows in its peak."""
    n = 4
    sizes = {"micro_batches": MICRO_BATCHES}
    gpipe, *others = (
        peaks(n, "pipeline_schedules", schedule=name, **sizes) for name in ("gpipe", "1f1b", "zero_bubble")
    )
    held = [n - k for k in range(n)], [n] * n
    for name, other, count in zip(("1f1b", "zero_bubble"), others, held):
        for k in range(n):
            tensors = (k > 0) + (
                k < n - 1
            )  # input and output of (rows, hidden); the first and the last have a small one
            saved = (MICRO_BATCHES - count[k]) * tensors * 4 * ROWS * HIDDEN
            less = gpipe[k] - other[k]
            Checks.that(less >= 0.75 * saved, name, "rank", k, "saves", less, "bytes and must save", saved)


def test_a_graph_holds_a_fixed_number_of_micro_batches():
    """With four more of the same size, no rank's peak rises by what four outputs, or inputs, of hidden layers take."""
    few, many = (
        peaks(2, "train_pipeline", graph=True, micro_batches=m, **{**LARGE, "batch": m * ROWS}) for m in (4, 8)
    )
    for k in range(2):
        Checks.that(many[k] - few[k] <= 0.75 * 4 * 4 * ROWS * HIDDEN, "rank", k, few[k], many[k])
