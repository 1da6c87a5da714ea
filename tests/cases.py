"""The recipes as data: for each the layout that it must show. A new recipe adds a row here."""

from dataclasses import dataclass, field
from pathlib import Path

from harness.recipe import world_sizes
from tests import reference

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
PROVEN = (1, 2, 3, 4)  # world sizes at which every recipe that accepts them is proven
SIZES = {"even": {}, "uneven": {"batch": 7, "in_features": 6, "out_features": 9, "seed": 1}}


@dataclass
class Case:
    """What one recipe must do on one world size."""

    layout: dict  # name -> (SBP, ranks), in the order in which the recipe returns the tensors
    matmuls: list  # (x, w, out) by name, in the order of execution
    values: object  # a function of tests.reference
    moves: list = field(default_factory=list)  # (SBP, ranks) before and after each to_global, in order
    stages: list = field(default_factory=list)  # (number, ranks) that the graph sets
    sent: object = lambda rank, x, out: 0  # bytes that a rank sends, from the bytes of the first input and output
    added: tuple = ()  # outputs that an all-reduce adds up, in an order that eager and graph mode do not share


def single_device(n):
    return Case({name: ("local", []) for name in ("x", "w", "out")}, [("x", "w", "out")], reference.one_layer)


def data_parallel(n):
    ranks = list(range(n))
    layout = {"x": ("S(0)", ranks), "w": ("B", ranks), "out": ("S(0)", ranks)}
    return Case(layout, [("x", "w", "out")], reference.one_layer)


def model_parallel(n):
    ranks = list(range(n))
    layout = {"x": ("B", ranks), "w": ("S(1)", ranks), "out": ("S(1)", ranks)}
    return Case(layout, [("x", "w", "out")], reference.one_layer)


def row_parallel(n):
    ranks = list(range(n))
    layout = {"x": ("S(1)", ranks), "w": ("S(0)", ranks), "partial": ("P", ranks), "out": ("B", ranks)}
    return Case(
        layout,
        [("x", "w", "partial")],
        reference.one_layer,
        moves=[(("P", ranks), ("B", ranks))],
        sent=lambda rank, x, out: 2 * (n - 1) / n * out,  # ring all-reduce
        added=("out",),
    )


def pipeline_parallel(n):
    layout = {f"{name}{k}": ("B", [k]) for k in range(n) for name in ("x", "w", "out")}
    matmuls = [(f"x{k}", f"w{k}", f"out{k}") for k in range(n)]
    moves = [(("B", [max(k - 1, 0)]), ("B", [k])) for k in range(n)]

    def sent(rank, x, out):  # widths are in, out, 3, out, 3, ...: at the sizes of the test the 3 columns are nothing
        return out if rank % 2 == 0 and rank < n - 1 else 0

    return Case(layout, matmuls, reference.layers, moves, stages=[(k, [k]) for k in range(n)], sent=sent)


def hybrid_parallel(n):
    layout = {"x0": ("S(0)", [0, 1]), "w0": ("B", [0, 1]), "out0": ("S(0)", [0, 1])}
    layout.update({"x1": ("B", [2, 3]), "w1": ("S(1)", [2, 3]), "out1": ("S(1)", [2, 3])})
    matmuls = [("x0", "w0", "out0"), ("x1", "w1", "out1")]
    moves = [(("S(0)", [0, 1]), ("S(0)", [0, 1])), (("S(0)", [0, 1]), ("B", [2, 3]))]
    stages = [(0, [0, 1]), (1, [2, 3])]

    def sent(rank, x, out):  # each row of out0 goes to two ranks
        return out if rank in (0, 1) else 0

    return Case(layout, matmuls, lambda n, **sizes: reference.layers(2, **sizes), moves, stages, sent)


CASES = {
    "single_device": single_device,
    "data_parallel": data_parallel,
    "model_parallel": model_parallel,
    "row_parallel": row_parallel,
    "pipeline_parallel": pipeline_parallel,
    "hybrid_parallel": hybrid_parallel,
}


def runs():
    """Every (recipe, world size, graph or not, name of the sizes) that must hold."""
    for name in CASES:
        for n in PROVEN:
            if n in world_sizes(RECIPES / f"{name}.py"):
                for graph in (False, True):
                    for sizes in SIZES:
                        yield name, n, graph, sizes


def run_id(run):
    name, n, graph, sizes = run
    return f"{name}-{n}-{'graph' if graph else 'eager'}-{sizes}"
