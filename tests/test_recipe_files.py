"""The text of the recipes: the tables in their docstrings are true."""

import ast
import re

import numpy as np
import pytest

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.sbp import NAMES, Layout
from oneflow_cookbook.start.recipe import MODULES, RECIPES, path_of, world_sizes
from tests import atlas
from tests.cases import CASES, ROOT, WITHOUT_CASE, modes
from tests.cases.forward import SIGNATURES
from tests.cases.layouts import docstring, table
from tests.cases.measuring import MODES
from tests.cases.pipelines import in_turns, rows_of_chunks, rows_of_schedule
from tests.markdown import tables

RECIPE_NAMES = [*CASES, *WITHOUT_CASE]


def source(name):
    path = path_of(name) if name not in MODULES else RECIPES / "your_model" / f"{name}.py"
    return path.read_text()


def block(shape, sbp, ranks, rank):
    """What a rank holds, in the words of the docstrings."""
    if sbp == "local":
        return "whole, a local tensor"
    layout = Layout(sbp, ranks)
    if rank not in layout.members:
        return "nothing"
    cut = layout.block(shape, rank)
    spans = [f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in cut]
    parts = [dim for dim, (start, stop) in enumerate(cut) if stop - start < shape[dim]]
    if len(parts) != 1:
        return ", ".join(spans) if parts else "whole"
    word = ("row", "column")[parts[0]] + "s" * ("-" in spans[parts[0]])
    return f"{word} {spans[parts[0]]}"


def in_words_of_block(cell, sbp):
    """A cell with rows and columns in place of what they mean in the recipe."""
    words = {"sequence": "row", "expert": "column" if sbp == "S(1)" else "row", "numpy array": "local tensor"}
    for word, plain in words.items():
        cell = cell.replace(word, plain)
    return cell


@pytest.mark.parametrize("name", CASES)
def test_table_in_the_docstring_says_what_each_rank_holds(name):
    """Shapes are those of the case, cells what the SBP and ranks mean. A run proves the SBPs: see layouts.py."""
    n = world_sizes(path_of(name))[0]
    case = CASES[name](n)
    for tensor, row in table(name).items():
        sbp, ranks = case.layout[tensor]
        assert (row.shape, row.sbp) == (case.values[tensor].exact.shape, sbp), tensor
        if sbp == "P":  # what a term is, is said in words
            wanted = ["nothing" if rank not in ranks else cell for rank, cell in enumerate(row.cells)]
            if "@" in row.cells[0]:  # or as an expression
                factors = {name: value.exact for name, value in case.values.items()}
                for cell, part in zip(row.cells, case.parts[tensor]):
                    np.testing.assert_allclose(eval(cell, factors), part.exact)
        else:
            wanted = [block(row.shape, sbp, ranks, rank) for rank in range(n)]
        where = f"{name}.py, the row of {tensor}, on {n} ranks, the first of WORLD_SIZES"
        assert [in_words_of_block(cell, sbp) for cell in row.cells] == wanted, f"{where}: it must say {wanted}"
        assert len(row.cells) == n, f"{where}: a cell for each rank"


def lookup(name):
    """The rows of the table of pairs in a docstring: first word -> the cells behind it."""
    rows = [
        re.split(r"  +", line.strip()) for line in docstring(name).splitlines() if re.match(" +[BSP][(01), S]* ", line)
    ]
    return {row[0]: row[1:] for row in rows if len(row) > 3 and not re.match(r"\(\d+, \d+\)", row[1])}


def test_table_of_conversions_names_the_collectives_and_what_costs_more():
    layouts = {sbp: Layout(sbp, [0, 1]) for sbp in NAMES}
    assert lookup("sbp_conversions") == {
        old: [
            theory.collective(layouts[old], layouts[new])
            + (" *" if any((mode, "same", old, new) in atlas.DEVIATIONS for mode in MODES) else "")
            for new in NAMES
        ]
        for old in NAMES
    }


def test_table_of_placements_gives_the_formulas():
    def formula(old, new):
        return atlas.OTHER_RANKS.get((old[0], new[0]), "1").replace("+", " + ").replace("-", " - ")

    rows = lookup("cross_placement")
    assert list(rows) == ["B", "S(0), S(1)", "P"]
    assert rows == {old: [formula(old.split(",")[0], new) for new in ("B", "S(0)", "P")] for old in rows}
    deviating = {
        f"{old} -> {new} {words}"
        for (mode, which, old, new), (_, words) in atlas.DEVIATIONS.items()
        if (mode, which) == ("eager", "disjoint")
    }
    assert deviating == {"B -> B 1 + 2(p2-1)", "P -> B p1 p2", "P -> P 1 + 2(p1-1)"}  # 2 p2 - 1, p1 p2, 2 p1 - 1 there
    dearer = "B -> B 2 p2 - 1 (p2 > 1), P -> P 2 p1 - 1 (p1 > 1), P -> B p1 p2 (both > 1)"
    assert dearer in " ".join(docstring("cross_placement").split())


def test_table_of_signatures_names_the_product_and_what_moves():
    inputs = {sbp: {"sbp": sbp, "ranks": [0, 1], "shape": (4, 4), "item": 4} for sbp in NAMES}
    for i, (x, cells) in enumerate(lookup("matmul_signatures").items()):
        for j, (w, cell) in enumerate(zip(NAMES, cells)):
            out = SIGNATURES["equal"][i][j]
            boxings = theory.matmul_boxings([inputs[x], inputs[w]], {"sbp": out})
            words = [f"{name} to {boxing.new[0]}" for name, boxing in boxings]
            assert cell.replace("x or w to B", "w to B") == ", ".join([out, *words]), (x, w)
    rows = lookup("matmul_signatures")
    assert list(rows) == list(NAMES)
    shown = [row for row in tables(RECIPES / "layouts" / "README.md") if row[0] in NAMES]
    assert {x: cells for x, *cells in shown} == rows and len(shown) == len(rows), "the chapter has the same table"


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_docstring_answers_the_questions_of_a_reader(name):
    lines = docstring(name).splitlines()
    assert lines[0].endswith(".") and not lines[1] and len(lines) <= 20
    path = path_of(name).relative_to(ROOT)
    options = " [--graph]" if len(modes(name)) == 2 else ""
    is_strategy = path.parent.name == "recipes"  # of one layer: these also show OneFlow's launcher
    begins = ["Moves: ", f"Run:   ./launch.sh {path}{options}", "Use it ", "Source: ", *["Why:   "] * (not is_strategy)]
    for begin in begins:
        assert any(line.startswith(begin) for line in lines), begin
    others = [line for line in lines if line.endswith(f"{path}{options}") and "./launch.sh" not in line]
    assert not is_strategy or others


@pytest.mark.parametrize("name", [*RECIPE_NAMES, *MODULES])
def test_private_calls_are_named_as_private(name):
    code = [line.partition("#")[0] for line in source(name).partition('\n"""\n')[2].splitlines()]
    private = [module for module in ("flow._C", "flow._oneflow_internal") if any(f"{module}." in line for line in code)]
    words = f"# {' and '.join(private)} {'is' if len(private) == 1 else 'are'} private to OneFlow 0.9.0"
    assert source(name).count(words) == bool(private), words


def value_of(formula, **numbers):
    """Of a formula of the docstrings, such as 2 (n-1)/n or (n-1)/(3m+n-1)."""
    python = re.sub(r"(\d) ?(?=[(mn])|v(?=m)", r"\g<0>*", formula.replace("^", "**"))
    return eval(python, numbers)


def waiting(rows, stages):
    """The share of a step that each rank waits, by its table of calls. B takes two turns."""
    turns = len(in_turns(rows, stages))
    return {round(1 - sum(1 + (op == "B") for op, _, _ in row) / turns, 12) for row in rows}


@pytest.mark.parametrize("n, m", [(2, 4), (3, 6), (4, 4)])
def test_a_rank_waits_the_share_of_the_docstring(n, m):
    formula = r"(\(n-1\)/\([\w+-]+\))"
    shares = dict(re.findall(rf"^ +(\w+) .* {formula}", docstring("pipeline_schedules"), flags=re.MULTILINE))
    assert list(shares) == ["gpipe", "1f1b", "zero_bubble"]
    interleaved, one_f_one_b = re.findall(formula, docstring("interleaved_pipeline"))
    [of_training] = re.findall(formula, docstring("train_pipeline"))
    for schedule, share in [*shares.items(), ("1f1b", one_f_one_b), ("gpipe", of_training)]:
        wanted = {round(value_of(share, n=n, m=m), 12)}
        assert waiting(rows_of_schedule(schedule, n, m), n) == wanted, (schedule, share)
    for v in (2, 3):
        wanted = {round(value_of(interleaved, n=n, m=m, v=v), 12)}
        assert waiting(rows_of_chunks(n, m, v), n * v) == wanted, interleaved


SENT = {  # recipe -> (the tensors of whose bytes "Moves:" names the share that each rank sends in a step, how often)
    **dict.fromkeys(("train_data_parallel", "ddp"), ("w0 w1", 1)),
    **dict.fromkeys(("fully_sharded", "zero_optimizer"), ("w0 w1", 2)),
    "gradient_accumulation": ("w0 w1", 2),  # micro-batches in eager mode
    "activation_checkpointing": ("w_up0 w_down0 w_up1 w_down1", 1),
    **dict.fromkeys(("all_gather_kv", "ulysses"), ("q", 1)),
    "train_tensor_parallel": ("y", 1),
    "elastic_training": ("w", 1),
    "ring_all_reduce": ("own", 1),
}


@pytest.mark.parametrize("name", SENT)
def test_a_rank_sends_the_share_of_the_docstring(name):
    tensors, times = SENT[name]
    moves = re.search(r"^Moves:.*?^Run:", docstring(name), flags=re.MULTILINE | re.DOTALL)[0]
    formulas = re.findall(r"((?:\d )?\(n-1\)/n(?:\^2)?) x ", moves)
    assert formulas
    for n in (2, 4):
        case = CASES[name](n)
        size = sum(case.values[tensor].exact.size for tensor in tensors.split())
        for formula in formulas:
            sends = np.divide(case.sends, times)
            np.testing.assert_allclose(sends, value_of(formula, n=n) * size, err_msg=formula)


@pytest.mark.parametrize("n", [2, 4])
def test_single_layer_sends_the_share_of_the_docstring(n):
    [share] = re.findall(r"((?:\d )?\(n-1\)/n) of its bytes leave each of n ranks", docstring("row_parallel"))
    boxing = theory.Boxing((4, 8), ("P", list(range(n))), ("B", list(range(n))))
    assert list(boxing.by_rank.values()) == pytest.approx([value_of(share, n=n) * boxing.size] * n)


COPIES = {  # function or class -> the recipes that have it
    **dict.fromkeys(
        ("CheckpointError", "Checkpoints", "from_rank_0", "crc_32", "fsync"),
        "checkpoint elastic_training gpt training_run",
    ),
    **dict.fromkeys(("is_there", "open_safetensors", "check_names", "own_slice", "copy"), "llama pytorch_weights"),
}


@pytest.mark.parametrize("function, names", COPIES.items())
def test_recipes_have_the_same_code(function, names):
    """Each is copied alone, so each has the code: what is mended in one must be mended in all."""
    texts = set()
    for name in names.split():
        [node] = [node for node in ast.parse(source(name)).body if getattr(node, "name", "") == function]
        texts.add(ast.get_source_segment(source(name), node))
    assert len(texts) == 1
