"""The pages are true in both languages: commands and code run, and links lead somewhere."""

import ast
import re

import pytest

from oneflow_cookbook.start.recipe import all_paths, path_of
from tests.cases import CASES, ROOT
from tests.jobs import LAUNCH, Run
from tests.markdown import (
    CHAPTERS,
    COMMANDS,
    COSTS,
    ENGLISH,
    INDEX,
    MATMULS,
    blocks,
    headings,
    in_chinese,
    sections,
    slug,
    tables,
    without_targets,
)

PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.md"), *(ROOT / "docs").glob("*.md")})
# Each page in Chinese -> the same in English.
ENGLISH_OF = {page: page.with_name(page.name.replace(".zh-CN", "")) for page in PAGES if ".zh-CN" in page.name}
EVERY_PAIR = ("sbp_conversions", "cross_placement", "matmul_signatures")  # of SBPs: each sends something else
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


def test_official_command_is_the_one_that_is_tested():
    assert ".venv/bin/python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_parallel.py" in COMMANDS


@pytest.mark.parametrize("path", all_paths(), ids=lambda path: path.stem)
def test_recipe_has_a_section_in_one_chapter_and_its_docstring_in_the_index(path):
    name, words = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0].split(": ", 1)
    for chapters in (CHAPTERS, map(in_chinese, CHAPTERS)):
        found = [section for page in chapters for section in sections(page) if section.path == path]
        assert len(found) == 1, f"the chapters have {len(found)} sections on {path.stem}"
    [section] = [section for page in CHAPTERS for section in sections(page) if section.path == path]
    assert section.title == name, f"the heading must be the docstring's first words, {name}"
    command_and_output = rf"```bash\n[^`]*\b{path.stem}\b[^`]*```\n\n```text"
    assert re.search(command_and_output, section.text), "the section needs a command of this recipe and its output"
    line = f"- [{path.stem}]({path.relative_to(INDEX.parent)}): {words}"
    is_listed = line in INDEX.read_text().splitlines()
    assert is_listed, f"recipes/README.md, All recipes, needs the line {line}"
    begin = line.partition(": ")[0]
    assert re.search(f"^{re.escape(begin)}[：:]", in_chinese(INDEX).read_text(), flags=re.MULTILINE)


def test_index_has_the_recipes_in_the_order_of_the_chapters():
    for index, chapters in ((INDEX, CHAPTERS), (in_chinese(INDEX), map(in_chinese, CHAPTERS))):
        links = re.findall(r"^- \[\w+]\((\S+\.py)\)", index.read_text(), flags=re.MULTILINE)
        paths = [section.path for page in chapters for section in sections(page)]
        assert [(index.parent / link).resolve() for link in links] == paths


def test_path_is_in_both_languages():
    assert all(in_chinese(page).exists() for page in (ENGLISH, *CHAPTERS, COSTS))


@pytest.mark.parametrize("name", [name for name in CASES if name not in EVERY_PAIR])
def test_docstring_says_where_nothing_moves(name):
    case = CASES[name](4)
    docstring = ast.get_docstring(ast.parse(path_of(name).read_text()))
    says_nothing = re.search(r"^Moves: nothing[,:;.]", docstring, flags=re.MULTILINE) is not None
    assert says_nothing == (case.sends is not None and not any(case.sends))


# What does not change in a translation. 2-D is a word in Chinese.
CODE = re.compile(r"`[^`]*`|²|\w+\.py|[@=→]|\*\*\d|\d(?:[\d.]*\d)?(?!-D)|\b[BP]\b")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def codes(page):
    """The code and numbers of each section of a page; in docs/, where 1.3 billion is 13 亿 in prose, of each row."""
    sections = re.split("^##+ ", page.read_text(), flags=re.MULTILINE)
    if page.parent == ROOT / "docs":
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
