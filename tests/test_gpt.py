"""The GPT on meshes of data x tensor x pipeline: layouts, gradients, losses, letters, all as in numpy."""

import re
import shutil

import numpy as np
import pytest

from harness.measure.sbp import Layout
from harness.start.recipe import path_of
from tests.cases import ROOT, gpt, reference_gpt
from tests.cases.gpt import RUNS, SMALL, TRAINED, check, mesh_of, prove, wanted

GPT = str(path_of("gpt"))
HERE = str(ROOT / "tests" / "on_rank_gpt.py")
MAIN = str(ROOT / "tests" / "on_rank.py")


def run_id(run):
    (data, tensor, pipeline), more = run
    return "-".join([f"{data}x{tensor}x{pipeline}", *more])


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_mesh_trains_as_numpy(pools, run):
    mesh, more = run
    prove(pools(int(np.prod(mesh))), GPT, mesh, **more)


def test_gradients_of_the_reference_are_finite_differences():
    rng, e = np.random.default_rng(1), 1e-5
    w = reference_gpt.new_weights(12, 5, 2, 8)
    w = {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in w.items()}
    ids, targets = rng.integers(12, size=(2, 3, 5))
    _, gradients = reference_gpt.loss_and_gradients(w, ids, targets, heads=2)
    for name, value in w.items():
        way = rng.standard_normal(value.shape)
        up, down = (
            reference_gpt.loss_and_gradients({**w, name: value + s * e * way}, ids, targets, 2)[0] for s in (1, -1)
        )
        np.testing.assert_allclose((gradients[name] * way).sum(), (up - down) / (2 * e), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mesh, layout", gpt.ROWS, ids=str)
def test_formula_of_memory_counts_the_shards(mesh, layout):
    sizes = {name: gpt.SIZES[name] for name in ("length", "layers", "width")}
    kept, shapes = np.zeros(np.prod(mesh)), reference_gpt.new_weights(gpt.letters(), **sizes)
    for name, weight in shapes.items():
        sbps, ranks = gpt.layout_of(name, mesh, sizes["layers"], layout == "sharded weights")
        for rank in ranks.ravel():
            block = Layout(", ".join(sbps), ranks.tolist()).block(weight.shape, rank)
            kept[rank] += 4 * 4 * np.prod([stop - start for start, stop in block])
    assert gpt.formulas(mesh, layout)[1] == kept.max()


def test_two_ranks_differ_along_an_axis():
    ranks = range(8)  # 2 stages of 2 x 2
    axes = {other: gpt.axis_of((2, 2, 2), 0, other) for other in ranks[1:]}
    assert axes == {1: "tensor", 2: "data", 3: "others", **dict.fromkeys(ranks[4:], "pipeline")}


@pytest.mark.slow
def test_weight_without_identity_is_seen_under_accumulation(pools):
    """The harm itself is seen only now and then: here the graph is looked at, with all weights read so."""
    bare = ["tokens", "positions", "norm", "qkv", "project", "norm_mlp", "up", "down"]
    [found] = pools(1).call(TRAINED, path=GPT, bare=bare, graph=True, micro_batches=2, steps=1, **SMALL)
    names = [name for name in found["tensors"] if "." in name]
    assert (
        found["without_identity"] == sorted(f"module.{name}" for name in names)
        and len(names) == 3 + 6 * SMALL["layers"]
    )


@pytest.mark.parametrize(
    "arguments, line",
    [
        ({"data": 2}, "data 2 x tensor 1 x pipeline 1 must be the number of ranks, 1"),
        ({"tensor": 4}, "data 1 x tensor 4 x pipeline 1 must be the number of ranks, 1"),
        ({"batch": 6, "micro_batches": 4}, "--micro-batches 4 does not divide the 6 rows of a batch on each rank; "),
    ],
)
def test_sizes_that_do_not_divide_are_refused_in_one_line(pools, arguments, line):
    [said] = pools(1).call(f"{HERE}:refused", path=GPT, **{**SMALL, **arguments})
    assert said.startswith(line) and "\n" not in said


@pytest.mark.parametrize(
    "mesh, sizes, line",
    [
        ((2, 1, 1), {"batch": 9}, "--data 2 does not divide the 9 rows of a batch; these do: 1, 3, 9"),
        ((1, 2, 1), {"heads": 3, "width": 18}, "--tensor 2 does not divide the 3 heads; these do: 1, 3"),
        ((1, 1, 2), {"layers": 3}, "--pipeline 2 does not divide the 3 layers; these do: 1, 3"),
        (
            (1, 2, 1),
            {"length": 9, "sequence_parallel": True},
            "--tensor 2 does not divide the 9 letters of a sequence; these do: 1, 3, 9",
        ),
        (
            (2, 1, 1),
            {"width": 15, "heads": 3, "shard_weights": True},
            "--data 2 does not divide the 15 columns of a weight; these do: 1, 3, 5, 15",
        ),
    ],
)
def test_all_ranks_refuse_alike(pools, mesh, sizes, line):
    assert pools(2).call(f"{HERE}:refused", path=GPT, **mesh_of(mesh), **{**SMALL, **sizes}) == [line] * 2


def test_sizes_that_do_not_divide_but_fit_train_as_numpy(pools):
    """An odd sequence whose residual is not split, and a vocabulary that is padded."""
    sizes = {"batch": 6, "length": 7, "layers": 1, "width": 18, "heads": 6}
    assert len(reference_gpt.text()[0]) % 6
    found = pools(2).call(TRAINED, path=GPT, steps=2, sample=9, data=1, tensor=2, micro_batches=3, **sizes)
    check(found, wanted(steps=2, sample=9, **sizes), (1, 2, 1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--tensor", "2", "--sequence-parallel"], ["--pipeline", "2", "--graph"]])
def test_main_of_a_copy_says_that_it_is_right(pools, tmp_path, arguments):
    path = shutil.copy(GPT, tmp_path)
    arguments = [*arguments, "--steps", "2", "--sample", "9", "--folder", str(tmp_path / "saved")]
    (code, out, err), other = pools(2).call(f"{MAIN}:main_of", path=path, arguments=arguments)
    assert (code, err, other) == (0, "", (0, "", "")) and (tmp_path / "saved" / "2").is_dir()
    progress, *letters, last = out.splitlines()
    assert re.fullmatch(r"step 2  loss \d\.\d+  \d+ tokens/s  0 s left", progress)
    assert len("\n".join(letters)) == 9 and last.endswith("is that of the same weights on a single rank")
