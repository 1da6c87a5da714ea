"""`launch.sh verify` on right and wrong programs; more of both in tests/slow/test_verify_programs.py."""

import pytest

from harness.start.recipe import path_of
from tests.cases.verifying import PROGRAMS, check_right, check_wrong


@pytest.mark.parametrize(
    "n, arguments",
    [
        (4, ["hybrid_parallel"]),
        (2, ["train_pipeline", "--graph"]),
        (2, ["tensor_parallel_module"]),
        (3, ["ring_attention"]),
        (2, ["mixture_of_experts", "--graph"]),
        (2, ["gradient_accumulation", "--graph"]),
    ],
)
def test_right_recipes(pools, n, arguments):
    name, *options = arguments
    check_right(pools, "-n", n, path_of(name), *options)


@pytest.mark.parametrize("program", ["mean_of_means", "bias_in_p"])
def test_right_programs(pools, program):
    check_right(pools, "-n", 2, PROGRAMS, program)


@pytest.mark.parametrize(
    "program", ["divided_by_ranks", "batch_norm", "bias_in_p", "shuffled_in_b", "same_batch_on_all_ranks"]
)
def test_wrong_programs(pools, program):
    check_wrong(pools, program)
