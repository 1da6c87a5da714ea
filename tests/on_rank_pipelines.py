"""What the tests of the pipeline chapter call on the ranks of a pool; it runs there, beside OneFlow."""

from oneflow_cookbook.start import recipe


def tables(path, name, sizes):
    """What the function `name` of the recipe returns for each of these lists of arguments."""
    make = getattr(recipe.load(path), name)
    return [make(*arguments) for arguments in sizes]
