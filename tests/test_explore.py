"""docs/explore.html is made of the files that are checked in, and needs no other."""

import re

from harness.explore import page, records

TEXT = page.PAGE.read_text()


def test_page_is_made_of_its_parts():
    made = page.page(records.PATH.read_text())
    assert made == TEXT, "python -m harness.explore.page makes it anew"


def test_page_is_small_and_loads_nothing():
    assert len(TEXT.encode()) < 400_000
    assert "default-src 'none'" in TEXT  # a browser refuses what is not listed behind it
    assert re.findall(r"<(?:script|img|iframe)[^>]* src=|@import|url\((?!#)|<link[^>]* href=.(?!data:)", TEXT) == []


def test_links_lead_somewhere():
    names = re.findall(r'recipes: \["(.+?)"\]|"(\w+/\w+\.py)"', TEXT)
    paths = {path for pair in names for one in pair for path in one.split('", "') if path}
    pages = set(re.findall(r'"(?:\.\./)?[\w/.-]+\.md', TEXT))
    assert len(paths) >= 8 and len(pages) >= 4
    assert [path for path in paths if not (page.ROOT / "recipes" / path).exists()] == []
    assert [path for path in pages if not (page.PAGE.parent / path.strip('"')).exists()] == []
