"""Read the pages of the cookbook: their code blocks, tables and headings, and what the gallery says of each recipe."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.cases import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
GALLERY, CHINESE_GALLERY = ROOT / "recipes" / "README.md", ROOT / "recipes" / "README.zh-CN.md"
CLUSTERS = ROOT / "docs" / "clusters.md"


def blocks(path, language):
    """The code blocks of a page in one language."""
    return blocks_of(path.read_text(), language)


def blocks_of(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def headings(path):
    """The headings of a page in order, without their marks; those of links are what can be read of them."""
    lines = re.sub("^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [without_targets(heading) for heading in re.findall("^#+ (.+)$", lines, flags=re.MULTILINE)]


def without_targets(text):
    """A text with [words] in place of each link, and no paths of pictures: what a reader sees."""
    return re.sub(r'\[((?:[^][]|\[[^][]*])+)]\([^)]+\)|(?:src|srcset)="[^"]+"', r"\1", text)


def slug(heading):
    """The name by which a heading can be linked to, as GitHub and GitLab make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def tables(path):
    """The rows of all tables of a page, as lists of cells."""
    return tables_of(path.read_text())


def tables_of(text):
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def chapter(path, title):
    """What a page has between this heading, of two marks, and the next one."""
    return chapters(path)[headings_of_chapters(path).index(title) + 1]


def chapters(path):
    """The texts of a page between its headings of two marks; the first is what comes before them."""
    return re.split("^## .+$", path.read_text(), flags=re.MULTILINE)


def headings_of_chapters(path):
    return re.findall("^## (.+)$", path.read_text(), flags=re.MULTILINE)


@dataclass
class Section:
    """What the gallery says of a recipe."""

    title: str
    recipe: str  # the name of its file
    path: Path
    text: str  # what is below the heading

    @property
    def moves(self):
        """What is sent."""
        [moves] = re.findall(r"^\*\*[^*]+\*\* (.+(?:\n.+)*)", self.text, flags=re.MULTILINE)
        return " ".join(moves.split())

    @property
    def command(self):
        [block] = blocks_of(self.text, "bash")
        return block.strip()

    @property
    def output(self):
        """The lines that the page shows of what the command prints."""
        [block] = blocks_of(self.text, "text")
        return block.splitlines()


def sections(page):
    """The recipes of a page, in order."""
    found = re.findall(r"^### \[([^\n]+)]\((\S+)\)\n(.*?)(?=^##|\Z)", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    paths = [(page.parent / link).resolve() for _, link, _ in found]
    return [Section(title, path.stem, path, text) for (title, _, text), path in zip(found, paths)]


COMMANDS = [line for block in blocks(ENGLISH, "bash") for line in block.splitlines()]
BY_HAND = [line for block in blocks(CLUSTERS, "sh") for line in block.splitlines()]
