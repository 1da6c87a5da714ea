"""What the recipes that save memory claim: bytes at rest, peaks, and what OneFlow's compiler made of their graphs."""

from collections import Counter

import pytest

from harness.pool import Pool, PoolError
from harness.start.recipe import HARNESS, path_of
from tests.cases import ROOT
from tests.cases.ladder import MAIN, OBSERVE, Checks

MEMORY = f"{HARNESS / 'measure' / 'training.py'}:memory"
COMPILED = f"{ROOT / 'tests' / 'on_rank_memory.py'}:compiled"
LARGE = {"batch": 16, "in_features": 1024, "hidden_size": 4096, "out_features": 1024, "steps": 2}
WEIGHTS = 4 * 2 * 1024 * 4096  # bytes of both weights at these sizes


def path(name):
    return str(path_of(name))


def fresh(n, name, **arguments):
    """`memory` on ranks in which nothing has run, so that no memory is left over from another run."""
    with Pool(n, repeat=True) as pool:
        return pool.call(MEMORY, path=path(name), **arguments)


def peak(results):
    """Of the ranks the lowest: what a rank may have on top is a message that came before it was wanted."""
    return min(result["peak"] for result in results)


def rest(result):
    return {kind: result[kind] for kind in ("weights", "gradients", "state")}


def test_at_rest_a_fully_sharded_rank_holds_its_share_and_at_the_peak_the_weights_on_top():
    n = 2
    whole, split = fresh(n, "train_data_parallel", **LARGE), fresh(n, "fully_sharded", **LARGE)
    full = {"weights": WEIGHTS, "gradients": WEIGHTS, "state": 2 * WEIGHTS}  # Adam: two moments, all float32
    for rank in range(n):
        Checks.equal(rest(whole[rank]), full, "data parallel, rank", rank)
        Checks.equal(rest(split[rank]), {kind: size // n for kind, size in full.items()}, "fully sharded, rank", rank)
    # Weights, gradients and two moments: 4 x. Fully sharded has the whole weights on top while it uses them.
    # A busy machine frees buffers later, so the least of some tries counts, and half the difference is enough.
    less = 4 * WEIGHTS * (1 - 1 / n) - WEIGHTS
    peaks = [peak(whole), peak(split)]
    for _ in range(4):
        if peaks[0] - peaks[1] >= 0.5 * less:
            break
        peaks[1] = min(peaks[1], peak(fresh(n, "fully_sharded", **LARGE)))
    saved = peaks[0] - peaks[1]
    Checks.that(saved >= 0.5 * less, "peaks differ by", saved / WEIGHTS, "and must by", less / WEIGHTS)
    Checks.that(peaks[1] >= 4 * WEIGHTS / n + WEIGHTS, "fully sharded has no whole weights", peaks[1] / WEIGHTS)


def test_stages_of_zero_compile_to_one_job_on_cpu():
    def summary(stage):
        job = pool.call(COMPILED, path=path("zero_optimizer"), stage=stage)[0]
        kinds = Counter((kind, tuple(sorted(sbps.items()))) for kind, sbps in job["ops"].values())
        return kinds, job["boxings"]

    with Pool(2, repeat=True) as pool:  # a stage leaves settings behind, so from the lowest up
        first, second, third = (summary(stage) for stage in (1, 2, 3))
    Checks.equal(second, first, "the job of stage 2")
    Checks.equal(third, first, "the job of stage 3")


def test_zero_keeps_shards_and_reduces_gradients_to_shards(pools):
    job = pools(2).call(COMPILED, path=path("zero_optimizer"))[0]
    for name in ("w0", "w1"):
        for variable in (f"model.{name}", f"model.{name}-m", f"model.{name}-v"):
            Checks.equal(job["ops"][variable], ("variable_conf", {"out": "S(0)"}), variable)
        kind, sbps = job["ops"][f"model.{name}_optimizer"]
        used = [sbps[f"{tensor}_0"] for tensor in ("model", "model_diff", "m", "v")]
        Checks.equal((kind, used), ("adam_update", ["S(0)"] * 4), "update of", name)
    shapes = [(4, 8), (8, 4)]
    wanted = sorted([("S(0)", "B", shape) for shape in shapes] + [("P", "S(0)", shape) for shape in shapes])
    Checks.equal(job["boxings"], wanted, "all-gathers and reduce-scatters")


def recomputed(job):
    return Counter(kind for name, (kind, _) in job["ops"].items() if name.startswith("Sys-Checkpointing-Fake-Fw-Op_"))


def test_graph_with_checkpointing_has_the_matmuls_of_forward_twice(pools):
    on, off = (
        pools(2).call(COMPILED, path=path("activation_checkpointing"), graph=True, checkpointing=checkpointing)[0]
        for checkpointing in (True, False)
    )
    matmuls = [sum(kind == "matmul" for kind, _ in job["ops"].values()) for job in (on, off)]
    Checks.equal(matmuls, [15, 11], "matmuls with and without")  # 4 forward, 7 backward as x needs no gradient, 4 anew
    Checks.equal(recomputed(on), {"matmul": 4, "relu": 2}, "made anew")
    Checks.equal(recomputed(off), {}, "made anew without checkpointing")


@pytest.mark.parametrize("graph, blocks", [(False, -1), (True, 4)])
def test_checkpointing_lowers_the_peak_of_eager_mode_and_raises_that_of_a_graph_on_cpu(graph, blocks):
    """By how many tensors as large as one rank's hidden activations of a block; a graph has 2 anew in each block.

    Buffers live longer where the machine is busy: each peak is the least of some tries, and half the change is enough.
    """
    sizes = {"graph": graph, "batch": 8192, "in_features": 8, "hidden_size": 1024, "out_features": 8, "steps": 2}
    hidden, least = 4 * 8192 // 2 * 1024, {True: float("inf"), False: float("inf")}
    for _ in range(6):
        for on in least:
            least[on] = min(least[on], peak(fresh(2, "activation_checkpointing", checkpointing=on, **sizes)))
        change = (least[True] - least[False]) / hidden
        if 0.5 < change / blocks < 1.5:
            break
    Checks.that(0.5 < change / blocks < 1.5, "peak changes by", change, "and must by", blocks)


def choice(pool, **sizes):
    """SBP of the weights, and what moves, in the job that auto parallel made."""
    job = pool.call(COMPILED, path=path("auto_parallel"), steps=1, **sizes)[0]
    return [job["ops"][f"model.{name}"][1]["out"] for name in ("w0", "w1")], job["boxings"]


@pytest.mark.parametrize("batch", [8, 512, 1024, 2048])
def test_auto_parallel_turns_from_tensor_to_data_parallel_as_the_batch_grows(pools, batch):
    weights, moves = choice(pools(2), batch=batch)
    if batch <= 512:
        Checks.equal(weights, ["S(1)", "S(0)"], "weights at batch", batch)
        assert not [shape for _, _, shape in moves if shape in ((256, 1024), (1024, 256))]  # no weight, no gradient
    else:
        Checks.equal(weights, ["B", "B"], "weights at batch", batch)
        Checks.equal(moves, [("P", "B", (256, 1024)), ("P", "B", (1024, 256))], "moves at batch", batch)


def test_auto_parallel_at_batch_8_moves_what_its_docstring_says(pools):
    shape = (8, 256)
    moves = [move for move in choice(pools(2), batch=8)[1] if move[2]]
    Checks.equal(moves, [("P", "B", shape), ("S(0)", "B", shape), ("S(0)", "B", shape)], "moves at batch 8")


def test_auto_parallel_aborts_where_it_wants_to_gather_a_weight():
    sizes = {"batch": 2048, "in_features": 512, "out_features": 512}
    with Pool(2) as pool, pytest.raises(PoolError, match="register.cpp:75\\] Check failed"):
        pool.call(OBSERVE, path=path("auto_parallel"), **sizes)


def chosen(w0, w1):
    """What each of 2 ranks prints of the weights: SBP and shape of its shard."""
    (sbp0, shape0), (sbp1, shape1) = w0, w1
    return [
        f"w0 {shape0} of (256, 1024): OneFlow chose oneflow.sbp.{sbp0}",
        f"w1 {shape1} of (1024, 256): OneFlow chose oneflow.sbp.{sbp1}",
    ]


def shards(w0, w1, share, words):
    """What each of 2 ranks prints of what it holds."""
    return [f"w0 {w0} of (4, 8): {share} of it{words}", f"w1 {w1} of (8, 4): {share} of it{words}"]


SAID = [
    ("fully_sharded", [], shards("(2, 8)", "(4, 4)", "50%", ", its gradient and Adam's state")),
    ("fully_sharded", ["--graph"], shards("(2, 8)", "(4, 4)", "50%", ", its gradient and Adam's state")),
    ("zero_optimizer", [], shards("(2, 8)", "(4, 4)", "50%", " and of Adam's state")),
    ("zero_optimizer", ["--shard-min-size", "1024"], shards("(4, 8)", "(8, 4)", "100%", " and of Adam's state")),
    ("activation_checkpointing", [], ["a step saves 2 tensors for backward, 11 without checkpointing"]),
    ("auto_parallel", [], chosen(("split(dim=1)", "(256, 512)"), ("split(dim=0)", "(512, 256)"))),
    ("auto_parallel", ["--batch", "1024"], chosen(("broadcast", "(256, 1024)"), ("broadcast", "(1024, 256)"))),
]


@pytest.mark.parametrize("recipe, options, lines", SAID)
def test_main_prints_what_the_recipe_teaches(pools, recipe, options, lines):
    for code, out, _ in pools(2).call(MAIN, path=path(recipe), arguments=options):
        Checks.equal(code, 0, "exit code")
        said = out.splitlines()
        for line in lines:
            Checks.that(line in said, line, "is not in", said)
