"""The GPT on meshes of data x tensor x pipeline: layouts, gradients, losses, answers, all as in numpy."""

import re
import shutil

import numpy as np
import pytest

from oneflow_cookbook.measure.sbp import Layout
from oneflow_cookbook.pool import PoolError
from oneflow_cookbook.start.recipe import load, path_of
from tests.cases import gpt_meshes as gpt
from tests.cases import reference_gpt
from tests.cases.gpt_meshes import CONTEXT_RUNS, EXPERT_RUNS, RUNS, SMALL, TRAINED, prove, prove_run
from tests.cases.ladder import MAIN

GPT = str(path_of("gpt"))


def run_id(run):
    (data, tensor, pipeline), more = run
    return "-".join([f"{data}x{tensor}x{pipeline}", *more])


QUICK = (*RUNS[:2], EXPERT_RUNS[0], CONTEXT_RUNS[0])


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=() if run in QUICK else pytest.mark.slow, id=run_id(run))
        for run in (*RUNS, *EXPERT_RUNS, *CONTEXT_RUNS)
    ],
)
def test_mesh_trains_as_numpy(pools, run):
    mesh, more = run
    prove(pools(int(np.prod(mesh))), GPT, mesh, **more)


def test_text_is_the_same_with_every_version_of_python_and_numpy():
    module = load(GPT)
    ids, targets = module.batch_of(module.Config(), seed=0, step=1)
    rows = np.concatenate((ids, targets[:, -1:]), 1)[:4]
    text = ["".join(module.CHARACTERS[token] for token in row) for row in rows]
    assert text == ["17+22=930", "42+79=121", "48+76=421", "61+31=290"]
    assert module.SUMS[:4].tolist() == [9394, 898, 2398, 5906]


@pytest.mark.parametrize("mesh, layout", gpt.ROWS, ids=str)
def test_formula_of_memory_counts_the_shards(mesh, layout):
    sizes = {name: gpt.SIZES[name] for name in ("seq_len", "num_layers", "hidden_size")}
    weights = reference_gpt.new_weights(reference_gpt.vocab_size_of(gpt.SIZES["num_heads"]), **sizes)
    bytes_of = np.zeros(np.prod(mesh))  # rank -> its weights, gradients and two moments
    for name, weight in weights.items():
        placed = Layout(*gpt.layout_of(name, mesh, sizes["num_layers"], layout == "sharded weights"))
        for rank in placed.members:
            block = placed.block(weight.exact.shape, rank)
            bytes_of[rank] += 4 * 4 * np.prod([stop - start for start, stop in block])
    assert gpt.formulas(mesh, layout)[1] == bytes_of.max()


def options_of(arguments):
    """The arguments of `train` and `placements` as words of a command line."""
    words = []
    for name, value in arguments.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


REFUSED = [  # number of ranks, arguments, the error
    (1, {"data": 2}, "data 2 x tensor 1 x pipeline 1 must be the number of ranks, 1"),
    (1, {"tensor": 4}, "data 1 x tensor 4 x pipeline 1 must be the number of ranks, 1"),
    (2, {"batch_size": 9}, "--data 2 does not divide the 9 rows of a batch; these do: 1, 3, 9"),
    (2, {"tensor": 2, "num_heads": 3}, "--tensor 2 does not divide the 3 heads; these do: 1, 3"),
    (2, {"pipeline": 2, "num_layers": 1}, "--pipeline 2 is more than the 1 layers; use fewer"),
    (2, {"experts": 3}, "--data 2 does not divide the 3 experts; these do: 1, 3"),
    (
        2,
        {"context_parallel": True, "seq_len": 9},
        "--data 2 does not divide the 9 tokens of a sequence; these do: 1, 3, 9",
    ),
    (
        2,
        {"context_parallel": True, "experts": 4},
        "--experts gives out its slots by whole sequences; leave out --context-parallel",
    ),
    (
        2,
        {"context_parallel": True, "batch_size": 9, "micro_batches": 2},
        "--micro-batches 2 does not divide the 9 rows of a batch on each rank; these do: 1, 3, 9",
    ),
    (1, {"experts": 1}, "--experts 1 is fewer than the 2 that a token chooses"),
    (1, {"seq_len": 7}, "--seq-len 7 is too short for a sum; use 8 or more"),
    (1, {"recompute": "full"}, "--recompute full: OneFlow does that in a graph alone; add --graph"),
    (
        1,
        {"batch_size": 6, "micro_batches": 4},
        "--micro-batches 4 does not divide the 6 rows of a batch on each rank; these do: 1, 2, 3, 6",
    ),
    (
        2,
        {"tensor": 2, "seq_len": 9, "sequence_parallel": True},
        "--tensor 2 does not divide the 9 tokens of a sequence on each rank; these do: 1, 3, 9",
    ),
    (
        2,
        {"hidden_size": 15, "num_heads": 3, "shard_weights": True},
        "--data 2 does not divide the 15 columns of a weight; these do: 1, 3, 5, 15",
    ),
    (
        1,
        {"recompute": "full", "graph": True, "data": 2},
        "data 2 x tensor 1 x pipeline 1 must be the number of ranks, 1",
    ),
]


@pytest.mark.parametrize(
    "n, arguments, error",
    [pytest.param(*case, marks=pytest.mark.slow if i > 2 else ()) for i, case in enumerate(REFUSED)],
)
def test_sizes_that_do_not_divide_are_refused_in_one_line(pools, n, arguments, error):
    """By each rank, with exit code 2, before it waits for another."""
    for code, out, err in pools(n).call(MAIN, path=GPT, arguments=options_of(arguments)):
        assert (code, out) == (2, "") and err.splitlines()[-1].endswith(f": error: {error}")


@pytest.mark.slow
def test_train_refuses_sizes_that_do_not_divide(pools):
    """Where it is called without main."""
    with pytest.raises(PoolError, match="ValueError: --data 2 does not divide the 9 rows of a batch"):
        pools(2).call(TRAINED, path=GPT, **{**SMALL, "batch_size": 9})


def test_checkpoint_of_another_model_is_refused(pools, tmp_path):
    """4 heads or 8 show in no shape."""
    arguments = {"path": GPT, "checkpoint_dir": str(tmp_path), **SMALL}
    pools(1).call(TRAINED, **arguments, steps=1)
    with pytest.raises(PoolError, match=f"CheckpointError: {tmp_path}/1 has --num-heads 4, this job 8"):
        pools(1).call(TRAINED, **{**arguments, "num_heads": 8}, steps=2)


@pytest.mark.slow
def test_sizes_that_do_not_divide_but_fit_train_as_numpy(pools):
    """An odd sequence whose residual is not split, and a vocabulary that is padded."""
    sizes = {"batch_size": 6, "seq_len": 9, "num_layers": 1, "hidden_size": 18, "num_heads": 6}
    assert reference_gpt.VOCABULARY % 6
    prove_run(pools(2), GPT, (1, 2, 1), {"steps": 2, "sums": 9, "micro_batches": 3}, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, done", [(["--tensor", "2", "--sequence-parallel"], 46), (["--pipeline", "2", "--graph"], 0)]
)
def test_main_of_a_copy_passes(pools, tmp_path, arguments, done):
    """done: the steps of an earlier job, from whose checkpoint it resumes."""
    path = shutil.copy(GPT, tmp_path)
    arguments = [*arguments, *options_of(SMALL), "--checkpoint-dir", str(tmp_path / "saved"), "--steps"]
    if done:
        pools(2).call(MAIN, path=path, arguments=[*arguments, str(done)])
    results = pools(2).call(MAIN, path=path, arguments=[*arguments, "51", "--check"])
    assert [(code, err) for code, _, err in results] == [(0, "")] * 2 and (tmp_path / "saved" / "51").is_dir()
    out, other_out = (out for _, out, _ in results)
    *_, progress, held, answers, right, last = out.splitlines()
    assert re.fullmatch(r"step 51  loss \d\.\d+  \d+ tokens/s", progress)
    assert re.fullmatch(r"[\d,]+ of [\d,]+ weights", held) and re.fullmatch(r"[\d,]+ of [\d,]+ weights\n", other_out)
    assert re.fullmatch(r"(\d\d\+\d\d=[\d+=;]{3} ?){8}", answers)
    assert re.fullmatch(r"\d+ of 100 sums that it was not trained on are right", right)
    assert last == f"the losses of steps {done + 1} to 50 are those of a single rank"
