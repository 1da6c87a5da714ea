"""Formulas and tables in the docstrings of recipes are those of their cases, which are measured."""

import ast
import re
from types import SimpleNamespace

import pytest

from oneflow_cookbook.start.recipe import entry_options, path_of
from tests.cases import CASES
from tests.cases import gpt_meshes as gpt
from tests.cases.layouts import docstring

# Recipe -> what its docstring multiplies by, and the numbers of it on n ranks
FACTORS = {
    "activation_checkpointing": ("the bytes of the weights", 4 * 8 + 8 * 4 + 4 * 8 + 8 * 4),
    "train_data_parallel": ("the bytes of the weights", 4 * 8 + 8 * 4),
    "ddp": ("the bytes of the weights", 4 * 8 + 8 * 4),
    "fully_sharded": ("the weights", 4 * 8 + 8 * 4),
    "zero_optimizer": ("the weights", 4 * 8 + 8 * 4),
    "elastic_training": ("its bytes", 64 * 64),
    "gradient_accumulation": ("the weights", 4 * 8 + 8 * 4),
    "all_gather_kv": ("q", 8 * 2 * 4),
    "ulysses": ("q", 8 * 8 * 4),
}
FORMULA = r"(each )?(m x )?(\d+ )?\(n-1\)/n(\^2)? x {}(?: from|\.)"


def stated(name, n, graph):
    """The numbers that each rank sends in a step, by the docstring: in eager mode its first formula, else its last."""
    what, size = FACTORS[name]
    moves = " ".join(docstring(name).split()).partition("Moves: ")[2].partition(" Run: ")[0]
    found = list(re.finditer(FORMULA.format(re.escape(what)), moves))
    each, micro_batches, times, squared = found[-1 if graph else 0].groups()
    times = int(times or 1) * (2 if each else 1)  # "an all-gather ..., a reduce-scatter ...: each"
    if micro_batches:
        times *= entry_options(path_of(name))["micro_batches"]
    return times * (n - 1) / n ** (2 if squared else 1) * size


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", FACTORS)
def test_formula_in_the_docstring_is_what_a_step_sends(name, graph):
    for n in (2, 4):
        case = CASES[name](n, graph=graph)
        assert case.sends == pytest.approx([stated(name, n, graph)] * n)


KINDS = {  # row of the table in gpt.py's docstring -> kinds of tensors
    "ids": ["ids"],
    "activation, residual": ["activation", "residual"],
    "vocabulary": ["vocabulary"],
    "column weight": ["column"],
    "row weight": ["row"],
    "expert column weight": ["expert column"],
    "expert row weight": ["expert row"],
    "norms, positions": ["replicated"],
}


def tables(source):
    """The tables of layouts in gpt.py's code: {name: {kind of tensor: its SBPs}}."""
    sbp = SimpleNamespace(broadcast="B", split=lambda dim: f"S({dim})")
    names = {"flow": SimpleNamespace(sbp=sbp)}
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    found = {getattr(node.targets[0], "id", ""): ast.get_source_segment(source, node.value) for node in nodes}
    return [eval(found[name], names) for name in ("LAYOUT", "CONTEXT_PARALLEL", "SHARDED")]


def test_table_in_the_docstring_of_gpt_is_its_layout():
    """And that of the weights is what test_gpt.py measures."""
    source = path_of("gpt").read_text()
    plain, context_parallel, sharded = tables(source)
    rows = {}
    for line in docstring("gpt").splitlines():
        row = re.fullmatch(r" +(\S.*?) +\(.*?\)(?:, \(.*\))? +(\S+) +(\S+?)(?: +--([\w-]+): (\S+), (\S+))?", line)
        if row and row.group(1) != "kind of tensor":
            rows[row.group(1)] = row.groups()[1:]
    assert list(rows) == list(KINDS)
    in_words = {"context-parallel": {}, "shard-weights": {}}
    for row, (data, tensor, option, *changed) in rows.items():
        assert [plain[kind] for kind in KINDS[row]] == [(data, tensor)] * len(KINDS[row])
        if option:
            in_words[option].update(dict.fromkeys(KINDS[row], tuple(changed)))
    assert in_words == {"context-parallel": context_parallel, "shard-weights": sharded}
    [along_tensor] = re.findall(r"--sequence-parallel: the residual is (\S+) along tensor\.", docstring("gpt"))
    for layout, split in ((plain, False), (context_parallel, True)):
        sbps = gpt.activations({"context_parallel": split, "sequence_parallel": True})
        assert sbps["whole"] == ", ".join(layout["activation"])
        assert sbps["residual"] == f"{layout['activation'][0]}, {along_tensor}"
    assert all(gpt.SBPS[kind] == ", ".join(plain[kind]) for kind in gpt.SBPS)
    assert list(gpt.EXPERT_SBPS.values()) == [", ".join(plain[kind]) for kind in ("expert column", "expert row")]
    assert all(gpt.SHARDED[kind] == ", ".join(sharded[kind]) for kind in sharded)
