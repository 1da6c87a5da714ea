"""Imports go one way, as CONTRIBUTING.md says, and each folder needs only the packages that are listed here."""

import ast
import importlib.util
import re
import sys
import sysconfig

import pytest

from tests.cases import ROOT

MEASURING = ("oneflow_cookbook.start", "oneflow_cookbook.pool", "oneflow_cookbook.measure", "numpy", "oneflow")
TESTING = ("oneflow_cookbook", "tests.cases", "numpy", "oneflow", "torch", "jax", "pytest")
LAYOUTS = ("tensor_parallel", "pipeline", "fully_sharded")  # their modules share a file
# package -> packages that it may import besides its own modules and the standard library
ALLOWED_IMPORTS = {
    "recipes": ("numpy", "oneflow"),
    **{f"recipes.your_model.{layout}_module": ("numpy", "oneflow", "graph_safe") for layout in LAYOUTS},
    "docs.rosetta.pytorch": ("numpy", "torch"),
    "docs.rosetta.jax": ("numpy", "jax"),
    "docs.rosetta.differences": ("numpy", "oneflow", "torch", "jax"),
    "oneflow_cookbook.start": (),
    "oneflow_cookbook.plan": (),
    "oneflow_cookbook.pool": ("oneflow_cookbook.start", "oneflow"),
    "oneflow_cookbook.measure": ("oneflow_cookbook.start", "numpy", "oneflow"),
    "oneflow_cookbook.report": (*MEASURING, "rich"),
    "oneflow_cookbook.shell": (*MEASURING, "oneflow_cookbook.report", "rich"),
    "oneflow_cookbook.verify": MEASURING,
    "oneflow_cookbook.explore": (*MEASURING, "oneflow_cookbook.report"),
    "oneflow_cookbook": ("oneflow_cookbook", "numpy", "oneflow", "pytest"),  # testing.py, for tests of users
    "harness": ("oneflow_cookbook", "pytest"),  # __main__.py, for launch.sh
    "tests.cases": ("oneflow_cookbook", "numpy"),
    "tests": (*TESTING, "packaging", "rich", "selenium"),
    # the peers import each other from their folder
    "benchmarks": (*TESTING, "peer_gpt_jax", "peer_gpt_torch", "safetensors", "transformers"),
}
TOPS = ("recipes", "harness", "tests", "benchmarks", "docs")
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for top in TOPS for path in (ROOT / top).rglob("*.py")}


def module_of(path):
    """The name of the module in a file."""
    return path[: -len(".py")].replace("/", ".").replace("harness.oneflow_cookbook", "oneflow_cookbook")


def package_of(module):
    """The innermost package of ALLOWED_IMPORTS that has this module, "" if it is not ours."""
    return max((package for package in ALLOWED_IMPORTS if f"{module}.".startswith(f"{package}.")), key=len, default="")


def imported(source):
    """The names that a file imports, such as tests.jobs or tests.jobs.Run."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


def wrong(package, source):
    """The imports that a file of a package must not have."""
    for name in imported(source):
        is_allowed = package_of(name) == package or any(
            f"{name}.".startswith(f"{known}.") for known in ALLOWED_IMPORTS[package]
        )
        is_private = name.startswith(".") or re.search(r"\.test_\w+(\.|$)", name)
        if is_private or not (is_allowed or in_standard_library(name.split(".")[0])):
            yield name


def in_standard_library(module):
    if module in sys.builtin_module_names:
        return True
    spec = importlib.util.find_spec(module)
    return spec is not None and (spec.origin or "").startswith(f"{sysconfig.get_path('stdlib')}/")


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_package_imports_only_what_is_allowed(package):
    sources = {path: source for path, source in SOURCES.items() if package_of(module_of(path)) == package}
    violations = {path: list(wrong(package, source)) for path, source in sources.items()}
    assert sources and not {path: names for path, names in violations.items() if names}


@pytest.mark.parametrize("top", ["recipes", "harness"])
def test_text_files_are_read_and_written_as_utf_8_under_any_locale(top):
    texts = re.compile(r"^.*((?<![\w.])open|\.(read|write)_text)\(.*$", re.MULTILINE)
    sources = [source for path, source in SOURCES.items() if path.startswith(f"{top}/")]
    lines = [line[0] for source in sources for line in texts.finditer(source)]
    assert lines and not [line for line in lines if not re.search(r'utf-8|"[rwa]\+?b"', line)]
