"""The text of the recipes: what their docstrings claim is so, they import nothing of ours, and they share one frame."""

import ast
import re
import sys

import pytest

from harness.recipe import world_sizes
from tests.cases import CASES, RECIPES
from tests.reference import split

FRAME = "# The lesson ends here."
ALLOWED = {"argparse", "inspect", "os", "sys", "numpy", "oneflow"}


def source(name):
    return (RECIPES / f"{name}.py").read_text()


def drawing(name):
    """The rows of the table in a docstring: (tensor, shape, one cell for each rank, SBP)."""
    for line in ast.get_docstring(ast.parse(source(name))).splitlines():
        row = re.match(r" +(\w+) +\((\d+), (\d+)\) +(\S.*)", line)
        if row:
            cells = re.split(r"  +", row.group(4).strip())
            yield row.group(1), (int(row.group(2)), int(row.group(3))), cells


def block(shape, sbp, ranks, rank):
    """What a rank holds, in the words of the docstrings."""
    if sbp == "local":
        return "whole, a local tensor"
    if rank not in ranks:
        return "nothing"
    if sbp == "B":
        return "whole"
    dim = int(sbp[2:-1])
    part = split(shape, dim, ranks.index(rank), len(ranks))[dim]
    word = ("row", "column")[dim]
    return f"{word} {part.start}" if part.stop - part.start == 1 else f"{word}s {part.start}-{part.stop - 1}"


@pytest.mark.parametrize("name", CASES)
def test_drawing_in_the_docstring_is_the_layout(name):
    n = world_sizes(RECIPES / f"{name}.py")[0]
    case = CASES[name](n)
    rows = list(drawing(name))
    assert [tensor for tensor, _, _ in rows] == list(case.layout)[: case.drawn or None]
    for tensor, shape, cells in rows:
        sbp, ranks = case.layout[tensor]
        assert shape == case.values[tensor].exact.shape
        if sbp != "local":
            assert cells.pop() == sbp
        if sbp == "P":
            inner = [split((5,), 0, rank, n)[0] for rank in range(n)]
            assert cells == [f"x[:, {s.start}:{s.stop}] @ w[{s.start}:{s.stop}]" for s in inner]
        else:
            assert cells == [block(shape, sbp, ranks, rank) for rank in range(n)]


@pytest.mark.parametrize("name", CASES)
def test_docstring_answers_the_questions_of_a_reader(name):
    lines = ast.get_docstring(ast.parse(source(name))).splitlines()
    assert lines[0].endswith(".") and not lines[1]
    for begin in ("Moves: ", f"Run:   ./launch.sh recipes/{name}.py [--graph]", "Use it ", "Source: "):
        assert any(line.startswith(begin) for line in lines), begin
    assert any(line.endswith(f"recipes/{name}.py [--graph]") and "./launch.sh" not in line for line in lines)


@pytest.mark.parametrize("name", CASES)
def test_recipe_imports_nothing_of_ours(name):
    imported = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported == ALLOWED


def test_recipes_share_one_frame():
    frames = {name: source(name).split(FRAME)[1] for name in CASES}
    local = "def held(tensor):", "def refusal(args):"
    without_held = {
        name: re.sub(f"{re.escape(local[0])}.*?{re.escape(local[1])}", "", frames[name], flags=re.S) for name in frames
    }
    assert len(set(without_held.values())) == 1
    assert len({frames[name] for name in frames if name != "single_device"}) == 1
    heads = {source(name).split("import argparse")[1].split("WORLD_SIZES")[0] for name in CASES}
    assert len(heads) == 1


def test_allowed_imports_are_what_a_bare_python_and_the_requirements_have():
    standard = getattr(sys, "stdlib_module_names", ALLOWED)
    assert {name for name in ALLOWED if name not in standard} <= {"numpy", "oneflow"}
