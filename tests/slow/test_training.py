"""What a step of training sends, measured at sizes where OneFlow's own messages do not show, against the formula."""

import pytest

from harness.report import runs
from harness.start.recipe import path_of
from tests.background import step_call
from tests.cases import CASES, GRAPH_ONLY, TRAINED, proven_on
from tests.cases.ladder import Checks

VARIANTS = {  # what else than the default sends something else
    "train_model_parallel": [{"input_gradient": False}],
    "train_data_tensor": [{"hidden": 8}],  # little weight: what is left runs along axis 1
    "train_pipeline": [{"micro_batches": 8}],
    "loss_placement": [{"loss": "each"}, {"loss": "first"}, {"loss": "other"}],
    "context_parallel": [{"way": "all_to_all"}, {"way": "ring"}],
    "ring_all_reduce": [{"in_features": 7, "out_features": 50_000}],  # chunks of different size
    "batch_norm": [{"batch": 8, "in_features": 1, "out_features": 50_000}],  # little weight: the four rows show
    "replicate_scatter_gather": [{"batch": 8192, "hidden": 8}, {"way": "sbp"}],  # large outputs, little weight
}
RUNS = [
    (name, n, mode, more)
    for name in TRAINED
    for n in proven_on(name)
    for mode in runs.modes(path_of(name))
    if n != 3 or mode == "eager" or (mode == "only" and name not in GRAPH_ONLY)
    for more in [{}, *(VARIANTS.get(name, []) if n == 4 else [])]
]


def run_id(run):
    name, n, mode, more = run
    return "-".join([name, str(n), mode, *(f"{key}={value}" for key, value in more.items())])


def background_calls(item):
    """What a test needs: see background.py."""
    name, n, mode, more = item.callspec.params["run"]
    return step_call(name, n, mode, **more)


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_bytes_of_a_step(measured, run):
    name, n, mode, more = run
    sizes = {**runs.training_sizes(name), **more, "steps": 1}  # with more steps the bounds of its values overflow
    case = CASES[name](n, mode == "graph" or name in GRAPH_ONLY, **sizes)
    found = measured("step", name, n, mode, *more.items())
    for rank in range(n):
        bytes_wanted, sent = 4 * case.sends[rank], found[rank]["sent"]
        near = abs(sent - bytes_wanted) <= 0.02 * bytes_wanted + 20_000  # and OneFlow's own messages
        Checks.that(near, name, f"rank {rank} sends", sent, "bytes a step and must send", bytes_wanted)
