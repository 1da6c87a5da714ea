"""What moves, in bytes: theory against the paper's formulas, OneFlow against theory, the page against a fresh run."""

from functools import partial

import pytest

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.sbp import NAMES
from oneflow_cookbook.measure.steps import Move, tensors_and_moves
from oneflow_cookbook.report import atlas, atlas_page, runs
from oneflow_cookbook.start.recipe import path_of
from tests.cases import CASES, GRAPH_ONLY, PROOFS, TRAINED, proven_on
from tests.cases.forward import SIGNATURES
from tests.cases.ladder import Checks

CONTROL = 60_000  # bytes of OneFlow's own messages at most, for one call on 4 ranks together: 52 kB were seen
# What a step of training sends is measured as a whole, in test_training.py
RUNS = [(name, mode) for name in CASES if name not in TRAINED for mode in runs.modes(path_of(name))]


def background_calls(item):
    """What a test needs: see pools.py."""
    wanted = runs_of(**item.callspec.params) if item.originalname == "test_bytes_of_every_recipe" else []
    calls = {}
    if "atlas_tables" in item.fixturenames:
        calls = {("atlas", n): (n, atlas.measured_on) for n in atlas.SAME}
    if item.originalname == "test_page_is_that_of_this_run":
        calls = atlas_page.calls()
    for name, n, mode in wanted:
        run = partial(runs.recipe_run, path=path_of(name), mode=mode, **PROOFS[name].measured_at)
        calls["run", name, n, mode] = (n, run)
    return calls


def runs_of(name, mode):
    """(name, number of ranks, mode) of each run that is measured."""
    sizes = proven_on(name)
    if PROOFS[name].shares_moves or name == "matmul_signatures":  # the atlas measures these on each n
        sizes = sizes[:1]
    return [(name, n, mode) for n in (sizes if mode == "eager" else sorted({sizes[0], sizes[-1]}))]


@pytest.fixture(scope="session")
def atlas_tables(measured):
    return {key: table for n in atlas.SAME for key, table in measured("atlas", n).items()}


def near(sent, wanted, *what):
    """Within 2 % of the formula; below 1 MB, also within OneFlow's own messages."""
    Checks.that(abs(sent - wanted) <= 0.02 * wanted + CONTROL * (wanted < 1e6), *what, "sent", sent, "not", wanted)


def value(words, p):
    """The value of a formula of the page."""
    return eval(words.replace("2(", "2*(").replace("p²", "p**2").replace(" on average", ""), dict(p))


@pytest.mark.parametrize("which, ranks", [("same", atlas.SAME), ("disjoint", atlas.DISJOINT)])
def test_theory_is_that_of_the_paper(which, ranks):
    for old, new in atlas.PAIRS:
        for source, target in [*ranks.values(), *([([0, 1, 2], [3, 4, 5, 6])] if which == "disjoint" else [])]:
            p = {"p": len(source), "p1": len(source), "p2": len(target)}
            boxing = atlas.formula(source, target, old, new, shape=(12, 24))
            total = value(atlas.formula_in_words(which, old, new), p)
            Checks.that(abs(boxing.total - total) < 1e-9, which, old, new, source, target, boxing)
            by_rank = dict.fromkeys(source, value(atlas.sent_by_each(old, new), p))
            if which == "disjoint":
                before, after = (value(words, p) for words in atlas.sent_to_others(old, new))
                by_rank = {**dict.fromkeys(source, before), **dict.fromkeys(target, after)}
            Checks.that(abs(sum(by_rank.values()) - total) < 1e-9, which, old, new, by_rank, "is not", total)
            for rank, sent in (boxing.by_rank or {}).items():
                Checks.that(abs(sent - by_rank[rank]) < 1e-9, which, old, new, "rank", rank, boxing)


def test_theory_of_uneven_blocks_and_meshes():
    def total(shape, old, ranks, new, new_ranks=None):
        return theory.Boxing(shape, (old, ranks), (new, new_ranks or ranks)).total

    assert total((5, 1), "S(0)", [0, 1], "B") == 5  # 2 rows one way, 3 the other
    assert total((5, 4), "S(0)", [0, 1], "S(1)") == 2 * 2 + 3 * 2
    assert total((4, 4), "S(0)", [0, 1], "S(0)", [1, 2]) == 16  # every row moves to the next rank
    assert total((4, 4), "B", [0, 1], "B", [1, 2]) == 16
    mesh = [[0, 1], [2, 3]]
    assert total((4, 4), "S(0), B", mesh, "B, B") == 8 * 4
    assert total((4, 4), "P, S(0)", mesh, "B, S(0)") == 2 * 8 * 2
    assert total((4, 4), "P, P", mesh, "B, B") is None  # along both axes: no formula


@pytest.mark.parametrize("mode", atlas.MODES)
@pytest.mark.parametrize("n", atlas.SAME)
def test_conversions_send_what_theory_says_or_what_is_known(atlas_tables, n, mode):
    whole = 4 * atlas.SHAPE[0] * atlas.SHAPE[1]
    for source, target in (atlas.SAME[n], atlas.DISJOINT[n]):
        for old, new in atlas.PAIRS:
            sent = [
                whole * share for share in atlas_tables["conversions", tuple(source), tuple(target), mode][old, new]
            ]
            wanted = 4 * atlas.expected(mode, atlas.SHAPE, (old, source), (new, target))
            what = (n, mode, old, source, "->", new, target)
            near(sum(sent), wanted, *what)
            by_rank = atlas.formula(source, target, old, new).by_rank
            if source == target:
                by_rank = dict.fromkeys(source, wanted / whole / n)  # whatever the total is, all send the same
            elif (mode, "disjoint", old, new) in atlas.DEVIATIONS:
                by_rank = None
            for rank in by_rank or {}:
                near(sent[rank], whole * by_rank[rank], *what, f"rank {rank}")


@pytest.mark.parametrize("which", atlas.MATMULS)
def test_matmuls_send_what_moving_an_input_takes(atlas_tables, which):
    for n, mode in ((n, mode) for what, n, other, mode in atlas_tables if (what, other) == ("signatures", which)):
        ranks = list(range(n))
        for (x, w), (out, sent) in atlas_tables["signatures", n, which, mode].items():
            i, j = NAMES.index(x), NAMES.index(w)
            Checks.equal(out, SIGNATURES[which][i][j], n, which, mode, x, "@", w, "SBP")
            shapes = atlas.MATMULS[which]
            inputs = [{"sbp": sbp, "ranks": ranks, "shape": shape, "item": 4} for sbp, shape in zip((x, w), shapes)]
            moved = theory.matmul_boxings(inputs, {"sbp": out})
            Checks.equal(not moved, (x, w) in theory.MATMUL, n, which, mode, x, "@", w, "is legal")
            wanted = sum(4 * atlas.expected(mode, boxing.shape, boxing.old, boxing.new) for _, boxing in moved)
            near(sum(sent), wanted, n, which, mode, x, "@", w)


@pytest.mark.parametrize("name, mode", RUNS)
def test_bytes_of_every_recipe(measured, name, mode):
    for _, n, _ in runs_of(name, mode):
        items = tensors_and_moves(measured("run", name, n, mode))
        moves = [item for item in items if isinstance(item, Move) and item.sent]
        in_graph = any(move.what.startswith("a call of") for move in moves)
        here = CASES[name](n).graph_calls > 0  # and not on ranks that the recipe starts
        Checks.equal(in_graph, here and (mode == "graph" or name in GRAPH_ONLY), name, "runs in a graph")
        for move in moves:
            what = (name, n, move.what, move.change)
            if move.boxings is None:
                made_global = move.change.startswith("local -> ")
                words = f"sent {sum(move.sent)} bytes that no formula gives; move the inputs by to_global"
                Checks.that(made_global, *what, words)
                continue
            how = "graph" if move.what.startswith("a call of") else "eager"
            wanted = sum(b.item * atlas.expected(how, b.shape, b.old, b.new) for b in move.boxings)
            if how == "graph" and PROOFS[name].shares_moves:
                Checks.that(sum(move.sent) <= 1.02 * wanted, *what, "sent", move.sent, "more than", wanted)
                continue
            near(sum(move.sent), wanted, *what)
            if move.by_rank and all(key_of(how, boxing) not in atlas.DEVIATIONS for boxing in move.boxings):
                for rank, sent in move.by_rank.items():
                    near(move.sent[rank], sent * wanted / move.formula if wanted else 0, *what, f"rank {rank}")


def key_of(mode, boxing):
    """Of a boxing in atlas.DEVIATIONS."""
    (old, ranks), (new, new_ranks) = boxing.old, boxing.new
    return (mode, atlas.kind(ranks, new_ranks), old, new) if "," not in old else None


def test_page_is_that_of_this_run(measured):
    text = atlas_page.page({key: measured(*key) for key in atlas_page.calls()})
    difference = atlas_page.differs(atlas_page.ATLAS.read_text(), text)
    assert difference is None, f"{atlas_page.ATLAS}: {difference}; ./launch.sh docs makes it anew"
