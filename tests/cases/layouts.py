"""The layout of each tensor of a recipe: from the table in its docstring, from its case, and by rules."""

import ast
import re
from functools import lru_cache
from typing import NamedTuple

from oneflow_cookbook.start.recipe import path_of

LOCAL = ("local", [])
FOLLOWS = r"new (\S+)|(\S+) (?:grad|exp_avg|exp_avg_sq|momentum_buf)"  # what is laid out as the weight in parentheses


class Row(NamedTuple):
    """Of a table: the shape, what each rank holds in words, the SBP, and its ranks where others hold nothing."""

    shape: tuple
    cells: list
    sbp: str
    ranks: list


@lru_cache(maxsize=None)
def docstring(name):
    return ast.get_docstring(ast.parse(path_of(name).read_text()))


@lru_cache(maxsize=None)
def table(name):
    """{tensor: Row} of the table in the docstring of a recipe, on the first number of ranks in its WORLD_SIZES."""
    rows = {}
    for line in docstring(name).splitlines():
        row = re.match(r" +(\S.*?) +\((\d+(?:, \d+)*)\) +(\S.*)", line)
        if row:
            words, shape, (*cells, sbp) = *row.groups()[:2], re.split(r"  +", row.group(3).strip())
            if sbp.startswith("whole, "):  # a local tensor, of which each rank has its own
                cells, sbp = [*cells, sbp], "local"
            ranks = [rank for rank, cell in enumerate(cells) if cell != "nothing"]
            tensor = words.split(" ")[0] if " = " in words else words
            rows[tensor] = Row(tuple(map(int, shape.split(", "))), cells, sbp, ranks if "nothing" in cells else None)
    return rows


def laid_out(name, case, n, graph):
    """{tensor: (SBP, ranks)} of the values of a case.

    What the case gives comes first, then the table. Else a parameter after training, its gradient and the moments of
    an optimizer are as the parameter is before; a gradient in a graph as `in_a_graph` says; losses are plain numbers.
    A graph with micro-batches returns no gradients.
    """
    rows, ranks = table(name), case.ranks or list(range(n))

    def layout_of(tensor):
        is_gradient, of_weight = tensor.endswith(" grad"), re.fullmatch(FOLLOWS, tensor)
        if tensor in case.layout:
            return (case.layout[tensor], ranks) if isinstance(case.layout[tensor], str) else case.layout[tensor]
        if tensor in rows and not (graph and is_gradient):  # which is drawn as in eager mode
            row = rows[tensor]
            return LOCAL if row.sbp == "local" else (row.sbp, row.ranks or ranks)
        if tensor.endswith("losses"):
            return LOCAL
        assert of_weight, f"{tensor} has no row in the docstring of {name}.py, and no layout in its case"
        sbp, own_ranks = layout_of(of_weight.group(1) or of_weight.group(2))
        return (in_a_graph(sbp, batch) if graph and is_gradient else sbp), own_ranks

    batch = next((layout_of(tensor)[0] for tensor in ("x", "ids") if tensor in case.values), "B")
    without = " grad" if graph and case.micro_batches > 1 else "nothing"
    return {tensor: layout_of(tensor) for tensor in case.values if not tensor.endswith(without)}


def in_a_graph(sbp, batch):
    """The SBP of a gradient in a graph, before its all-reduce: P where the batch is split and the weight is not."""
    axes = zip(sbp.split(", "), batch.split(", "))
    return ", ".join("P" if own == "B" and of_batch.startswith("S") else own for own, of_batch in axes)
