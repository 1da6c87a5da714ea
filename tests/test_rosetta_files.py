"""The pages of docs/rosetta show code of the twins and of the recipes."""

import ast
import re
import textwrap

import pytest

from tests.cases import ROOT

PAGES = [ROOT / "docs" / name for name in ("rosetta.md", "rosetta.zh-CN.md")]
FILES = sorted((ROOT / "docs" / "rosetta").rglob("*.py"))
BLOCK = re.compile(r"\[\w+\.py]\((\S+\.py)\)[:：]\n\n```python\n(.*?)```", flags=re.DOTALL)
BLOCKS = BLOCK.findall(PAGES[0].read_text())


def of_file(text):
    """{name: source} of what the file defines at its top level, without empty lines."""
    lines, sources = text.splitlines(), {}
    for node in ast.parse(text).body:
        name = getattr(node, "name", None) or getattr(getattr(node, "targets", [None])[0], "id", None)
        sources[name] = "\n".join(filter(None, lines[node.lineno - 1 : node.end_lineno]))
    return sources


@pytest.mark.parametrize("link, block", BLOCKS, ids=[link for link, _ in BLOCKS])
def test_page_shows_whole_functions_and_lines_of_a_longer_one(link, block):
    sources = of_file((PAGES[0].parent / link).read_text())
    definitions, *parts = re.split(r"^# in (\w+)\n", block, flags=re.MULTILINE)
    for whole in filter(None, re.split(r"\n\n(?=\w)", definitions.strip())):
        assert re.sub(r"\n+", "\n", whole) in sources.values()
    for name, lines in zip(parts[::2], parts[1::2]):
        for piece in lines.strip("\n").split("\n\n"):
            assert any(textwrap.indent(piece, " " * n) in sources[name] for n in (4, 8, 12)), piece


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_has_its_file_and_every_file_its_link(page):
    text = page.read_text()
    assert BLOCK.findall(text) == BLOCKS and text.count("```python") == len(BLOCKS)
    assert all(f"]({path.relative_to(page.parent)})" in text for path in FILES)
