"""What a step of training sends, at sizes where OneFlow's own messages are small; what ddp.py says of its wrapper."""

import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT, TRAINED, measuring
from tests.cases.ladder import OBSERVE, Checks
from tests.pools import step_call

ON_RANK = str(ROOT / "tests" / "on_rank_training.py")
RUNS = [(name, *run) for name in TRAINED for run in measuring.steps_of(name)]


def run_id(run):
    name, n, mode, more = run
    return "-".join([name, str(n), mode, *(f"{key}={value}" for key, value in more.items())])


def background_calls(item):
    """What a test needs: see pools.py."""
    if item.originalname != "test_bytes_of_a_step":
        return {}
    name, n, mode, more = item.callspec.params["run"]
    return step_call(name, n, mode, **more)


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_bytes_of_a_step(measured, run):
    name, n, mode, more = run
    measuring.check_step(name, n, mode, more, measured("step", name, n, mode, *more.items()))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_start_from_rank_0_and_stay_equal_bit_by_bit(pools, n):
    first, *others = pools(n).call(OBSERVE, path=str(path_of("ddp")), steps=20, batch=4 * n + 1)
    for name in ("w0", "w1", "w0 grad", "w1 grad", "new w0", "new w1"):
        assert all((rank["tensors"][name]["value"] == first["tensors"][name]["value"]).all() for rank in others)
    for name in ("w0", "w1"):
        weight = first["tensors"][name]["value"]
        assert (weight == first["arrays"][f"own_{name}"]).all()
        assert all((weight != rank["arrays"][f"own_{name}"]).all() for rank in others)


def test_module_stays_the_same_and_its_names_too(pools):
    assert pools(2).call(f"{ON_RANK}:wrapped") == [(True, ["w0", "w1"])] * 2


@pytest.mark.parametrize(
    "weights, options, buckets", [(2, {}, [2]), (11, {}, [10, 1]), (2, {"bucket_size": 1}, [1, 1])]
)
def test_weights_share_a_bucket(pools, weights, options, buckets):
    for calls, sent in pools(2).call(f"{ON_RANK}:reduced", weights=weights, **options):
        assert calls == [size * 256 * 256 for size in buckets]
        Checks.that(abs(sent - 4 * sum(calls)) <= 0.02 * 4 * sum(calls), sent, calls)  # 2 (n-1)/n is 1
