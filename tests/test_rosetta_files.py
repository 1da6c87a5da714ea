"""The twins of docs/rosetta need nothing of ours, and the pages show lines of theirs and of the recipes."""

import ast
import re

import pytest

from tests.cases import ROOT

PAGES = [ROOT / "docs" / name for name in ("rosetta.md", "rosetta.zh-CN.md")]
FILES = sorted((ROOT / "docs" / "rosetta").rglob("*.py"))
THEIRS = {"pytorch": {"torch"}, "jax": {"jax"}, "differences": {"oneflow", "torch", "jax"}}
BLOCK = re.compile(r"\[\w+\.py]\((\S+\.py)\)[:：]\n\n```python\n(.*?)```", flags=re.DOTALL)
BLOCKS = BLOCK.findall(PAGES[0].read_text())


def imported(path):
    """The packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_file_imports_its_framework_and_numpy(path):
    assert set(imported(path)) <= THEIRS[path.parent.name] | {"numpy", "functools", "pathlib", "shutil", "tempfile"}


@pytest.mark.parametrize("link, block", BLOCKS, ids=[link for link, _ in BLOCKS])
def test_page_shows_lines_of_the_file(link, block):
    lines = [line.strip() for line in (PAGES[0].parent / link).read_text().splitlines()]
    assert not [line for line in block.splitlines() if line.strip() not in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_has_its_file_and_every_file_its_link(page):
    text = page.read_text()
    assert BLOCK.findall(text) == BLOCKS and text.count("```python") == len(BLOCKS)
    assert all(f"]({path.relative_to(page.parent)})" in text for path in FILES)
