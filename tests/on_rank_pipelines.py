"""What the tests of the pipeline chapter call on the ranks of a pool; it runs there, beside OneFlow."""

import inspect

from harness.start import recipe


def tables(path, function, sizes):
    """What a function of the recipe returns for each of these lists of arguments."""
    make = getattr(recipe.load(path), function)
    return [make(*arguments) for arguments in sizes]


def source(path, name):
    """The source of a function of the recipe."""
    return inspect.getsource(getattr(recipe.load(path), name))
