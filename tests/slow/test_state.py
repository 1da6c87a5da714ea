"""What the recipes on state claim beyond values and layouts: resuming, crashes, bytes."""

import os

import pytest

from oneflow_cookbook.pool import PoolError
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT, reference
from tests.cases.ladder import OBSERVE, Checks, assert_close
from tests.jobs import steps_in

HERE = str(ROOT / "tests" / "on_rank_state.py")
CHECKPOINT = str(path_of("checkpoint"))


def train_on(pool, folder, **arguments):
    """What rank 0 has after training checkpoint.py with checkpoints in this folder: name -> value.

    "w" is the weight before the first step of this run, "steps" the number of its steps.
    """
    [seen, *_] = pool.call(OBSERVE, path=CHECKPOINT, checkpoint_dir=str(folder), **arguments)
    values = {name: seen["tensors"][name]["value"] for name in ("w", "new w", "w momentum_buf")}
    return {**values, "losses": seen["arrays"]["losses"], "steps": len(seen["reads"])}


def same_bits(run, other, *what):
    for name in ("new w", "w momentum_buf", "losses"):
        Checks.that((run[name] == other[name]).all(), *what, name, "is not the same bit by bit")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_checkpoint_resumes_on_another_number_of_ranks(pools, tmp_path, graph):
    worlds, before = (2, 4, 2, 1), None
    for k, n in enumerate(worlds):
        weights = ("rows", "columns", "whole")[k % 3]
        run = train_on(pools(n), tmp_path, graph=graph, steps=k + 1, weights=weights, size=8)
        assert steps_in(tmp_path) == [step + 1 for step in range(k + 1)]
        if before:
            Checks.that((run["w"] == before["new w"]).all(), "it begins with the weight that was saved")
        wanted = reference.trained("momentum", steps=k + 1, layers=1, in_features=8, out_features=8)
        assert_close(run["new w"], wanted["new w0"], worlds, k, "w")
        assert_close(run["w momentum_buf"], wanted["w0 momentum_buf"], worlds, k, "momentum")
        assert_close(run["losses"], wanted["losses"], worlds, k, "losses")
        before = run


@pytest.mark.parametrize(
    "n, weights, graph", [(2, "rows", False), (2, "rows", True), (2, "whole", False), (3, "columns", True)]
)
def test_training_from_a_checkpoint_has_the_bits_of_one_that_was_not_stopped(pools, tmp_path, n, weights, graph):
    options = {"graph": graph, "weights": weights, "size": 8}
    at_once = train_on(pools(n), tmp_path / "at once", steps=4, **options)
    for steps in (2, 4):
        stopped = train_on(pools(n), tmp_path / "stopped", steps=steps, **options)
    same_bits(stopped, at_once, n, weights)
    if n == 2:  # the sum of two numbers has no order
        train_on(pools(n), tmp_path / "whole", steps=2, **{**options, "weights": "whole"})
        same_bits(train_on(pools(n), tmp_path / "whole", steps=4, **options), at_once, weights, "after whole")


@pytest.mark.parametrize("moment, graph", [("half a file", False), ("not named", True)])
def test_crash_while_saving_leaves_the_old_checkpoint_whole(pools, tmp_path, moment, graph):
    folder = tmp_path / "crashed"
    train_on(pools(2), folder, graph=graph, steps=4)
    arguments = {"checkpoint_dir": str(folder), "graph": graph, "steps": 8}
    with pytest.raises(PoolError, match="died .exit code 9"):
        pools(2).call(f"{HERE}:die", path=CHECKPOINT, moment=moment, step=6, **arguments)
    assert steps_in(folder) == [2, 4] and any(name.startswith("unfinished-") for name in os.listdir(folder))
    resumed = train_on(pools(2), folder, graph=graph, steps=8)
    assert sorted(os.listdir(folder)) == ["2", "4", "6", "8", "lock"]
    same_bits(resumed, train_on(pools(2), tmp_path / "undisturbed", graph=graph, steps=8))


def test_only_the_lock_is_open_after_a_save_and_nothing_later(pools, tmp_path):
    answers = pools(2).call(f"{HERE}:left_open", path=CHECKPOINT, folder=str(tmp_path))
    assert answers == [(["lock"], []), ([], [])]


@pytest.mark.parametrize("weights", ["whole", "rows", "columns"])
def test_bytes_to_save_and_load_a_checkpoint(pools, tmp_path, weights):
    n, size = 3, {"rows": 480, "columns": 1200}
    tensor, extra = 4 * 480 * 1200, (n - 1) / n**2 * (weights == "columns")
    by_rank = pools(n).call(
        f"{HERE}:bytes_to_save_and_load", path=CHECKPOINT, folder=str(tmp_path), sbp=weights, **size
    )
    gathered = (n - 1) / n * (weights != "whole") + extra
    sums = [("all ranks load", sum(loaded for _, loaded in by_rank), n - 1 + n * extra)]
    sums += [(f"rank {rank} saves", saved, gathered) for rank, (saved, _) in enumerate(by_rank)]
    for what, sent, wanted in sums:
        near = abs(sent - wanted * tensor) <= 0.02 * wanted * tensor + 20_000
        Checks.that(near, what, sent / tensor, "x the tensor, must be", wanted)


@pytest.mark.parametrize("n", [2, 3])
def test_gradient_of_what_was_gathered_is_whole_unless_grad_sbp_says_otherwise(pools, n):
    """As the trap in loss_placement.py says."""
    ranks = list(range(n))
    for grad_sbp, sbp, rows in ((False, "B", 6), (True, "S(0)", 6 // n)):
        answers = pools(n).call(f"{HERE}:gradient_of_gathered", rows=6, grad_sbp=grad_sbp)
        assert answers == [(sbp, ranks, rows)] * n
