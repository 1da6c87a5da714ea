"""docs/gpt.md is made from docs/gpt.json, whose figures are those of the formulas."""

import json

import pytest

from benchmarks import meshes
from tests.cases import gpt_meshes as gpt
from tests.cases.gpt_meshes import ROWS, by_row, formulas
from tests.cases.ladder import Checks

RUNS = json.loads(gpt.FOUND.read_text())


def test_page_is_that_of_the_runs():
    assert meshes.PAGE.read_text() == meshes.page(RUNS), "./launch.sh meshes makes it again"
    assert list(by_row(RUNS)) == ROWS


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bytes_and_memory_are_those_of_the_formulas(row):
    moved, held = formulas(*row)
    for run in by_row(RUNS)[row]:
        mode = meshes.MODES[run["graph"]]
        Checks.equal(sum(run["held"].values()), held, *row, mode, "bytes that a rank holds")
        Checks.that(run["sent"]["others"] <= 0.01 * sum(moved.values()), *row, mode, "between ranks of no axis")
        for axis, formula in moved.items():
            sent = run["sent"][axis]
            off, explained = meshes.off(sent, formula), (*row, axis, mode) in meshes.KNOWN
            Checks.equal(off, explained, *row, mode, axis, sent, "is more than 5 % from", formula)
