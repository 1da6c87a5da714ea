"""The page of the ready-made layers: made anew from runs, its values against numpy, its bytes against formulas."""

import numpy as np
import pytest

from harness.report import layers, layers_page, pages
from tests.cases.ladder import Checks
from tests.cases.layers import expected

CELLS = {key: (kind, cell) for key, kind, cell in layers.cells()}
TOLERANCE = 4e-6  # of the largest entry, or of 1


def background_calls(item):
    """What a test needs: see background.py."""
    calls = layers_page.calls()
    return calls if "4_ranks" not in item.name else {("layers", 4): (4, sent_on)}


def sent_on(pool):
    """{key of a cell: what a run returned on each rank}, in eager mode."""
    return {key: layers.call(pool, kind, cell, layers.sizes_of(kind)[0]) for key, (kind, cell) in CELLS.items()}


@pytest.fixture(scope="module")
def results(measured):
    return {key: measured(*key) for key in layers_page.calls()}


@pytest.fixture(scope="module")
def found(results):
    return results[next(iter(layers_page.calls()))]


def test_page_is_that_of_this_run(results):
    difference = pages.differs(layers_page.PAGE.read_text(), layers_page.page(results))
    assert difference is None, f"{layers_page.PAGE}: {difference}; ./launch.sh docs makes it anew"


@pytest.mark.parametrize("n, graph", [(2, False), (3, False), (2, True)])
def test_values_are_those_of_numpy(pools, found, n, graph):
    for key, (kind, cell) in CELLS.items():
        if graph and isinstance(found[key]["graph"], str):  # it aborts, or is refused
            continue
        name = kind.split()[-1]
        [seen, *_] = layers.call(pools(n), kind, cell, layers.KINDS[name].small, graph=graph, arrays=True)
        wanted = expected(name, seen["arrays"], clipped=kind != name)
        off = {
            what: abs(seen["arrays"][what] - value).max() / max(abs(value).max(), 1) for what, value in wanted.items()
        }
        wrong = max(off.values()) > TOLERANCE or seen["same mask"]
        Checks.equal(wrong, found[key]["wrong"], *key, n, "graph" if graph else "eager", off, "wrong")


def test_what_moves_on_2_ranks_is_what_the_page_names(found):
    for key, (_, cell) in CELLS.items():
        for phase, sent in found[key]["sent"].items():
            for unit, amount in sent.items():
                wanted = layers.formula(cell, phase, unit, 2)
                Checks.that(abs(amount - wanted) <= 0.02 * wanted + 0.03, *key, phase, amount, unit, "not", wanted)


def test_what_moves_on_4_ranks_is_what_the_page_names(measured):
    for key, by_rank in measured("layers", 4).items():
        kind, cell = CELLS[key]
        sizes = by_rank[0]["sizes"]
        for phase in layers.phases(kind):
            wanted = sum(size * layers.formula(cell, phase, unit, 4) for unit, size in sizes.items())
            sent = layers.sent(by_rank, phase)
            Checks.that(layers.near(sent, wanted), *key, phase, "sent", sent, "not", wanted)


def test_what_is_used_instead_is_right(results):
    *_, errors = results.values()
    assert all(line != "nothing" and right is not False for line, right in errors)


def test_numbers_of_two_sizes_give_the_units():
    runs = [[{"sizes": {"x": 10.0, "W": 4.0}}], [{"sizes": {"x": 20.0, "W": 4.0}}]]
    found = layers.in_units(runs, ("x", "W"), [0.5 * 10 + 2 * 4, 0.5 * 20 + 2 * 4])
    assert np.allclose([found["x"], found["W"]], [0.5, 2])
