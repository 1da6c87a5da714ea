"""What a step of training sends, measured at sizes where OneFlow's own messages do not show, against the formula."""

import pytest

from harness.report import pages
from harness.start.recipe import path_of, world_sizes
from tests.cases import CASES, GRAPH_ONLY, PROVEN, TRAINED
from tests.cases.ladder import Checks
from tests.early import early_call

VARIANTS = {  # what else than the default sends something else
    "train_model_parallel": [{"input_gradient": False}],
    "train_data_tensor": [{"hidden": 8}],  # little weight: what is left runs along axis 1
    "train_pipeline": [{"micro_batches": 8}],
    "loss_placement": [{"loss": "each"}, {"loss": "first"}, {"loss": "other"}],
    "replicate_scatter_gather": [{"batch": 8192, "hidden": 8}, {"way": "sbp"}],  # large outputs, little weight
}
RUNS = [
    (name, n, mode, more)
    for name in TRAINED
    for n in PROVEN
    if n in world_sizes(path_of(name))
    for mode in pages.modes(path_of(name))
    if n != 3 or mode == "eager" or (mode == "only" and name not in GRAPH_ONLY)
    for more in [{}, *(VARIANTS.get(name, []) if n == 4 else [])]
]


def run_id(run):
    name, n, mode, more = run
    return "-".join([name, str(n), mode, *(f"{key}={value}" for key, value in more.items())])


def early_calls(item):
    """What a test needs: see early.py."""
    name, n, mode, more = item.callspec.params["run"]
    return early_call(name, n, mode, **more)


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_bytes_of_a_step(measured, run):
    name, n, mode, more = run
    given = {**pages.training_sizes(name), **more, "steps": 1}  # with more steps the bounds of its values overflow
    case = CASES[name](n, mode == "graph" or name in GRAPH_ONLY, **given)
    found = measured("step", name, n, mode, *more.items())
    for rank in range(n):
        bytes_wanted, sent = 4 * case.sends[rank], found[rank]["sent"]
        near = abs(sent - bytes_wanted) <= 0.02 * bytes_wanted + 20_000  # and OneFlow's own messages
        Checks.that(near, name, f"rank {rank} sends", sent, "bytes a step and must send", bytes_wanted)
