"""docs/gpt.md is made of what was found, and its figures are those of the formulas."""

import json

import pytest

from benchmarks import meshes
from tests.cases import gpt_meshes as gpt
from tests.cases.gpt_meshes import ROWS, by_row, formulas
from tests.cases.ladder import Checks

FOUND = json.loads(gpt.FOUND.read_text())


def test_page_and_picture_are_of_what_was_found():
    for path, text in meshes.made(FOUND).items():
        assert path.read_text() == text, f"{path}; ./launch.sh meshes makes it anew"
    assert list(by_row(FOUND)) == ROWS


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bytes_and_memory_are_those_of_the_formulas(row):
    moved, kept = formulas(*row)
    for run in by_row(FOUND)[row]:
        mode = meshes.MODES[run["graph"]]
        Checks.equal(sum(run["held"].values()), kept, *row, mode, "bytes that a rank keeps")
        Checks.that(run["sent"]["others"] <= 0.01 * sum(moved.values()), *row, mode, "between ranks of no axis")
        for axis, formula in moved.items():
            found = run["sent"][axis]
            off, explained = meshes.off(found, formula), (*row, axis, mode) in meshes.KNOWN
            Checks.equal(off, explained, *row, mode, axis, found, "is more than 5 % from", formula)


def test_sequence_parallel_keeps_as_much_as_plain():
    """The page says so, in place of a column."""
    held = {row: [run["held"] for run in both] for row, both in by_row(FOUND).items()}
    compared = [mesh for mesh, layout in held if layout == "sequence parallel"]
    assert compared and all(held[mesh, "sequence parallel"] == held[mesh, "plain"] for mesh in compared)
