"""The pages are true in both languages: commands and code run, and links lead somewhere."""

import ast
import re

import pytest

from oneflow_cookbook.start.recipe import all_paths
from tests.cases import CASES, ROOT
from tests.jobs import LAUNCH, Run
from tests.markdown import (
    CHINESE,
    CHINESE_GALLERY,
    COMMANDS,
    ENGLISH,
    GALLERY,
    MATMULS,
    blocks,
    headings,
    sections,
    slug,
    tables,
    without_targets,
)

PAGES = sorted({*ROOT.glob("*.md"), GALLERY, CHINESE_GALLERY, *(ROOT / "docs").glob("*.md")})
# Each page in Chinese -> the same in English.
ENGLISH_OF = {page: page.with_name(page.name.replace(".zh-CN", "")) for page in PAGES if ".zh-CN" in page.name}
EVERY_PAIR = ("sbp_conversions", "cross_placement", "matmul_signatures")  # of SBPs: their sections name no move
OTHER_TESTS_RUN = ("./launch.sh test", ".venv/bin/python -m oneflow.distributed.launch")


@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith(OTHER_TESTS_RUN)])
def test_command_runs(command):
    job = Run("bash", "-c", command, cwd=ROOT).wait()
    assert job.code == 0 and job.out and not job.err, job.err
    shown = dict(zip((COMMANDS[0], "./launch.sh show recipes/row_parallel.py"), blocks(ENGLISH, "text"))).get(command)
    if shown:
        assert shown in job.out or sorted(shown.splitlines()) == sorted(job.out.splitlines())  # ranks in any order


def test_program_prints_what_the_page_shows(tmp_path):
    [program] = blocks(ENGLISH, "python")
    (tmp_path / "layouts.py").write_text(program)
    assert "run `./launch.sh -n 2 layouts.py`" in ENGLISH.read_text()
    job = Run(LAUNCH, "-n", 2, "layouts.py", cwd=tmp_path).wait()
    by_rank = sorted(job.out.splitlines(), key=lambda line: line[:3])  # each rank's lines keep their order
    assert by_rank == MATMULS.splitlines(), job.err


def test_lines_of_the_course_print_what_their_comments_say(tmp_path):
    [program] = blocks(GALLERY, "python")
    (tmp_path / "lines.py").write_text(program)
    job = Run(LAUNCH, "-n", 2, "lines.py", cwd=tmp_path).wait()
    comments = re.findall(r"^print.*  # ([^:\n]+)", program, flags=re.MULTILINE)
    assert comments and "run `./launch.sh -n 2 lines.py`" in GALLERY.read_text()
    assert sorted(job.out.splitlines()) == sorted(f"[{rank}] {line}" for rank in (0, 1) for line in comments), job.err


def test_official_command_is_the_one_that_is_tested():
    assert ".venv/bin/python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_parallel.py" in COMMANDS


@pytest.mark.parametrize("path", all_paths(), ids=lambda path: path.stem)
def test_guide_has_a_section_for_each_recipe_that_begins_with_the_docstring(path):
    for page in (GALLERY, CHINESE_GALLERY):
        number = sum(section.path == path for section in sections(page))
        assert number == 1, f"{page.relative_to(ROOT)} has {number} sections on {path.stem}"
    [section] = [section for section in sections(GALLERY) if section.path == path]
    name, words = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0].split(": ", 1)
    first_paragraph = section.text.strip().split("\n\n")[0].replace("\n", " ")
    words = f"{words[0].upper()}{words[1:]}"
    begins = f"{first_paragraph[0].upper()}{first_paragraph[1:]} ".startswith(f"{words} ")
    assert section.title == name, f"the heading must be the docstring's first words, {name}"
    assert begins, f"recipes/README.md: the section on {path.stem} must begin with its docstring's first line: {words}"
    assert section.command.startswith("./launch.sh ") and f" {section.recipe}" in section.command
    assert section.output and section.moves


@pytest.mark.parametrize("name", [name for name in CASES if name not in EVERY_PAIR])
def test_gallery_says_where_nothing_moves(name):
    [section] = [section for section in sections(GALLERY) if section.recipe == name]
    case = CASES[name](4)
    assert (section.moves == "nothing") == (case.sends is not None and not any(case.sends)), section.moves


# What does not change in a translation. 2-D is a word in Chinese.
CODE = re.compile(r"`[^`]*`|²|\w+\.py|[@=→]|\*\*\d|\d(?:[\d.]*\d)?(?!-D)|\b[BP]\b")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def codes(page):
    """The code and numbers of each section of a page; of a guide, in whose prose 1.3 billion is 13 亿, of each row."""
    sections = re.split("^##+ ", page.read_text(), flags=re.MULTILINE)
    if page not in (ENGLISH, CHINESE, GALLERY, CHINESE_GALLERY):
        sections = [f"{len(sections)} sections", *map(" | ".join, tables(page))]
    return [sorted(CODE.findall(without_targets(section))) for section in sections]  # in any order of words


@pytest.mark.parametrize("chinese", ENGLISH_OF, ids=lambda page: str(page.relative_to(ROOT)))
def test_both_languages_have_the_same_code_and_numbers(chinese):
    english = ENGLISH_OF[chinese]
    assert FENCE.findall(chinese.read_text()) == FENCE.findall(english.read_text())
    assert codes(chinese) == codes(english)
    assert [section.path for section in sections(chinese)] == [section.path for section in sections(english)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://") or "/actions/" in target:  # of the web, or of the repository's host
            continue
        name, _, anchor = target.partition("#")
        destination = page.parent / name if name else page
        assert destination.exists(), target
        assert not anchor or list(map(slug, headings(destination))).count(anchor) == 1, target
