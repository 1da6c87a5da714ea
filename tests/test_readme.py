"""The pages say what is true, in both languages: commands and code run, tables are those of the recipes."""

import ast
import re

import pytest

from harness.jobs.run import LAUNCH, Run
from harness.start.recipe import all_paths, path_of
from tests.cases import CASES, ONE_LAYER, ROOT, WITHOUT_CASE, is_default, runs
from tests.markdown import CHINESE, CHINESE_GALLERY, COMMANDS, ENGLISH, GALLERY, blocks, slug, tables

GLYPHS = {"▤": "S(0)", "▥": "S(1)", "■": "B", "▨": "P"}
PAIRS = {"README": (ENGLISH, CHINESE), "recipes": (GALLERY, CHINESE_GALLERY)}
PAGES = [*sum(PAIRS.values(), ()), *sorted((ROOT / "docs").glob("*.md"))]
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


def test_readme_counts_recipes_and_runs():
    recipes, runs_there = map(int, re.search(r"(\d+) recipes, (\d+) runs", ENGLISH.read_text()).groups())
    assert recipes == len(all_paths())
    assert runs_there == sum(map(is_default, runs()))


def test_official_command_is_the_one_that_is_tested():
    assert ".venv/bin/python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_parallel.py" in COMMANDS


def test_readme_lists_every_recipe_with_its_first_line():
    listed = re.findall(r"^- \[(.+?)]\((recipes/.+?)\): (.+)$", ENGLISH.read_text(), flags=re.MULTILINE)
    assert len(listed) == len(all_paths()) == len([*CASES, *WITHOUT_CASE])
    first_lines = {
        str(path_of(name).relative_to(ROOT)): ast.get_docstring(ast.parse(path_of(name).read_text())).split("\n")[0]
        for name in [*CASES, *WITHOUT_CASE]
    }
    assert {path: f"{strategy}: {words}" for strategy, path, words in listed} == first_lines


def test_gallery_shows_the_layouts_of_the_cases():
    rows = {re.search(r"\[(\w+)\.py]", row[0]).group(1): row for row in tables(GALLERY) if row[0].startswith("**[")}
    assert sorted(rows) == sorted([*CASES, *WITHOUT_CASE])
    for name, (link, layouts) in ((name, rows[name]) for name in CASES):
        [_, use], [what, moves] = link.split("<br>"), layouts.split("<br>")
        case = CASES[name](4)
        words = {"gradient", "gradients", "weights", "state", "chooses"}  # which are no names of tensors
        shown = {tensor: GLYPHS[glyph] for tensor, glyph in re.findall(r"(\w+) ([▤▥■▨])", what) if tensor not in words}
        wanted = {t: ("B" if sbp == "local" else sbp) for t, (sbp, _) in case.layout.items() if t in shown}
        assert shown == wanted
        if (
            {"x", "w"} <= {tensor.rstrip("0") for tensor in case.layout}
            and name != "two_d_sbp"
            and "losses" not in case.layout
        ):
            assert {"x", "w", "out"} <= {tensor.rstrip("01") for tensor in shown}
        assert moves.startswith("moves: ") and use.startswith("use it ")
        assert (moves == "moves: nothing") == (not (case.moves or case.sends) and name != "matmul_signatures")


def test_every_topic_of_training_is_found_by_its_name_in_pytorch():
    rows = {row[0]: re.findall(r"\[([\w.]+)]", row[1]) for row in tables(GALLERY) if not row[0].startswith("**[")}
    for usual in (
        *("DistributedDataParallel", "nn.DataParallel", "FullyShardedDataParallel", "ZeRO", "DTensor", "Megatron"),
        *("pipelining", "gradient accumulation", "checkpoint.checkpoint", "DistributedSampler", "torchmetrics"),
        *("SyncBatchNorm", "manual_seed", "distributed.checkpoint", "parameter server", "asynchronous SGD", "ring"),
    ):
        assert any(usual in topic for topic in rows), usual
    linked = {link for links in rows.values() for link in links}
    own_ways = {"auto_parallel.py"}  # PyTorch has no such thing
    assert {f"{name}.py" for name in {*CASES, *WITHOUT_CASE} - set(ONE_LAYER)} - own_ways <= linked


@pytest.mark.parametrize("page", PAIRS)
def test_both_languages_agree(page):
    one_page, other_page = PAIRS[page]
    for language in ("bash", "text", "python"):
        assert blocks(one_page, language) == blocks(other_page, language)
    english, chinese = tables(one_page), tables(other_page)
    assert [len(row) for row in english] == [len(row) for row in chinese]
    code = re.compile(r"`[^`]*`|\w+\.py|[▤▥■▨@=→]|\*\*\d|\d(?:[\d.]*\d)?")
    for one, other in zip(english, chinese):
        for cell, translated in zip(one, other):
            found, theirs = (sorted(code.findall(text)) for text in (cell, translated))  # word order differs
            assert found == theirs, (cell, translated)
    assert one_page.read_text().count("\n## ") == other_page.read_text().count("\n## ")


def links_of(path):
    """Those to files here, and to the web; not those to pages of the repository's host, such as its badges."""
    return [link for link in re.findall(r"]\(([^)]+)\)", path.read_text()) if "/actions/" not in link]


@pytest.mark.parametrize("page", PAIRS)
def test_both_languages_link_to_the_same(page):
    """In the same order, but for the links to each other."""
    translations = {one: other for one, other in PAIRS.values()}
    english, chinese = (
        [link if link.startswith("https://") else (path.parent / link).resolve() for link in links_of(path)]
        for path in PAIRS[page]
    )
    both = set(translations) | set(translations.values())
    assert [link for link in english if link not in both] == [link for link in chinese if link not in both]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_page_links_back_and_on(path):
    top = path.read_text().split("\n")[2]
    assert "(../README.md)" in top and ("(README.md)" in top or path.name.startswith("README")), top


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in links_of(path):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), target
        headings = re.findall("^#+ (.+)$", there.read_text(), flags=re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), target
