"""The pages say what is true, in both languages: commands and code run, tables are those of the recipes."""

import ast
import re

import pytest

from harness.start.recipe import all_paths, path_of
from tests.cases import CASES, ONE_LAYER, ROOT, WITHOUT_CASE
from tests.jobs import LAUNCH, Run
from tests.markdown import (
    CHINESE,
    CHINESE_GALLERY,
    COMMANDS,
    ENGLISH,
    GALLERY,
    blocks,
    chapter,
    chapters,
    headings,
    headings_of_chapters,
    sections,
    slug,
    tables,
    tables_of,
    without_targets,
)

DOCS = ROOT / "docs"
PAIRS = {
    "README": (ENGLISH, CHINESE),
    "recipes": (GALLERY, CHINESE_GALLERY),
    "choosing": (DOCS / "choosing.md", DOCS / "choosing.zh-CN.md"),
    "your-model": (DOCS / "your-model.md", DOCS / "your-model.zh-CN.md"),
}
ENGLISH_OF = {chinese: english for english, chinese in PAIRS.values()}
PAGES = [ENGLISH, GALLERY, CHINESE_GALLERY, *sorted(DOCS.glob("*.md"))]
SBP = r"(?:S\(\d\)|B|P)"
ELSEWHERE = ("./launch.sh test", ".venv/bin/python -m oneflow.distributed.launch")  # what other tests run


@pytest.fixture
def mine(tmp_path):
    """The folder of a user who has saved the README's program as layouts.py."""
    [program] = blocks(ENGLISH, "python")
    (tmp_path / "layouts.py").write_text(program)
    return tmp_path


@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith(ELSEWHERE)])
def test_command_runs(command, mine):
    folder = mine if "layouts.py" in command else ROOT
    job = Run("bash", "-c", command.replace("./launch.sh", LAUNCH), cwd=folder).wait()
    assert job.code == 0 and job.out and not job.err, job.err
    if command == COMMANDS[0]:
        assert sorted(job.out.splitlines()) == sorted(blocks(ENGLISH, "text")[1].splitlines())  # ranks in any order


def test_program_prints_what_the_page_shows(mine):
    assert "run `./launch.sh -n 2 layouts.py`" in ENGLISH.read_text()
    job = Run(LAUNCH, "-n", 2, "layouts.py", cwd=mine).wait()
    by_rank = sorted(job.out.splitlines(), key=lambda line: line[:3])  # each rank's lines keep their order
    assert by_rank == blocks(ENGLISH, "text")[0].splitlines(), job.err


def test_lines_of_the_course_print_what_their_comments_say(tmp_path):
    [program] = blocks(GALLERY, "python")
    (tmp_path / "lines.py").write_text(program)
    job = Run(LAUNCH, "-n", 2, "lines.py", cwd=tmp_path).wait()
    said = re.findall(r"^print.*  # ([^:\n]+)", program, flags=re.MULTILINE)
    assert said and "run `./launch.sh -n 2 lines.py`" in GALLERY.read_text()
    assert sorted(job.out.splitlines()) == sorted(f"[{rank}] {line}" for rank in (0, 1) for line in said), job.err


def test_official_command_is_the_one_that_is_tested():
    assert ".venv/bin/python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_parallel.py" in COMMANDS


def test_readme_lists_every_recipe_with_its_first_line():
    """The README of the recipes, as headings and what is below them."""
    found = {section.path: section for section in sections(GALLERY)}
    assert len(found) == len(sections(GALLERY)) == len(all_paths()) == len([*CASES, *WITHOUT_CASE])
    for path in map(path_of, [*CASES, *WITHOUT_CASE]):
        strategy, words = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0].split(": ", 1)
        first_paragraph = found[path].text.strip().split("\n\n")[0].replace("\n", " ")
        assert found[path].title == strategy
        assert first_paragraph.startswith((f"{words} ", f"{words[0].upper()}{words[1:]} ")), first_paragraph


def layouts_in(text):
    """name -> SBP of a line such as: x (S(0), B) @ w (B, S(1)), old local, new w0 grad S(0)."""
    name = r"((?:new )?[\w.]*[\w](?: grad| exp_avg)?)"
    pairs = re.findall(rf"{name} (local\b|{SBP}(?![\w(])|\({SBP}(?:, {SBP})*\))", text, flags=re.ASCII)
    return {tensor: sbp[1:-1] if sbp.startswith("(") else sbp for tensor, sbp in pairs if tensor not in ("B", "P")}


def test_gallery_shows_the_layouts_of_the_cases():
    found = {section.recipe: section for section in sections(GALLERY)}
    for name, case in ((name, CASES[name](4)) for name in CASES):
        if found[name].layout.startswith("every pair"):
            continue
        shown = layouts_in(found[name].layout)
        assert shown and shown == {tensor: case.layout[tensor][0] for tensor in shown if tensor in case.layout}, name
        if {"x", "w"} <= {tensor.rstrip("0") for tensor in case.layout} and "losses" not in case.layout:
            assert {"x", "w", "out"} <= {tensor.rstrip("01") for tensor in shown}
        moves = found[name].moves
        assert (moves == "nothing") == (not (case.moves or case.sends)), (name, moves)


def test_gallery_shows_the_layouts_of_gpt():
    """By its own table: it has no case."""
    nodes = ast.parse(path_of("gpt").read_text()).body
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    [table] = [node.value for node in assigned if getattr(node.targets[0], "id", "") == "LAYOUT"]
    table = eval(compile(ast.Expression(table), "gpt.py", "eval"), {"B": "B", "S": lambda dim: f"S({dim})"})
    [shown] = [layouts_in(section.layout) for section in sections(GALLERY) if section.recipe == "gpt"]
    assert shown == {kind: ", ".join(sbps) for kind, sbps in table.items() if kind != "replicated"}


@pytest.mark.parametrize("page, title", [(GALLERY, "Contents"), (CHINESE_GALLERY, "目录")], ids=["english", "chinese"])
def test_contents_of_the_gallery_name_every_chapter_in_order(page, title):
    names = headings_of_chapters(page)
    following = names[names.index(title) + 1 :]
    links = re.findall(r"^- \[([^][]+)]\(#([^)]+)\)", chapter(page, title), flags=re.MULTILINE)
    assert links == [(name, slug(name)) for name in following]


@pytest.mark.parametrize("page", [GALLERY, CHINESE_GALLERY], ids=["english", "chinese"])
def test_every_recipe_of_the_gallery_has_a_command_and_its_output(page):
    for section in sections(page):
        assert f" {section.recipe}" in section.command and section.command.startswith("./launch.sh ")
        assert section.output and section.layout and section.moves


def test_every_topic_of_training_is_found_by_its_name_in_pytorch():
    text = chapter(GALLERY, "Coming from PyTorch")
    rows = dict(tables_of(text))
    for usual in (
        *("DistributedDataParallel", "nn.DataParallel", "FullyShardedDataParallel", "ZeRO", "DTensor", "Megatron"),
        *("pipelining", "gradient accumulation", "checkpoint.checkpoint", "DistributedSampler", "torchmetrics"),
        *("SyncBatchNorm", "manual_seed", "distributed.checkpoint", "parameter server", "asynchronous SGD", "ring"),
    ):
        assert any(usual in topic for topic in rows), usual
    recipes = {slug(section.title): section.recipe for section in sections(GALLERY)}
    linked = {recipes[anchor] for anchor in re.findall(r"\(#([^)]+)\)", text)}
    assert {*CASES, *WITHOUT_CASE} - set(ONE_LAYER) <= linked


CODE = re.compile(r"`[^`]*`|²|\w+\.py|[@=→]|\*\*\d|\d(?:[\d.]*\d)?(?!-D)")  # 2-D is a word in Chinese


@pytest.mark.parametrize("page", PAIRS)
def test_both_languages_agree(page):
    one_page, other_page = PAIRS[page]
    for language in ("bash", "sh", "text", "python"):
        assert blocks(one_page, language) == blocks(other_page, language)
    english, chinese = tables(one_page), tables(other_page)
    assert [len(row) for row in english] == [len(row) for row in chinese]
    for one, other in zip(english, chinese):
        for cell, translated in zip(one, other):
            found, theirs = (sorted(CODE.findall(without_targets(text))) for text in (cell, translated))
            assert found == theirs, (cell, translated)  # word order differs
    one_text, other_text = one_page.read_text(), other_page.read_text()
    assert one_text.count("\n## ") == other_text.count("\n## ")
    assert one_text.count("\n### ") == other_text.count("\n### ")


def test_both_languages_of_a_recipe_have_the_same_numbers_code_and_layouts():
    english, chinese = sections(GALLERY), sections(CHINESE_GALLERY)
    assert [section.path for section in english] == [section.path for section in chinese]
    code = re.compile(rf"{CODE.pattern}|\b[BP]\b")
    for one, other in zip(english, chinese):
        found, theirs = (sorted(code.findall(without_targets(section.text))) for section in (one, other))
        assert found == theirs, one.title
        assert layouts_in(one.layout) == layouts_in(other.layout), one.title
    for one, other in zip(chapters(GALLERY), chapters(CHINESE_GALLERY)):
        found, theirs = (sorted(code.findall(without_targets(text))) for text in (one, other))
        assert found == theirs, one.strip().split("\n")[0]


def links_of(path):
    """Those to files here, and to the web; not those to pages of the repository's host, such as its badges."""
    return [link for link in re.findall(r"]\(([^)]+)\)", path.read_text()) if "/actions/" not in link]


def destination(path, link):
    """What a link leads to: an address, or a page, the English one of two, and the number of its heading."""
    if link.startswith("https://"):
        return link
    name, _, anchor = link.partition("#")
    there = (path.parent / name).resolve() if name else path
    number = list(map(slug, headings(there))).index(anchor) if anchor else None
    return ENGLISH_OF.get(there, there), number


@pytest.mark.parametrize("page", PAIRS)
def test_both_languages_link_to_the_same(page):
    """In the same order, but for the links to each other."""
    each_other = (PAIRS[page][0], None)
    english, chinese = ([destination(path, link) for link in links_of(path)] for path in PAIRS[page])
    assert [link for link in english if link != each_other] == [link for link in chinese if link != each_other]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_page_links_back_and_on(path):
    top = path.read_text().split("\n")[2]
    home = "(README.zh-CN.md)" if path in ENGLISH_OF and path != CHINESE else "(../README.md)"
    assert home in top and ("(README.md)" in top or path.name.startswith("README")), top
    for name in re.findall(r"(?:^| · )\[中文]\(([^)]+)\)", top):
        assert ENGLISH_OF[(DOCS / name).resolve()] == path, "not this page in Chinese"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in links_of(path):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), target
        assert not anchor or anchor in map(slug, headings(there)), target


def test_headings_of_the_gallery_are_different_links():
    """GitHub adds -1 to the second of two that are alike."""
    for page in (GALLERY, CHINESE_GALLERY):
        slugs = list(map(slug, headings(page)))
        assert len(slugs) == len(set(slugs))


def test_pages_that_are_english_only_say_so_in_chinese():
    links = re.findall(r"\[[^][]+]\(([^)#]+\.md)[^)]*\)(（英文）)?", CHINESE_GALLERY.read_text())
    for target, mark in links:
        there = (CHINESE_GALLERY.parent / target).resolve()
        is_english = there not in ENGLISH_OF and there != GALLERY  # the link at the top is to the same page in English
        assert bool(mark) == is_english, target
