"""What moves, in bytes: theory against the paper's formulas, OneFlow against theory, docs/sbp-atlas.md against both."""

import itertools
import re
from functools import partial

import pytest

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.sbp import NAMES
from oneflow_cookbook.measure.steps import COMPARES, Move, tensors_and_moves
from oneflow_cookbook.start.recipe import path_of
from tests import atlas
from tests.cases import CASES, GRAPH_ONLY, PROOFS, ROOT, TRAINED, measuring, proven_on
from tests.cases.forward import SIGNATURES
from tests.cases.ladder import Checks

PAGE = (ROOT / "docs" / "sbp-atlas.md").read_text()
CONTROL = 60_000  # bytes of OneFlow's own messages at most, for one call on 4 ranks together: 52 kB were seen
# What a step of training sends is measured as a whole, in test_training.py
RUNS = [(name, mode) for name in CASES if name not in TRAINED for mode in measuring.modes(path_of(name))]


def background_calls(item):
    """What a test needs: see pools.py."""
    wanted = runs_of(**item.callspec.params) if item.originalname == "test_bytes_of_every_recipe" else []
    calls = {}
    if "atlas_tables" in item.fixturenames:
        calls = {("atlas", n): (n, atlas.measured_on) for n in atlas.SAME}
    if item.originalname == "test_page_has_the_bytes_of_the_mesh":
        wanted = [("two_d_sbp", 4, mode) for mode in measuring.MODES]
    for name, n, mode in wanted:
        run = partial(measuring.recipe_run, path=path_of(name), mode=mode, **PROOFS[name].measured_at)
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


def check_sent(sent, wanted, *what):
    """What all ranks or one rank sent is what it must be; below 1 MB, OneFlow's own messages count."""
    Checks.sent(sent, wanted, CONTROL * (wanted < 1e6), *what)


def part_of_page(name):
    """What the page has between <!-- name --> and <!-- end -->."""
    [text] = re.findall(f"<!-- {name} -->(.*?)<!-- end -->", PAGE, flags=re.DOTALL)
    return text.strip()


def rows(text):
    """The rows of a table, each a list of cells, without its head."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return lines[2:]


def pairs_in(words):
    """The pairs of SBPs of a row: "S(0), S(1) → B" is two, and so is "S(0) ↔ S(1)"."""
    pairs = []
    for line in words.split("<br>"):
        old, arrow, new = re.split(" ([→↔]) ", line)
        olds, news = (NAMES if sbps in ("any", "the same") else sbps.split(", ") for sbps in (old, new))
        pairs += zip(olds, news) if new == "the same" else itertools.product(olds, news)
        pairs += itertools.product(news, olds) if arrow == "↔" else []
    return pairs


def rows_by_pair(text):
    """{pair of SBPs: the other cells of its row} of a table, which has each pair once."""
    pairs = [(pair, cells) for words, *cells in rows(text) for pair in pairs_in(words)]
    Checks.equal(sorted(pair for pair, _ in pairs), sorted(atlas.PAIRS), "pairs of a table")
    return dict(pairs)


def check_cell(cell, sent, is_off, *what):
    """A cell shows these multiples of the tensor; a single figure is that of all ranks; bold where it is_off."""
    figures = [float(figure) for figure in re.findall(r"\d[\d.]*", cell)]
    figures *= len(sent) if len(figures) == 1 else 1
    are_near = len(figures) == len(sent) and not any(map(differs, sent, figures))
    Checks.that(are_near and cell.startswith("**") == is_off, *what, "the page has", cell, "and not", sent)


def differs(sent, formula):
    """Whether measured bytes differ from a formula, in units of the tensor."""
    return abs(sent - formula) > 0.02 * formula + 0.02


def value(words, p):
    """The value of a formula of the page."""
    return eval(words.replace("2(", "2*(").replace("p²", "p**2").replace(" on average", ""), dict(p))


def test_formulas_for_the_same_ranks_are_those_of_theory():
    for (old, new), (words, *_) in rows_by_pair(part_of_page("same")).items():
        collective, _, formula = words.partition("<br>")
        Checks.equal(atlas.formula([0, 1], [0, 1], old, new).collective, collective, old, new)
        for p, (source, target) in atlas.SAME.items():
            boxing = atlas.formula(source, target, old, new, shape=(12, 24))
            sent = value(formula or "0", {"p": p})
            Checks.that(abs(boxing.total - p * sent) < 1e-9, old, new, p, boxing.total)
            Checks.that(all(abs(part - sent) < 1e-9 for part in boxing.by_rank.values()), old, new, p, boxing.by_rank)


def test_formulas_for_other_ranks_are_those_of_theory_and_of_the_paper():
    for (old, new), formulas in rows_by_pair(part_of_page("formulas")).items():
        for source, target in [*atlas.DISJOINT.values(), ([0, 1, 2], [3, 4, 5, 6])]:
            p = {"p1": len(source), "p2": len(target)}
            boxing = atlas.formula(source, target, old, new, shape=(12, 24))
            of_paper = value(atlas.OTHER_RANKS.get((old[0], new[0]), "1"), p)
            before, after = (value(words, p) for words in formulas)
            by_rank = {**dict.fromkeys(source, before), **dict.fromkeys(target, after)}
            Checks.that(abs(boxing.total - of_paper) < 1e-9, old, new, source, target, boxing.total)
            Checks.that(abs(sum(by_rank.values()) - of_paper) < 1e-9, old, new, by_rank, "is not", of_paper)
            for rank, sent in (boxing.by_rank or {}).items():
                Checks.that(abs(sent - by_rank[rank]) < 1e-9, old, new, "rank", rank, sent)


@pytest.mark.parametrize("which", ["same", "disjoint"])
def test_page_explains_each_deviation(which):
    explained = {
        (mode, which, *pair)
        for pairs, mode in re.findall(
            r"^- \*\*(.*), (eager|graph)\*\*\.", part_of_page(f"{which}_deviations"), re.MULTILINE
        )
        for words in pairs.split(" and ")
        for pair in pairs_in(words)
    }
    assert explained == {key for key in atlas.DEVIATIONS if key[1] == which}


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


@pytest.mark.parametrize("mode", measuring.MODES)
@pytest.mark.parametrize("n", atlas.SAME)
def test_conversions_send_what_theory_says_or_what_is_known(atlas_tables, n, mode):
    whole = atlas.WHOLE
    for source, target in (atlas.SAME[n], atlas.DISJOINT[n]):
        for old, new in atlas.PAIRS:
            sent = [
                whole * share for share in atlas_tables["conversions", tuple(source), tuple(target), mode][old, new]
            ]
            wanted = 4 * atlas.expected(mode, atlas.SHAPE, (old, source), (new, target))
            what = (n, mode, old, source, "->", new, target)
            check_sent(sum(sent), wanted, *what)
            by_rank = atlas.formula(source, target, old, new).by_rank
            if source == target:
                by_rank = dict.fromkeys(source, wanted / whole / n)  # whatever the total is, all send the same
            elif (mode, "disjoint", old, new) in atlas.DEVIATIONS:
                by_rank = None
            for rank in by_rank or {}:
                check_sent(sent[rank], whole * by_rank[rank], *what, f"rank {rank}")


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
            check_sent(sum(sent), wanted, n, which, mode, x, "@", w)


@pytest.mark.parametrize("name, mode", RUNS)
def test_bytes_of_every_recipe(measured, name, mode):
    for _, n, _ in runs_of(name, mode):
        items = tensors_and_moves(measured("run", name, n, mode))
        moves = [item for item in items if isinstance(item, Move) and item.sent]
        in_graph = any(move.name.startswith("a call of") for move in moves)
        here = name != "spawn"  # and not on ranks that the recipe starts
        Checks.equal(in_graph, here and (mode == "graph" or name in GRAPH_ONLY), name, "runs in a graph")
        for move in moves:
            what = (name, n, move.name, move.change)
            if move.boxings is None:
                made_global = move.change.startswith("local -> ")
                words = f"sent {sum(move.sent)} bytes that no formula gives; move the inputs by to_global"
                Checks.that(made_global, *what, words)
                continue
            how = "graph" if move.name.startswith("a call of") else "eager"
            wanted = sum(b.item * atlas.expected(how, b.shape, b.old, b.new) for b in move.boxings)
            if how == "graph" and PROOFS[name].shares_moves:
                Checks.that(sum(move.sent) <= 1.02 * wanted, *what, "sent", move.sent, "more than", wanted)
                continue
            check_sent(sum(move.sent), wanted, *what)
            if move.by_rank and all(key_of(how, boxing) not in atlas.DEVIATIONS for boxing in move.boxings):
                for rank, sent in move.by_rank.items():
                    check_sent(move.sent[rank], sent * wanted / move.formula if wanted else 0, *what, f"rank {rank}")


def key_of(mode, boxing):
    """Of a boxing in atlas.DEVIATIONS."""
    (old, ranks), (new, new_ranks) = boxing.old, boxing.new
    return (mode, atlas.kind(ranks, new_ranks), old, new) if "," not in old else None


def test_page_has_the_bytes_of_conversions_on_the_same_ranks(atlas_tables):
    page = rows_by_pair(part_of_page("same"))
    assert rows(part_of_page("example")) == [["S(0) → B", *page["S(0)", "B"]]]
    for pair, (_, *cells) in page.items():
        for mode, cell in zip(measuring.MODES, cells):
            sent, are_off = [], []
            for source, target in atlas.SAME.values():
                by_rank = atlas_tables["conversions", tuple(source), tuple(target), mode][pair]
                sent.append(sum(by_rank) / len(by_rank))  # all ranks send the same: see above
                are_off.append(differs(sum(by_rank), atlas.formula(source, target, *pair).total))
            check_cell(cell, sent, any(are_off), pair, mode)


BY_RANK = {  # what ranks send from [0, 1] to [2, 3] where OneFlow differs from the formula, as the page explains it
    ("eager", "B", "B"): [1, 0, 1, 1],
    ("eager", "P", "B"): [2, 2, 0, 0],
    ("eager", "P", "P"): [2, 1, 0, 0],
    ("graph", "S(0)", "P"): [1, 1, 0, 0],
    ("graph", "S(1)", "P"): [1, 1, 0, 0],
}


def test_ranks_send_what_the_page_explains(atlas_tables):
    assert {(mode, "disjoint", *pair) for mode, *pair in BY_RANK} == {
        key for key in atlas.DEVIATIONS if "same" not in key
    }
    for (mode, *pair), wanted in BY_RANK.items():
        sent = atlas_tables["conversions", (0, 1), (2, 3), mode][tuple(pair)]
        Checks.that(not any(map(differs, sent, wanted)), mode, pair, "sent", sent, "and must", wanted)


def test_page_has_the_bytes_of_matmuls(atlas_tables):
    legal = {f"{x} @ {w} = {out}" for (x, w), out in theory.MATMUL.items()}
    assert sorted(part_of_page("legal").splitlines()) == sorted(f"- {words}" for words in legal)
    page = {words: cells for words, *cells in rows(part_of_page("signatures"))}
    measured = {mode: atlas_tables["signatures", 2, "equal", mode] for mode in measuring.MODES}
    products = {f"{x} @ {w} = {out}": (x, w) for (x, w), (out, _) in measured["eager"].items()}
    assert set(products) == {*page, *legal} and len(page) + len(legal) == len(atlas.PAIRS)
    for words, (moves, *cells) in page.items():
        inputs = [
            {"sbp": sbp, "ranks": [0, 1], "shape": shape, "item": 4}
            for sbp, shape in zip(products[words], atlas.MATMULS["equal"])
        ]
        [(operand, boxing)] = theory.matmul_boxings(inputs, {"sbp": words.partition(" = ")[2]})
        assert moves == f"{operand} {boxing.change.replace('->', '→')}, {boxing.collective}"
        for mode, cell in zip(measuring.MODES, cells):
            sent = measured[mode][products[words]][1]
            check_cell(cell, [sum(sent) / len(sent) / boxing.size], False, words, mode)


def test_page_has_the_bytes_of_the_mesh(measured):
    items = {mode: tensors_and_moves(measured("run", "two_d_sbp", 4, mode)) for mode in measuring.MODES}
    moves = [item for item in items["eager"] if isinstance(item, Move) and item.collective != COMPARES]
    page = rows(part_of_page("mesh"))
    assert len(page) == len(moves)
    for (step, collective, formula, cell), move in zip(page, moves):
        assert step.replace("→", "->").split("<br>") == [words for words in (move.name, move.change) if words]
        assert collective == move.collective
        by_formula = [(move.by_rank or {}).get(rank, 0) / move.size for rank in range(4)]
        sent = [count / move.size for count in move.sent]
        check_cell(formula, by_formula, False, step)
        check_cell(cell, sent, any(map(differs, sent, by_formula)), step)
    [call] = [item for item in items["graph"] if isinstance(item, Move) and item.sent and item.formula]
    check_cell(part_of_page("mesh_graph"), [sum(call.sent) / call.formula], False, "the mesh in a graph")
