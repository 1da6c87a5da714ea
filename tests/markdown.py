"""Read the pages: code blocks, tables, headings, and the sections on recipes in the chapters."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.cases import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
INDEX = ROOT / "recipes" / "README.md"  # and chapter 1
FOLDERS = ("training", "layouts", "memory", "pipelines", "transformer")  # chapters 2 to 6
FOLDERS += ("your_model", "by_hand", "data_and_state", "starting")
CHAPTERS = (INDEX, *(ROOT / "recipes" / folder / "README.md" for folder in FOLDERS))  # with a section for each recipe
COSTS = ROOT / "docs" / "costs.md"  # chapter 7
CLUSTERS = ROOT / "docs" / "clusters.md"


def blocks(path, language):
    """The code blocks of a page in one language."""
    return blocks_of(path.read_text(), language)


def blocks_of(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands_of(block):
    """The commands of a code block, those that a backslash breaks as one line."""
    return re.sub(r"\\\n +", "", block).splitlines()


def headings(path):
    """The headings of a page in order, as a reader sees them: without marks and the targets of links."""
    lines = re.sub("^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [without_targets(heading) for heading in re.findall("^#+ (.+)$", lines, flags=re.MULTILINE)]


def without_targets(text):
    """A text without the targets of its links and the paths of its pictures."""
    return re.sub(r'\[((?:[^][]|\[[^][]*])+)]\([^)]+\)|(?:src|srcset)="[^"]+"', r"\1", text)


def slug(heading):
    """The anchor of a heading, as GitHub and GitLab make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def tables(path):
    """The rows of all tables of a page, as lists of cells."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@dataclass
class Section:
    """What a chapter says of a recipe."""

    title: str
    path: Path  # of the recipe
    text: str  # what is below the heading

    @property
    def recipe(self):
        return self.path.stem


@lru_cache(maxsize=None)
def sections(page):
    """The recipes of a chapter, in order."""
    pattern = r"^### \[([^\n]+)]\((\S+\.py)\)\n(.*?)(?=^##|\Z)"
    matches = re.findall(pattern, page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return tuple(Section(title, (page.parent / link).resolve(), text) for title, link, text in matches)


def in_chinese(page):
    return page.with_name(f"{page.stem}.zh-CN.md")


COMMANDS = [line for block in blocks(ENGLISH, "bash") for line in commands_of(block)]
[MATMULS] = [block for block in blocks(ENGLISH, "text") if "partial_sum" in block]  # what the README's program prints
BY_HAND = [line for block in blocks(CLUSTERS, "sh") for line in commands_of(block)]
