"""`launch.sh verify` on a right and a wrong program; all others are in tests/slow/test_verify_programs.py."""

from oneflow_cookbook.start.recipe import path_of
from tests.cases.verifying import check_right, check_wrong


def test_right_recipe(pools):
    check_right(pools, "-n", 4, path_of("hybrid_parallel"))


def test_wrong_program(pools):
    check_wrong(pools, "divided_by_ranks")
