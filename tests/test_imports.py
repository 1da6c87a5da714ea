"""Imports go one way, as CONTRIBUTING.md says, and each folder needs only the packages that are listed here."""

import ast
import importlib.util
import re
import sys
import sysconfig

import pytest

from tests.cases import ROOT

MEASURING = ("harness.start", "harness.pool", "harness.measure", "numpy", "oneflow")
TESTING = ("harness", "tests.cases", "numpy", "oneflow", "torch", "jax", "pytest")
# package -> packages that it may import besides its own modules and the standard library
ROOMS = {
    "recipes": ("numpy", "oneflow"),
    "docs.rosetta.pytorch": ("numpy", "torch"),
    "docs.rosetta.jax": ("numpy", "jax"),
    "docs.rosetta.differences": ("numpy", "oneflow", "torch", "jax"),
    "harness.start": (),
    "harness.plan": (),
    "harness.pool": ("harness.start", "oneflow"),
    "harness.measure": ("harness.start", "numpy", "oneflow"),
    "harness.report": (*MEASURING, "rich"),
    "harness.shell": (*MEASURING, "harness.report", "rich"),
    "harness.explore": (*MEASURING, "harness.report"),
    "harness": ("harness", "numpy", "oneflow", "pytest"),  # __main__.py for launch.sh, testing.py for tests of users
    "tests.cases": ("harness", "numpy"),
    "tests": (*TESTING, "packaging", "rich", "selenium"),
    # the peers import each other from their folder
    "benchmarks": (*TESTING, "peer_gpt_jax", "peer_gpt_torch", "safetensors", "transformers"),
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
        of_the_room = room_of(name) == room or any(f"{name}.".startswith(f"{known}.") for known in ROOMS[room])
        is_private = name.startswith(".") or re.search(r"\.test_\w+(\.|$)", name)
        if is_private or not (of_the_room or in_standard_library(name.split(".")[0])):
            yield name


def in_standard_library(module):
    if module in sys.builtin_module_names:
        return True
    spec = importlib.util.find_spec(module)
    return spec is not None and (spec.origin or "").startswith(f"{sysconfig.get_path('stdlib')}/")


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may_know(room):
    sources = {path: source for path, source in SOURCES.items() if room_of(path[:-3].replace("/", ".")) == room}
    violations = {path: list(wrong(room, source)) for path, source in sources.items()}
    assert sources and not {path: names for path, names in violations.items() if names}
