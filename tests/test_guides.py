"""The guides say the same in both languages: code and outputs are equal, and links inside a page lead to a heading."""

import re

import pytest

from tests.cases import ROOT
from tests.markdown import slug

NAMES = ("choosing", "your-model")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(name, suffix=""):
    return (ROOT / "docs" / f"{name}{suffix}.md").read_text()


def both(name):
    return read(name), read(name, ".zh-CN")


def headings(text):
    """[(level, anchor)] of a page, below its title."""
    found = re.findall(r"^(##+) (.+)$", FENCE.sub("", text), flags=re.MULTILINE)
    return [(len(signs), slug(title)) for signs, title in found]


def targets(text):
    """Which heading each link inside the page leads to, in their order; ValueError if it leads nowhere."""
    anchors = [anchor for _, anchor in headings(text)]
    return [anchors.index(target) for target in re.findall(r'<a href="#([^"]+)">', FENCE.sub("", text))]


@pytest.mark.parametrize("name", NAMES)
def test_code_and_outputs_are_equal_in_both_languages(name):
    english, chinese = map(FENCE.findall, both(name))
    assert len(english) > 6 and english == chinese


@pytest.mark.parametrize("name", NAMES)
def test_headings_have_the_same_levels_in_both_languages(name):
    english, chinese = ([level for level, _ in headings(text)] for text in both(name))
    assert english == chinese


@pytest.mark.parametrize("name", NAMES)
def test_links_inside_a_page_lead_to_the_same_heading_in_both_languages(name):
    english, chinese = map(targets, both(name))
    assert english == chinese
    assert bool(english) == (name == "your-model")


@pytest.mark.parametrize("name", NAMES)
def test_chinese_page_marks_links_to_english_pages(name):
    links = re.findall(r"\[([^]]+)]\(([^):]+\.md)[^)]*\)(（英文）)?", read(name, ".zh-CN"))
    to_english = [(words, mark) for words, target, mark in links if not target.endswith(".zh-CN.md")]
    assert to_english and all(mark or words == "English" for words, mark in to_english), to_english
