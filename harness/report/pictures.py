"""The pictures of the docs: which there are, from which runs each is drawn, and how a page shows one."""

import ast
from functools import partial
from pathlib import Path

from harness.report import equation
from harness.report.svg import THEMES
from harness.start import recipe

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
LEDGER = str(recipe.HARNESS / "measure" / "ledger.py") + ":measure"
EQUATIONS = ("data_parallel", "model_parallel", "row_parallel", "pipeline_parallel", "hybrid_parallel", "two_d_sbp")
EQUATIONS += ("train_model_parallel",)
NAMES = EQUATIONS


def example(pool, name):
    """The ledger of a recipe at its own sizes, which are small enough to draw each number of a tensor; one step."""
    path = recipe.path_of(name)
    given = {"graph": False, **({"steps": 1} if "steps" in recipe.entry(path) else {})}
    return pool.call(LEDGER, path=str(path), **given)


def calls():
    """What is measured for the pictures besides what the atlas needs: key -> (number of ranks, function of a pool)."""
    found = {}
    for name in EQUATIONS:
        found["example", name] = (recipe.world_sizes(recipe.path_of(name))[0], partial(example, name=name))
    return found


def drawn(own, runs):
    """Each picture by its name. own: the results of `calls`; runs: the ledgers of the recipes at large sizes."""
    return {name: equation.picture(title_of(name), own["example", name], runs[name]["eager"]) for name in EQUATIONS}


def made(own, runs):
    """Every file of a picture: path -> text."""
    pictures = drawn(own, runs)
    return {
        PICTURES / f"{name}{theme}.svg": picture.svg(theme) for name, picture in pictures.items() for theme in THEMES
    }


def title_of(name):
    """The first line of a recipe's docstring."""
    return ast.get_docstring(ast.parse(recipe.path_of(name).read_text())).split("\n")[0]


def shown(name, words, folder):
    """How a page shows a picture, light or dark as the reader's page is; words: what it says, for who cannot see it."""
    light = f"{folder}/{name}"
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{light}-dark.svg">'
    return f'<picture>\n  {dark}\n  <img alt="{words}" src="{light}.svg">\n</picture>'
