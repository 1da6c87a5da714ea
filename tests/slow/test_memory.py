"""What the recipes that save memory claim: bytes at rest, peaks, and what OneFlow's compiler made of their graphs."""

from collections import Counter

import pytest

from oneflow_cookbook.pool import Pool, PoolError
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import OBSERVE, Checks

MEMORY = "oneflow_cookbook.measure.rank_memory:memory"
COMPILED = f"{ROOT / 'tests' / 'on_rank_memory.py'}:compiled"
LARGE = {"batch": 16, "in_features": 1024, "hidden_size": 4096, "out_features": 1024, "steps": 2}
WEIGHTS = 4 * 2 * 1024 * 4096  # bytes of both weights at these sizes


def path(name):
    return str(path_of(name))


def fresh(n, name, **arguments):
    """`memory` on new ranks, in which no memory is left over from a different run."""
    with Pool(n, repeat=True) as pool:
        return pool.call(MEMORY, path=path(name), keywords=arguments)


def peak(results):
    """The lowest of all ranks: a rank may also hold a message that came early."""
    return min(result["peak"] for result in results)


def rest(result):
    return {kind: result[kind] for kind in ("weights", "gradients", "state")}


def test_fully_sharded_rank_holds_its_share_at_rest_and_all_weights_at_the_peak():
    n = 2
    whole, split = fresh(n, "train_data_parallel", **LARGE), fresh(n, "fully_sharded", **LARGE)
    full = {"weights": WEIGHTS, "gradients": WEIGHTS, "state": 2 * WEIGHTS}  # Adam: two moments, all float32
    for rank in range(n):
        Checks.equal(rest(whole[rank]), full, "data parallel, rank", rank)
        Checks.equal(rest(split[rank]), {kind: size // n for kind, size in full.items()}, "fully sharded, rank", rank)
    # Weights, gradients and two moments: 4 x. Fully sharded adds the whole weights while it uses them.
    # A busy machine frees buffers later, so the least of up to five tries counts, and half the difference is enough.
    less = 4 * WEIGHTS * (1 - 1 / n) - WEIGHTS
    peaks = [peak(whole), peak(split)]
    for _ in range(4):
        if peaks[0] - peaks[1] >= 0.5 * less:
            break
        peaks[1] = min(peaks[1], peak(fresh(n, "fully_sharded", **LARGE)))
    saved = peaks[0] - peaks[1]
    Checks.that(saved >= 0.5 * less, "peaks differ by", saved / WEIGHTS, "but should by", less / WEIGHTS)
    Checks.that(peaks[1] >= 4 * WEIGHTS / n + WEIGHTS, "fully sharded has no whole weights", peaks[1] / WEIGHTS)


def test_resharding_after_forward_frees_the_gathered_weights_until_backward():
    n, layers, hidden_size = 4, 16, 512
    sizes = {"num_layers": layers, "hidden_size": hidden_size, "optimizer": "momentum", "steps": 2}
    whole = 4 * layers * 8 * hidden_size**2  # bytes of the weights of all blocks
    kept = peak(fresh(n, "fully_sharded_module", **sizes))
    freed = peak(fresh(n, "fully_sharded_module", reshard_after_forward=True, **sizes))
    at_rest = 3 * whole / n  # weights, gradients, momentum
    Checks.that(kept >= at_rest + whole, "without resharding a rank has", (kept - at_rest) / whole, "of the weights")
    Checks.that(freed <= at_rest + whole / 2, "with resharding a rank has", (freed - at_rest) / whole)


def test_stages_of_zero_compile_to_one_job_on_cpu_that_keeps_shards():
    with Pool(2, repeat=True) as pool:  # a stage leaves settings behind, so from the lowest up
        jobs = [pool.call(COMPILED, path=path("zero_optimizer"), stage=stage)[0] for stage in (1, 2, 3)]
    for name in ("w0", "w1"):
        for variable in (f"model.{name}", f"model.{name}-m", f"model.{name}-v"):
            Checks.equal(jobs[0]["ops"][variable], ("variable_conf", {"out": "S(0)"}), variable)
        kind, sbps = jobs[0]["ops"][f"model.{name}_optimizer"]
        used = [sbps[f"{tensor}_0"] for tensor in ("model", "model_diff", "m", "v")]
        Checks.equal((kind, used), ("adam_update", ["S(0)"] * 4), "update of", name)
    shapes = [(4, 8), (8, 4)]
    wanted = sorted([("S(0)", "B", shape) for shape in shapes] + [("P", "S(0)", shape) for shape in shapes])
    Checks.equal(jobs[0]["boxings"], wanted, "all-gathers and reduce-scatters")
    kinds = [Counter((kind, tuple(sorted(sbps.items()))) for kind, sbps in job["ops"].values()) for job in jobs]
    for stage in (2, 3):
        Checks.equal(kinds[stage - 1], kinds[0], "operations of stage", stage)
        Checks.equal(jobs[stage - 1]["boxings"], wanted, "moves of stage", stage)


def recomputed(job):
    return Counter(kind for name, (kind, _) in job["ops"].items() if name.startswith("Sys-Checkpointing-Fake-Fw-Op_"))


def test_graph_with_checkpointing_has_the_matmuls_of_forward_twice(pools):
    on, off = (
        pools(2).call(COMPILED, path=path("activation_checkpointing"), graph=True, checkpointing=checkpointing)[0]
        for checkpointing in (True, False)
    )
    matmuls = [sum(kind == "matmul" for kind, _ in job["ops"].values()) for job in (on, off)]
    # 4 forward, 7 backward as x needs no gradient, 4 recomputed
    Checks.equal(matmuls, [15, 11], "matmuls with and without checkpointing")
    Checks.equal(recomputed(on), {"matmul": 4, "relu": 2}, "recomputed")
    Checks.equal(recomputed(off), {}, "recomputed without checkpointing")


@pytest.mark.parametrize("graph, blocks", [(False, -1), (True, 4)])
def test_checkpointing_lowers_the_peak_of_eager_mode_and_raises_that_of_a_graph_on_cpu(graph, blocks):
    """In units of a rank's hidden activations of a block; a graph recomputes 2 of them in each block.

    Buffers live longer on a busy machine: each peak is the least of up to six tries, and half the change is enough.
    """
    sizes = {"graph": graph, "batch": 8192, "in_features": 8, "hidden_size": 1024, "out_features": 8, "steps": 2}
    hidden, least = 4 * 8192 // 2 * 1024, {True: float("inf"), False: float("inf")}
    for _ in range(6):
        for on in least:
            least[on] = min(least[on], peak(fresh(2, "activation_checkpointing", checkpointing=on, **sizes)))
        change = (least[True] - least[False]) / hidden
        if 0.5 < change / blocks < 1.5:
            break
    Checks.that(0.5 < change / blocks < 1.5, "peak changes by", change, "but should by", blocks)


@pytest.mark.parametrize("batch", [8, 1024])
def test_auto_parallel_turns_from_tensor_to_data_parallel_as_the_batch_grows(pools, batch):
    job = pools(2).call(COMPILED, path=path("auto_parallel"), steps=1, batch=batch)[0]
    weights, moves = [job["ops"][f"model.{name}"][1]["out"] for name in ("w0", "w1")], job["boxings"]
    if batch == 8:
        Checks.equal(weights, ["S(1)", "S(0)"], "weights at batch", batch)
        # No weight and no gradient, as its docstring says.
        wanted = [("P", "B", (8, 256)), ("S(0)", "B", (8, 256)), ("S(0)", "B", (8, 256))]
        Checks.equal([move for move in moves if move[2]], wanted, "moves at batch", batch)
    else:
        Checks.equal(weights, ["B", "B"], "weights at batch", batch)
        Checks.equal(moves, [("P", "B", (256, 1024)), ("P", "B", (1024, 256))], "moves at batch", batch)


def test_auto_parallel_aborts_if_it_chooses_to_gather_a_weight():
    sizes = {"batch": 2048, "in_features": 512, "out_features": 512}
    with Pool(2) as pool, pytest.raises(PoolError, match="register.cpp:75\\] Check failed"):
        pool.call(OBSERVE, path=path("auto_parallel"), **sizes)
