"""The pages of docs/rosetta show lines of the twins and of the recipes."""

import re

import pytest

from tests.cases import ROOT

PAGES = [ROOT / "docs" / name for name in ("rosetta.md", "rosetta.zh-CN.md")]
FILES = sorted((ROOT / "docs" / "rosetta").rglob("*.py"))
BLOCK = re.compile(r"\[\w+\.py]\((\S+\.py)\)[:：]\n\n```python\n(.*?)```", flags=re.DOTALL)
BLOCKS = BLOCK.findall(PAGES[0].read_text())


@pytest.mark.parametrize("link, block", BLOCKS, ids=[link for link, _ in BLOCKS])
def test_page_shows_lines_of_the_file(link, block):
    lines = [line.strip() for line in (PAGES[0].parent / link).read_text().splitlines()]
    assert not [line for line in block.splitlines() if line.strip() not in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_has_its_file_and_every_file_its_link(page):
    text = page.read_text()
    assert BLOCK.findall(text) == BLOCKS and text.count("```python") == len(BLOCKS)
    assert all(f"]({path.relative_to(page.parent)})" in text for path in FILES)
