"""The main of every recipe can fail, hands on its options, prints correct figures, and refuses what does not work."""

import pytest

from oneflow_cookbook.start.recipe import path_of, world_sizes
from tests.cases import mains

QUICK = ("data_parallel", "train_pipeline")  # in the default suite: a forward pass, and training
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in mains.NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_main_fails_if_a_result_is_off_and_hands_on_its_options(pools, name):
    for graph in mains.modes(name):
        mains.check_main(pools, path_of(name), name, graph)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in mains.NAMES if mains.lines_that_refuse(name, path_of(name).read_text())]
)
def test_every_refusal_is_reached(pools, name):
    mains.check_refusals(pools, path_of(name), name)


@pytest.mark.parametrize("name", mains.NAMES)
def test_recipe_takes_the_numbers_of_ranks_that_its_sizes_allow(name):
    taken = tuple(world_sizes(path_of(name)))
    if name in mains.WORLD_SIZES:
        assert taken == tuple(mains.WORLD_SIZES[name])
    else:
        words = f"{name} takes {taken} ranks, and not 2, 3 and 4: say why in TAKEN of tests/cases/mains.py"
        assert {2, 3, 4} <= set(taken), words
