"""The GPT on all ten meshes of up to 4 ranks, eager and in a graph; checkpoints, and the harm that its traps do."""

import os
from functools import lru_cache

import numpy as np
import pytest

from harness.pool import Pool, PoolError
from harness.start.recipe import path_of
from tests.cases import ROOT, reference_gpt
from tests.cases.gpt import check, mesh_of
from tests.cases.ladder import Checks

GPT = str(path_of("gpt"))
HERE = str(ROOT / "tests" / "on_rank_gpt.py")
SIZES = {"batch": 16, "length": 8, "layers": 4, "width": 16, "heads": 4}
SMALL = {**SIZES, "layers": 2}
MESHES = [
    (data, tensor, pipeline)
    for data in (1, 2, 4)
    for tensor in (1, 2, 4)
    for pipeline in (1, 2, 4)
    if data * tensor * pipeline <= 4
]
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
WAYS = {  # what else a mesh runs with
    "plain": {"steps": 50, "sample": 40},
    "sequence parallel": {"steps": 5, "sequence_parallel": True},
    "sharded": {"steps": 5, "shard_weights": True},
    "micro-batches": {"steps": 5, "micro_batches": 4},
    "all": {"steps": 5, "sequence_parallel": True, "shard_weights": True, "micro_batches": 4, "clip": 0.5},
}
wanted = lru_cache(maxsize=None)(reference_gpt.trained)


@MODES
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_mesh_trains_as_numpy_in_every_way(mesh, graph):
    with Pool(int(np.prod(mesh)), timeout=300, repeat=True) as pool:  # of its own: it keeps each graph
        for way, given in WAYS.items():
            found = pool.call(f"{HERE}:trained", path=GPT, graph=graph, **mesh_of(mesh), **given, **SIZES)
            known = {"sample": given.get("sample", 0), "clip": given.get("clip", 0.0)}
            check(found, wanted(steps=given["steps"], **known, **SIZES), mesh, SIZES["layers"], way, **given)


@MODES
@pytest.mark.parametrize(
    "saved, loaded", [((2, 1, 1), (1, 2, 2)), ((1, 2, 1), (4, 1, 1)), ((1, 1, 2), (2, 2, 1)), ((2, 1, 2), (1, 4, 1))]
)
def test_training_goes_on_on_another_mesh(tmp_path, saved, loaded, graph):
    def losses(mesh, steps, folder, **more):
        with Pool(int(np.prod(mesh)), timeout=300, repeat=True) as pool:
            given = {"steps": steps, "folder": str(folder), "graph": graph, **mesh_of(mesh), **more, **SMALL}
            return np.array(pool.call(f"{HERE}:losses_and_letters", path=GPT, **given)[0][0])

    unbroken = losses(saved, 20, tmp_path / "unbroken")
    losses(saved, 10, tmp_path / "broken")
    went_on = losses(loaded, 20, tmp_path / "broken", shard_weights=True)
    Checks.equal(len(went_on), 11, "steps done after the checkpoint, and the next loss")
    off = np.abs(went_on - unbroken[10:]).max()
    Checks.that(off <= 1e-5, "losses differ from those of the unbroken run by", off)
    off = np.abs(unbroken - wanted(steps=20, **SMALL)["losses"]).max()
    Checks.that(off <= 1e-4, "losses of the unbroken run are off by", off)


@MODES
@pytest.mark.parametrize("moment", ["in training", "not all files", "not named"])
def test_death_loses_at_most_one_interval(tmp_path, moment, graph):
    given = {"path": GPT, "folder": str(tmp_path), "steps": 6, "every": 2, "graph": graph, "data": 2, **SMALL}
    with Pool(2, timeout=300) as pool:
        with pytest.raises(PoolError, match="died .exit code 9"):
            pool.call(f"{HERE}:die", moment=moment, step=4, **given)
        assert "2" in os.listdir(tmp_path) and "4" not in os.listdir(tmp_path)
        losses, _ = pool.call(f"{HERE}:losses_and_letters", **given)[0]
    assert {"2", "4", "6"} <= set(os.listdir(tmp_path))
    off = np.abs(np.array(losses) - wanted(steps=6, **SMALL)["losses"][2:]).max()
    Checks.that(len(losses) == 5 and off <= 1e-4, "losses of steps 3 to 7 are off by", off)


def test_table_by_ids_has_a_wrong_gradient(tmp_path):
    """Why the recipe gathers: table[ids] with split ids keeps one shard's gradient, and says that it is whole."""
    source, cure = path_of("gpt").read_text(), "flow._C.gather(table, ids.transpose(0, 1), 0)"
    assert source.count(cure) == 1
    (tmp_path / "gpt.py").write_text(source.replace(cure, "table[ids.transpose(0, 1)]"))
    with Pool(2, timeout=120) as pool:
        found = pool.call(f"{HERE}:trained", path=str(tmp_path / "gpt.py"), steps=1, data=2, **SMALL)
    gradient = wanted(steps=1, sample=0, clip=0.0, **SMALL)["first"]["embedding.tokens"]
    for result in found:
        assert np.abs(result["moments"]["embedding.tokens"] / 0.1 - gradient).max() > 0.1 * np.abs(gradient).max()


def test_gradient_of_the_normed_input_needs_its_sbp(tmp_path):
    """Why the recipe gives grad_sbp: without it eager mode sends half as much again for tensor parallel."""
    source, cure = path_of("gpt").read_text(), ', grad_sbp=self.layout["residual"])'
    assert source.count(cure) == 1
    (tmp_path / "gpt.py").write_text(source.replace(cure, ")"))
    sizes = {"batch": 8, "length": 32, "layers": 2, "width": 64, "heads": 4}
    with Pool(2, timeout=120, repeat=True) as pool:
        with_it, without = (
            sum(pool.call(f"{HERE}:sent_in_a_step", path=str(path), data=1, tensor=2, **sizes))
            for path in (GPT, tmp_path / "gpt.py")
        )
    all_reduces, activation = 4 * sizes["layers"] + 2, 4 * sizes["batch"] * sizes["length"] * sizes["width"]
    formula = all_reduces * 2 * activation  # of both ranks together; the loss, its input's maxima and ids come on top
    Checks.that(formula <= with_it <= 1.1 * formula, with_it / formula, "x Megatron's formula")
    Checks.that(without >= 1.4 * with_it, without / with_it, "x without grad_sbp")
