"""Read the pages of the cookbook: their code blocks, tables and headings."""

import re

from tests.cases import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "docs" / "README.zh-CN.md"
GALLERY, CHINESE_GALLERY = ROOT / "recipes" / "README.md", ROOT / "recipes" / "README.zh-CN.md"
CLUSTERS = ROOT / "docs" / "clusters.md"


def blocks(path, language):
    """The code blocks of a page in one language."""
    return blocks_of(path.read_text(), language)


def blocks_of(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def slug(heading):
    """The name by which a heading can be linked to, as GitHub and GitLab make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def tables(path):
    """The rows of all tables of a page, as lists of cells."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


COMMANDS = [line for block in blocks(ENGLISH, "bash") for line in block.splitlines()]
BY_HAND = [line for block in blocks(CLUSTERS, "sh") for line in block.splitlines()]
