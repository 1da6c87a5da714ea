"""matmul.js and words.js of docs/explore.html: its rules against every recorded run, and its programs on ranks."""

import ast
import itertools
import re

import pytest

from harness.explore import page, records
from harness.measure.sbp import NAMES
from harness.measure.theory import Boxing
from tests.javascript import evaluate
from tests.jobs import launch
from tests.recorded import RECORDS, VALUES, in_mode

RULES = """
Object.entries(argument.runs).flatMap(([ranks, pairs]) => Object.entries(pairs).flatMap(([pair, run]) => {
  const [x, w] = pair.split(" @ ");
  return ["", ...Object.keys(run.to || {})].flatMap((to) => ["eager", "graph"].map((mode) => {
    const found = Matmul.run(argument, { ranks, x, w, to, mode });
    if (found.error !== undefined) return [ranks, pair, to, mode, null, null, null];
    const large = argument.measured_shape;
    const parts = (moves) => moves.map(({ tensor, from, to }) =>
      Matmul.formula(large[tensor] || [large.x[0], large.w[1]], from, to, ranks));
    const total = (moves) => 4 * parts(moves).reduce((all, one) => all + one.total, 0);
    const sum = (moves) => (parts(moves).includes(null) ? null : total(moves));
    const before = sum((found.large || found).moves);
    const after = found.change ? sum([found.change]) : 0;
    return [ranks, pair, to, mode, before, after, Matmul.differences(argument, { ranks, x, w, to, mode })];
  }));
}))
"""


def test_records_are_unpacked_as_they_were():
    assert evaluate(["matmul.js"], "Matmul.unpack(argument)", page.packed(RECORDS)) == RECORDS


def test_formulas_and_differences_are_those_of_the_records():
    found = evaluate(["matmul.js"], RULES, RECORDS)
    assert len(found) >= 4 * 160 + 512
    for ranks, pair, to, mode, before, after, differences in found:
        one = RECORDS["runs"][ranks][pair]
        run, where = in_mode(one, mode), (ranks, pair, to, mode)
        if "error" in run:
            continue
        assert before == (None if run["formula"] is None else pytest.approx(run["formula"])), where
        if to:
            assert after == pytest.approx(in_mode(one["to"][to], mode)["formula"]), where
        elif differences:
            assert "graph" in one, where


MOVES = """
argument.map(([shape, from, to, ranks]) => {
  const names = Matmul.collectives(from, to).map(({ axis, name }) => [axis, name]);
  return [names, Matmul.formula(shape, from, to, ranks)];
})
"""


@pytest.mark.parametrize("which", records.RANKS)
@pytest.mark.parametrize("shape", [(4, 4), (7, 5)], ids=str)
def test_moves_are_those_of_the_theory(which, shape):
    ranks = records.RANKS[which]
    names = records.MESH_NAMES if which == "2x2" else NAMES
    pairs = list(itertools.product(names, names))
    found = evaluate(["matmul.js"], MOVES, [[shape, *map(records.key, pair), which] for pair in pairs])
    for (old, new), (steps, formula) in zip(pairs, found):
        along = " along axis {}" if which == "2x2" else ""
        words = ", ".join(name + along.format(axis) for axis, name in steps) or "nothing"
        boxing = Boxing(shape, (old, ranks), (new, ranks))
        assert words == boxing.collective, (old, new)
        total, by_rank = (formula["total"], formula["byRank"]) if formula else (None, None)
        assert total == (None if boxing.total is None else pytest.approx(boxing.total)), (old, new)
        wanted = boxing.by_rank and [boxing.by_rank[rank] for rank in sorted(boxing.by_rank)]
        assert by_rank == (None if wanted is None else pytest.approx(wanted)), (old, new)


def test_words_are_the_same_in_both_languages():
    words = evaluate(["words.js"], "Words")
    assert sorted(words) == ["en", "zh"] and list(words["en"]) == list(words["zh"])
    for key, text in words["en"].items():
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", words["zh"][key])), key
    files = ("explore.html", "explore.js", "picture.js", "details.js")
    script = "".join((page.HERE / name).read_text() for name in files)
    literal = set(re.findall(r"""(?:\bt|sentence)\("(\w+)\"""", script)) | set(re.findall(r'data-t="(\w+)"', script))
    assert len(literal) > 40 and literal <= set(words["en"])


CODE = """
argument.states.map(([ranks, x, w, to, mode]) => Matmul.code(argument.records, { ranks, x, w, to, mode }))
"""
PROGRAMS = [
    ("1", "P", "S(0)", "B", "eager"),
    ("2", "S(1)", "S(0)", "B", "eager"),
    ("2", "S(1)", "S(0)", "S(1)", "graph"),
    ("3", "P", "S(0)", "P", "eager"),
    ("4", "S(0)", "S(1)", "", "graph"),
    ("2x2", "S(0),P", "P,S(1)", "", "eager"),
    ("2x2", "S(0),B", "B,S(1)", "", "graph"),
]


@pytest.mark.parametrize("state", PROGRAMS, ids=" ".join)
def test_program_prints_what_the_page_shows(state, tmp_path):
    ranks, x, w, to, mode = state
    [code] = evaluate(["matmul.js"], CODE, {"records": RECORDS, "states": [state]})
    (tmp_path / "mine.py").write_text(f"{code}\n")
    n = 4 if ranks == "2x2" else int(ranks)
    job = launch("-n", n, tmp_path / "mine.py")
    assert job.code == 0, job.err
    pair = RECORDS["runs"][ranks][f"{x} @ {w}"]
    blocks = in_mode(pair["to"][to] if to else pair, mode)["out"]
    lines = sorted(job.out.splitlines())
    assert len(lines) == n
    for line, block in zip(lines, blocks):
        assert ast.literal_eval(line[line.index("[[") :]) == block, line


def test_program_of_the_pipeline(tmp_path):
    (tmp_path / "mine.py").write_text(evaluate(["matmul.js"], "Matmul.pipelineCode(argument)", RECORDS))
    job = launch("-n", 2, tmp_path / "mine.py")
    first, second = sorted(job.out.splitlines())
    assert job.code == 0 and first.endswith("[]"), job.err
    assert ast.literal_eval(second[second.index("[[") :]) == (VALUES["out"] @ VALUES["w"]).tolist()
