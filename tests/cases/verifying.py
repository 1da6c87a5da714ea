"""Run `launch.sh verify` on ranks of the test pools, which is faster than a job for each run."""

import re

from oneflow_cookbook.verify.command import OBSERVE, CannotVerify, findings, options_of
from tests.cases import ROOT
from tests.cases.ladder import Checks

PROGRAMS = str(ROOT / "tests" / "programs_to_verify.py")
# Program with a mistake -> what verify says of it
MISTAKES = {
    "divided_by_ranks": "the loss, .*2 times too small",
    "divided_by_own_rows": "the loss, .*2 times too large",
    "mean_of_means": r"the loss, .*after to_local\(\)",
    "same_batch_on_all_ranks": "wrong: .*each rank passes the same",
    "batch_norm": "the output of norm .*batchnorm-normalizes",
    "shuffled_in_b": "the tensor that randperm makes.*tensors-in-b-from-randperm",
    "cast_of_a_sum": "the tensor whose value numpy reads.*a-tensor-in-p-loses",
    "clipped_by_a_norm": "the tensor before to_global.*the-norm-from",
    "clipped_by_own_norm": "the gradient of down.bias at the update .*the copies of ranks 0 and 1 differ",
    "bias_in_p": "down.bias after the update.*a-parameter-in-p",
    "bias_of_each_rank": "the output of down .*every row is off by the same numbers",
    "rows_of_an_embedding": r"the gradient of weight .*programs_to_verify.py:\d+, x\[i\] with tensors in i",
    "column_of_a_mesh": r"the gradient of weight .*programs_to_verify.py:\d+, x\[i\] with tensors in i",
    "stacked": "the gradient of .*the-gradient-of-stack",
    "maximum_of_p": "the gradient of .*has NaN.*the-gradient-of-amax",
    "labels_without_offset": "wrong: .*each rank passes the same .*on one rank the script makes other numbers",
    "optimizer_before_layout": "wrong: no optimizer updates any of the model's 4 parameters",
    "padded_micro_batches": "the output of Graph.*the i-th part of each rank's rows",
    "learning_rate_in_a_graph": "after the update.*the gradients are right and the update is not",
}
RANKS = {"maximum_of_p": 3}  # by default 2


def verified(pools, *arguments):
    """The Findings of verify with these arguments."""
    options = options_of(list(map(str, arguments)))
    return findings(options, lambda calls: [pools(ranks).call(OBSERVE, **call) for ranks, call in calls])


def check_right(pools, *arguments):
    """Verify must find no difference, and must have compared something."""
    found = verified(pools, *arguments)
    Checks.that(not found.differs, found.as_text())
    Checks.that(found.comparison.agreeing, "nothing was compared")


def check_wrong(pools, program):
    """Verify must find the mistake in a program of programs_to_verify.py, and say what MISTAKES has."""
    text = verified(pools, "-n", RANKS.get(program, 2), PROGRAMS, program, "--wrong").as_text()
    Checks.that(re.search(MISTAKES[program], text, re.DOTALL), f"{MISTAKES[program]!r} is not in\n{text}")


def refusal(pools, *arguments):
    """Why verify cannot verify a script."""
    try:
        return f"it can: {verified(pools, *arguments).as_text()}"
    except CannotVerify as reason:
        return str(reason)
