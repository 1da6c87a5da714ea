"""The run that a reader copies: on any mesh, in either mode, stopped and resumed, its numbers are those of numpy."""

import os
import re
import signal

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT, reference_run
from tests.cases.ladder import Checks, check_tensors
from tests.cases.reference_run import PADDING, SMALL, Sizes
from tests.cases.whole_run import RUNS, STEPS, TRAINED, case_of, known, mesh_of, prove
from tests.jobs import LAUNCH, Run, ended, steps_in

RUN, HERE = str(path_of("training_run")), str(ROOT / "tests" / "on_rank_run.py")
SIZES = Sizes(**SMALL)


def run_id(run):
    n, tensor, graph, more = run
    return f"{n // tensor}x{tensor}-{'graph' if graph else 'eager'}-{more['micro_batches']}"


QUICK_FIRST = [pytest.param(run, marks=pytest.mark.slow if i > 1 else (), id=run_id(run)) for i, run in enumerate(RUNS)]


@pytest.mark.parametrize("run", QUICK_FIRST)
def test_run_trains_as_numpy(pools, run):
    n, tensor, graph, more = run
    prove(pools(n), RUN, tensor, graph, **more)


def train(pool, folder, tensor=1, **arguments):
    """What each rank has after training with checkpoints in this folder."""
    return pool.call(TRAINED, path=RUN, checkpoint_dir=str(folder), tensor=tensor, **{**SMALL, **arguments})


def refused(pool, folder, **arguments):
    """The error of each rank that training must end with."""
    return pool.call(f"{HERE}:refused", path=RUN, checkpoint_dir=str(folder), **{**SMALL, **arguments})


def check_values(seen, tensor, **more):
    """Weights, moments and both curves on each rank are those of numpy, which was not stopped."""
    case = case_of(mesh_of(len(seen), tensor), False, STEPS, {"micro_batches": 2, **more})
    for name in list(case.layout):
        if name in known(STEPS)["initial"]:  # those of the beginning are not those of a run that resumes
            del case.layout[name]
    check_tensors(case, seen)


@pytest.mark.parametrize(
    "jobs",
    [  # each with the ranks, those along tensor, graph, and the step up to which it trains
        [(2, 1, False, 3), (1, 1, False, STEPS)],
        pytest.param([(2, 2, True, 1), (3, 1, False, 3), (4, 2, True, 5), (1, 1, True, STEPS)], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_run_resumes_on_other_ranks_and_in_the_other_mode(pools, tmp_path, jobs):
    for n, tensor, graph, steps in jobs:
        seen = train(pools(n), tmp_path, tensor, graph=graph, steps=steps, micro_batches=1 + n % 2)
    check_values(seen, tensor)


@pytest.mark.slow
def test_run_that_resumes_has_the_bits_of_one_that_was_not_stopped(pools, tmp_path):
    """Stopped within an epoch, between two evaluations, while the learning rate falls. Main does it in a graph."""
    options = {"micro_batches": 2, "save_every": 2}
    at_once = train(pools(2), "", steps=STEPS, **options)
    for steps in (3, STEPS):
        stopped = train(pools(2), tmp_path, steps=steps, **options)
    assert steps_in(tmp_path) == [2, 3, 4, STEPS]
    for rank, (one, two) in enumerate(zip(stopped, at_once)):
        for name in ("losses", "held_out"):
            Checks.that((one["arrays"][name] == two["arrays"][name]).all(), rank, name, "have other bits")
        for name in (name for name in one["tensors"] if name.split()[0] == "new" or " " in name):
            values = (result["tensors"][name]["value"] for result in (one, two))
            Checks.that(np.array_equal(*values), rank, name, "has other bits")


@pytest.mark.slow
def test_job_that_is_killed_midway_ends_with_the_bits_of_an_undisturbed_one(pools, tmp_path):
    """A rank is killed at some moment after step 8, and the same command is started again."""
    command = [LAUNCH, "-n", 2, RUN, "--steps", 20, "--save-every", 3, "--checkpoint-dir"]
    run = Run(*command, tmp_path / "killed").until("step 8 ")
    os.kill(run.ranks()[-1], signal.SIGKILL)
    [run] = ended([run])
    saved = str(steps_in(tmp_path / "killed")[-1])
    assert run.code and "killed by signal 9" in run.err and int(saved) < 20
    again, undisturbed = (Run(*command, tmp_path / folder).wait() for folder in ("killed", "at once"))
    assert (again.code, again.err, undisturbed.code, undisturbed.err) == (0, "", 0, "")
    assert "step 4 " in undisturbed.out and "step 4 " not in again.out
    assert re.findall(r"^\[(\d)\] resumes after step (\d+), from \S+/\2$", again.out, re.MULTILINE) == [("0", saved)]
    folders = [str(tmp_path / name / "20") for name in ("killed", "at once")]
    [[one], [other]] = [pools(1).call(f"{HERE}:loaded", folder=folder) for folder in folders]
    assert one.keys() == other.keys() and len(one[".losses"]) == 20
    for name, value in one.items():
        Checks.that(np.array_equal(value, other[name]), name, "differs")


@pytest.mark.parametrize("n, tensor", [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_each_rank_reads_its_own_rows(pools, n, tensor):
    """In the order of the shuffled epoch, micro-batch after micro-batch; the ranks of a tensor group read the same."""
    steps, micro_batches, data = 3, 2, n // tensor
    by_rank = pools(n).call(
        f"{HERE}:rows_read", path=RUN, tensor=tensor, steps=steps, micro_batches=micro_batches, **SMALL
    )
    for rank, read in enumerate(by_rank):
        wanted = []
        for step in range(1, steps + 1):
            parts = np.split(reference_run.indices_of(step, SIZES, 0), micro_batches)
            wanted += [np.split(part, data)[rank // tensor] for part in parts]
            if step % SIZES.eval_every == 0:
                parts = np.split(SIZES.train_samples + np.arange(SIZES.batch_size), micro_batches)
                wanted += [np.split(part, data)[rank // tensor] for part in parts]
        within = [index for index in np.concatenate(wanted) if index < SIZES.train_samples + SIZES.test_samples]
        assert len(within) < len(np.concatenate(wanted))  # beyond the data is padding, which nobody reads
        assert read == within


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_gradients_of_all_micro_batches_are_reduced_once(pools, graph):
    for sent, weights in pools(2).call(f"{HERE}:bytes_of_a_step", path=RUN, graph=graph, micro_batches=2):
        Checks.that(weights < sent < 1.05 * weights, "a rank sends", sent, "bytes, with weights of", weights)


def test_a_mean_of_means_would_be_another_loss():
    """Else a recipe that takes one would pass: of ranks, and of micro-batches."""
    ids, targets = reference_run.samples(reference_run.indices_of(1, SIZES, 0), SIZES)
    counts = (targets.reshape(4, 3, -1) != PADDING).sum((1, 2))  # of 2 micro-batches on 2 ranks
    assert len(set(counts)) > 2
    w = known(1)["initial"]
    right = reference_run.mean_loss(w, ids, targets, SIZES).exact.item()
    for parts in (2, 3, 4):
        losses = [
            reference_run.mean_loss(w, *rows, SIZES).exact.item()
            for rows in zip(np.split(ids, parts), np.split(targets, parts))
        ]
        assert abs(np.mean(losses) - right) > 1e-4


OTHER = {"seed": 1, "batch_size": 6, "train_samples": 30, "seq_len": 7, "vocab_size": 12}
OTHER.update(num_layers=2, hidden_size=16, num_heads=4)  # these change weights, or the order of samples
FREE = {"lr": 0.02, "warmup_steps": 1, "decay_steps": 50, "weight_decay": 0.0, "clip_grad": 2.0}
FREE.update(test_samples=5, eval_every=1, micro_batches=2)


def test_run_resumes_with_a_longer_schedule_and_refuses_other_weights_or_another_order_of_samples(pools, tmp_path):
    train(pools(1), tmp_path, steps=1)
    for name, value in OTHER.items():
        words = f"CheckpointError: {tmp_path}/1 has {name} {SMALL.get(name, 0)}, this job {value}: "
        assert refused(pools(1), tmp_path, steps=2, **{name: value})[0].startswith(words)
    assert refused(pools(1), tmp_path, steps=2, **FREE) == ["no error"]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_parameter_that_the_loss_does_not_use_is_named_unless_it_is_frozen(pools, graph):
    arguments = {"path": RUN, "graph": graph, "steps": 2, **SMALL}
    [(error, _)] = pools(1).call(f"{HERE}:with_another_head", frozen=[], **arguments)
    assert error.startswith("ValueError: value_head has no gradient, as the loss does not use it: leave it out")
    [(error, changed)] = pools(1).call(f"{HERE}:with_another_head", frozen=["value_head", "blocks.0.up"], **arguments)
    assert error == "no error" and "blocks.0.down" in changed and not {"value_head", "blocks.0.up"} & set(changed)


def test_run_refuses_a_checkpoint_in_which_other_parameters_are_trained(pools, tmp_path):
    """AdamW's state has no names: the moments of one parameter would become those of another."""
    arguments = {"path": RUN, "checkpoint_dir": str(tmp_path), **SMALL}
    for steps, frozen, expected in ((1, "blocks.0.up", "no error"), (2, "blocks.0.down", "CheckpointError")):
        call = {**arguments, "steps": steps, "frozen": ["value_head", frozen]}
        [(error, _)] = pools(1).call(f"{HERE}:with_another_head", **call)
        assert error.startswith(expected)
    words = "trains other parameters: blocks.0.down, blocks.0.up; use a different folder"
    assert error == f"CheckpointError: {tmp_path}/1 is of a model that {words}"


@pytest.mark.parametrize(
    "ids, targets, error",
    [
        (-1, 0, r"ValueError: sample \d+: -1 is not in 0 to"),
        (0, SIZES.vocab_size, r"ValueError: sample \d+: \d+ is not in 0 to"),
        (0, PADDING, "FloatingPointError: step 1: the loss of 0 valid tokens is 0.0; nothing was updated"),
    ],
)
def test_run_refuses_numbers_that_it_would_compute_with_as_zeros(pools, ids, targets, error):
    [seen] = pools(1).call(f"{HERE}:refused", path=RUN, samples=(ids, targets), steps=1, **SMALL)
    assert re.match(error, seen)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_run_ends_before_a_gradient_that_is_no_number_is_used(pools, graph):
    """The loss may be finite: the square root of 0 is, and its gradient is not."""
    [(error, weights)] = pools(1).call(f"{HERE}:with_wrong_gradient", path=RUN, graph=graph, steps=2, **SMALL)
    assert re.match(r"FloatingPointError: step 1: the norm of the gradients is (nan|inf); nothing was updated", error)
    Checks.that(weights and all(np.array_equal(*weight) for weight in weights), "a weight was updated")


def test_run_evaluates_without_dropout(pools):
    [modes] = pools(1).call(f"{HERE}:modes_of_calls", path=RUN, steps=4, micro_batches=1, **SMALL)
    step, evaluation = [True, True], [False, False]
    assert modes == [step, step, evaluation] * 2  # one batch has all held-out sequences


def test_run_ends_before_a_loss_that_is_no_number_is_used_or_saved(pools, tmp_path):
    [error] = refused(pools(1), tmp_path, steps=4, lr=1e30, save_every=1)
    assert re.match(r"FloatingPointError: step \d: the loss of \d+ valid tokens is (nan|inf)", error)
    steps = steps_in(tmp_path)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 4
    [state] = pools(1).call(f"{HERE}:loaded", folder=str(tmp_path / str(steps[-1])))
    assert np.isfinite(state[".losses"]).all()
