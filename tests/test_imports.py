"""Imports go one way, as CONTRIBUTING.md says."""

import ast
import re

import pytest

from tests.cases import ROOT

ROOMS = {  # package -> our packages that it may import besides its own modules
    "recipes": (),
    "docs.rosetta": (),
    "harness.start": (),
    "harness.plan": (),
    "harness.pool": ("harness.start",),
    "harness.measure": ("harness.start",),
    "harness.report": ("harness.start", "harness.pool", "harness.measure"),
    "harness.shell": ("harness.start", "harness.pool", "harness.measure", "harness.report"),
    "harness.explore": ("harness.start", "harness.pool", "harness.measure", "harness.report"),
    "harness": ("harness",),  # __main__.py, which launch.sh runs, and testing.py, for tests of users
    "tests.cases": ("harness",),
    "tests": ("harness", "tests.cases"),
    "benchmarks": ("harness", "tests.cases"),
}
TOPS = {room.split(".")[0] for room in ROOMS}
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for top in TOPS for path in (ROOT / top).rglob("*.py")}


def room_of(module):
    """The innermost package of ROOMS that has this module, "" if it is not ours."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default="")


def imported(source):
    """The names that a file imports, such as tests.jobs or tests.jobs.Run."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


def wrong(room, source):
    """The imports that a file of a room must not have."""
    for name in imported(source):
        imported_room = room_of(name)
        allowed = imported_room in ("", room) or any(f"{imported_room}.".startswith(f"{r}.") for r in ROOMS[room])
        if not allowed or name.startswith(".") or re.search(r"\.test_\w+(\.|$)", name):
            yield name


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may_know(room):
    sources = {path: source for path, source in SOURCES.items() if room_of(path[:-3].replace("/", ".")) == room}
    violations = {path: list(wrong(room, source)) for path, source in sources.items()}
    assert sources and not {path: names for path, names in violations.items() if names}


@pytest.mark.parametrize(
    "room, line, name",
    [
        ("tests", "from benchmarks import mutate", "benchmarks.mutate"),
        ("tests", "from tests.test_gpt import GPT", "tests.test_gpt.GPT"),
        ("benchmarks", "from tests.jobs import launch", "tests.jobs.launch"),
        ("benchmarks", "import tests.pools", "tests.pools"),
        ("harness.start", "from harness import pool", "harness.pool"),
        ("recipes", "from harness.measure.sbp import NAMES", "harness.measure.sbp.NAMES"),
        ("docs.rosetta", "from recipes.memory import fully_sharded", "recipes.memory.fully_sharded"),
    ],
)
def test_other_imports_are_found(room, line, name):
    assert list(wrong(room, f"def late():\n    {line}\n")) == [name]
