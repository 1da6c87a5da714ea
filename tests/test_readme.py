"""The README says what is true, in both languages: its commands and code run, its table is that of the cases."""

import re

import pytest

from tests.cases import CASES
from tests.chapters import forward
from tests.jobs import LAUNCH, Run, without_rounding
from tests.markdown import CHINESE, COMMANDS, ENGLISH, blocks, slug, tables

GLYPHS = {"▤": "S(0)", "▥": "S(1)", "■": "B", "▨": "P"}


# What other tests run.
ELSEWHERE = (
    "./launch.sh test",
    "python -m oneflow.distributed.launch",
    "./launch.sh -n 2 mine.py",
    "./launch.sh --nnodes",
    "./launch.sh --max-restarts",
)


@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith(ELSEWHERE)])
def test_command_runs(command):
    job = Run("bash", "-c", command).wait()
    assert job.code == (1 if command.startswith("diff") else 0), job.err
    assert job.out and not job.err
    if command.endswith("--help"):
        assert job.out.count("--graph") == 1  # from one rank only
    if command == COMMANDS[0]:
        assert without_rounding(job.out) == without_rounding(blocks(ENGLISH, "text")[0])


def test_snippet_runs_as_it_stands(tmp_path):
    [snippet] = blocks(ENGLISH, "python")
    (tmp_path / "mine.py").write_text(snippet)
    job = Run(LAUNCH, "-n", 2, "mine.py", cwd=tmp_path).wait()
    [shown] = [block for block in blocks(ENGLISH, "text") if block.startswith("[0] (4, 8)")]
    assert sorted(job.out.splitlines()) == shown.splitlines(), job.err


def test_official_command_is_the_one_that_is_tested():
    assert "python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_parallel.py" in COMMANDS


def test_table_of_recipes_is_that_of_the_cases():
    rows = {re.search(r"\[(\w+)\.py]", row[0]).group(1): row for row in tables(ENGLISH) if "recipes/" in row[0]}
    assert sorted(rows) == sorted(CASES)
    for name, (cell, picture) in rows.items():
        _, what, moves, use = cell.split("<br>")
        case = CASES[name](4)
        shown = {
            tensor: GLYPHS[glyph] for tensor, glyph in re.findall(r"(\w+) ([▤▥■▨])", what) if tensor in case.layout
        }
        wanted = {t: ("B" if sbp == "local" else sbp) for t, (sbp, _) in case.layout.items() if t in shown}
        assert shown == wanted
        if {"x", "w"} <= {tensor.rstrip("0") for tensor in case.layout} and name != "two_d_sbp" and not case.steps:
            assert {"x", "w", "out"} <= {tensor.rstrip("01") for tensor in shown}
        assert moves.startswith("moves: ") and use.startswith("use it when ")
        assert (moves == "moves: nothing") == (not (case.moves or case.sends) and name != "matmul_signatures")
        assert picture == f"![{name}.py](docs/pictures/{name}.svg)"


def test_every_topic_of_training_is_found_by_its_name_in_pytorch():
    rows = {row[0]: re.findall(r"\[([\w.]+)]", row[1]) for row in tables(ENGLISH) if len(row) == 2 and "](" in row[1]}
    rows = {topic: links for topic, links in rows.items() if "recipes/" not in topic}
    for usual in (
        *("DistributedDataParallel", "nn.DataParallel", "FullyShardedDataParallel", "ZeRO", "DTensor", "Megatron"),
        *("pipelining", "gradient accumulation", "checkpoint.checkpoint", "DistributedSampler", "torchmetrics"),
        *("SyncBatchNorm", "manual_seed", "distributed.checkpoint", "parameter server", "asynchronous SGD", "ring"),
    ):
        assert any(usual in topic for topic in rows), usual
    linked = {link for links in rows.values() for link in links}
    own_ways = {"auto_parallel.py"}  # PyTorch has no such thing
    assert {f"{name}.py" for name in CASES if name not in forward.CASES} - own_ways <= linked


def test_both_languages_agree():
    for language in ("bash", "text", "python"):
        assert blocks(ENGLISH, language) == blocks(CHINESE, language)
    english, chinese = tables(ENGLISH), tables(CHINESE)
    assert [len(row) for row in english] == [len(row) for row in chinese]
    code = re.compile(r"`[^`]*`|\w+\.py|[▤▥■▨@=→]|\*\*\d|\d[\d.]*")
    for one, other in zip(english, chinese):
        for cell, translated in zip(one, other):
            found, theirs = (sorted(code.findall(text)) for text in (cell, translated))  # word order differs
            assert found == theirs, (cell, translated)
    assert ENGLISH.read_text().count("\n## ") == CHINESE.read_text().count("\n## ")


def test_picture_in_words_is_what_show_draws():
    job = Run("bash", "-c", "./launch.sh show recipes/row_parallel.py").wait()
    [picture] = [block for block in blocks(ENGLISH, "text") if block.startswith("out ")]
    assert picture in job.out


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_links_lead_somewhere(path):
    for target in re.findall(r"]\(([^)]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), target
        headings = re.findall("^#+ (.+)$", there.read_text(), flags=re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), target
