"""The guides in Chinese have the code and outputs of the English ones, and say which links lead to English pages."""

import re

import pytest

from tests.cases import ROOT

NAMES = ("choosing", "your-model")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_code_and_outputs_are_equal_in_both_languages(name):
    english, chinese = FENCE.findall(read(name)), FENCE.findall(read(f"{name}.zh-CN"))
    assert len(english) > 6 and english == chinese


@pytest.mark.parametrize("name", NAMES)
def test_chinese_page_marks_links_to_english_pages(name):
    links = re.findall(r"\[([^]]+)]\(([^):#]+\.md)[^)]*\)(（英文）)?", read(f"{name}.zh-CN"))
    marks = {(words, target): mark for words, target, mark in links if words != "English"}
    assert any(marks.values())
    for (words, target), mark in marks.items():
        assert bool(mark) != target.endswith(".zh-CN.md"), (words, target)
