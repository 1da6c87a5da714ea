"""The chapter of single layers: what each recipe must show of one forward pass."""

import numpy as np

from harness.measure.sbp import NAMES as SBPS
from tests import reference
from tests.case import Case
from tests.reference import Value


def single_device(n, **sizes):
    layout = {name: ("local", []) for name in ("x", "w", "out")}
    return Case(layout, *one_layer(1, sizes))


def data_parallel(n, **sizes):
    ranks = list(range(n))
    layout = {"x": ("S(0)", ranks), "w": ("B", ranks), "out": ("S(0)", ranks)}
    return Case(layout, *one_layer(n, sizes))


def model_parallel(n, **sizes):
    ranks = list(range(n))
    layout = {"x": ("B", ranks), "w": ("S(1)", ranks), "out": ("S(1)", ranks)}
    return Case(layout, *one_layer(n, sizes))


def one_layer(n, sizes):
    values, _ = reference.one_layer(n, **sizes)
    return values, [("x", "w", "out")]


def row_parallel(n, **sizes):
    ranks = list(range(n))
    layout = {"x": ("S(1)", ranks), "w": ("S(0)", ranks), "partial": ("P", ranks), "out": ("B", ranks)}
    values, parts = reference.one_layer(n, **sizes)
    return Case(
        layout,
        values,
        [("x", "w", "partial")],
        parts,
        moves=[(("P", ranks), ("B", ranks))],
        moved={"out": "partial"},
        added=("out",),
    )


def pipeline_parallel(n, gain=1.0, **sizes):
    layers = reference.layers(n, gain=gain, **sizes)
    layout = {"x": ("B", [0]), **{f"w{k}": ("B", [k]) for k in range(n)}, "out": ("B", [n - 1])}
    operands = {name: ("B", [int(name[-1])], value.exact.shape) for name, value in layers.items()}
    return Case(
        layout,
        {**layers, "x": layers["x0"], "out": layers[f"out{n - 1}"]},
        [(operands[f"x{k}"], f"w{k}", operands[f"out{k}"]) for k in range(n)],
        moves=[(("B", [max(k - 1, 0)]), ("B", [k])) for k in range(n)],
        stages=[(k, [k]) for k in range(n)],
    )


def hybrid_parallel(n, **sizes):
    layout = {"x0": ("S(0)", [0, 1]), "w0": ("B", [0, 1]), "out0": ("S(0)", [0, 1])}
    layout.update({"x1": ("B", [2, 3]), "w1": ("S(1)", [2, 3]), "out1": ("S(1)", [2, 3])})
    return Case(
        layout,
        reference.layers(2, **sizes),
        [("x0", "w0", "out0"), ("x1", "w1", "out1")],
        moves=[(("S(0)", [0, 1]), ("S(0)", [0, 1])), (("S(0)", [0, 1]), ("B", [2, 3]))],
        stages=[(0, [0, 1]), (1, [2, 3])],
        moved={"x1": "out0"},
    )


def sbp_conversions(n, **sizes):
    ranks = list(range(n))
    case = cross_placement(n, source=ranks, target=ranks, **sizes)
    _, parts, rows, columns, first = reference.conversions(ranks, world_size=n, **sizes)
    case.parts.update({"P -> P": parts, "B -> P": first, ("S(0) -> P", False): rows, ("S(1) -> P", False): columns})
    case.parts.update({("S(0) -> P", True): first, ("S(1) -> P", True): first})
    return case


def cross_placement(n, source=(), target=(), **sizes):
    source, target = list(source or range(n // 2)), list(target or range(n // 2, n))
    [x], parts, *_ = reference.conversions(source, world_size=n, **sizes)
    layout = {sbp: (sbp, source) for sbp in SBPS}
    layout.update({f"{old} -> {new}": (new, target) for old in SBPS for new in SBPS})
    moves = [(("local", []), ("P", source))] + [((old, source), (new, target)) for old in SBPS for new in SBPS]
    return Case(layout, {name: x for name in layout}, parts={"P": parts}, moves=moves, drawn=SBPS)


# x, w -> out in equal sizes, and where x is three times larger or w: what OneFlow moves depends on it.
SIGNATURES = {
    "equal": [["B", "S(1)", "S(1)", "P"], ["S(0)"] * 4, ["S(0)", "P", "S(1)", "P"], ["P", "P", "S(1)", "P"]],
    "large x": [["B", "S(1)", "S(1)", "P"], ["S(0)"] * 4, ["S(0)", "P", "P", "P"], ["P", "P", "P", "P"]],
    "large w": [
        ["B", "S(1)", "S(1)", "P"],
        ["S(0)", "P", "S(1)", "P"],
        ["S(0)", "P", "S(1)", "P"],
        ["P", "P", "S(1)", "P"],
    ],
}


def matmul_signatures(n, seed=0, batch=4, in_features=4, out_features=4):
    ranks = list(range(n))
    values, _ = reference.one_layer(n, seed, batch, in_features, out_features)
    which = "large x" if batch > out_features else "large w" if batch < out_features else "equal"
    layout = {f"{name} {sbp}": (sbp, ranks) for name in "xw" for sbp in SBPS}
    signatures = {(x, w): SIGNATURES[which][i][j] for i, x in enumerate(SBPS) for j, w in enumerate(SBPS)}
    layout.update({f"{x} @ {w}": (out, ranks) for (x, w), out in signatures.items()})
    parts = {f"{name} P": [values[name]] + [Value.known(0 * values[name].exact)] * (n - 1) for name in "xw"}
    return Case(
        layout,
        {name: values["out" if "@" in name else name[0]] for name in layout},
        [(f"x {x}", f"w {w}", f"{x} @ {w}") for x in SBPS for w in SBPS],
        parts,
        added=tuple(f"{x} @ {w}" for x in SBPS for w in SBPS if "P" in (x, w, signatures[x, w])),
        drawn=tuple(f"x {sbp}" for sbp in SBPS),
    )


def two_d_sbp(n, **sizes):
    mesh = [[0, 1], [2, 3]]
    x, w, out, partial, parts = reference.mesh(**sizes)
    layout = {"x": "S(0), B", "w": "B, S(1)", "out": "S(0), S(1)", "partial": "P, S(0)", "gathered": "S(0), B"}
    layout.update({"reduced": "B, S(0)", "scattered": "S(1), S(0)", "swapped": "S(0), B"})
    values = {"x": x, "w": w, "out": out, "partial": partial, "gathered": out, "reduced": partial, "scattered": partial}
    moved = {"gathered": "out", "reduced": "partial", "scattered": "partial"}
    return Case(
        {name: (sbp, mesh) for name, sbp in layout.items()},
        {**values, "swapped": x},
        [("x", "w", "out"), ("out.T", "x", "partial")],
        {"partial": parts},
        moves=[((layout[old], mesh), (layout[new], mesh)) for new, old in moved.items()],
        moved=moved,
        added=("reduced", "scattered"),
    )


def global_and_local(n, seed=0, rows=4, columns=3):
    ranks = list(range(n))
    mine = np.arange(n * rows * columns, dtype=np.float64).reshape(n, rows, columns)
    sbps = {
        "rows": "S(0)",
        "columns": "S(1)",
        "total": "P",
        "first": "B",
        "sliced": "S(0)",
        "noise": "B",
        "blocks": "S(0)",
    }
    layout = {"mine": ("local", []), **{name: (sbp, ranks) for name, sbp in sbps.items()}}
    values = {"rows": np.concatenate(mine), "columns": np.concatenate(mine, axis=1), "total": mine.sum(axis=0)}
    values.update({"mine": mine[0], "first": mine[0], "sliced": mine[0], "block": mine[0], "read": values["total"]})
    local = [Value.known(own) for own in mine]
    made = [(("local", []), (sbps[name], ranks)) for name in ("rows", "columns", "total", "first")]
    return Case(
        {**layout, "block": ("local", []), "read": ("local", [])},
        {
            **{name: Value.known(exact) for name, exact in values.items()},
            **{name: Value.unknown(rows, columns) for name in ("noise", "blocks")},
        },
        parts={"mine": local, "block": local, "total": local},
        moves=[
            *made,
            (("B", ranks), ("S(0)", ranks)),
            (("P", ranks), ("P", ranks)),
            (("P", ranks), ("B", ranks)),
        ],  # numpy()
        drawn=tuple(sbps),
    )


CASES = {
    "single_device": single_device,
    "data_parallel": data_parallel,
    "model_parallel": model_parallel,
    "row_parallel": row_parallel,
    "pipeline_parallel": pipeline_parallel,
    "hybrid_parallel": hybrid_parallel,
    "sbp_conversions": sbp_conversions,
    "cross_placement": cross_placement,
    "matmul_signatures": matmul_signatures,
    "two_d_sbp": two_d_sbp,
    "global_and_local": global_and_local,
}
UNEVEN_TENSOR = {"rows": 7, "columns": 9, "seed": 1}
SIZES = {
    "sbp_conversions": {"even": {}, "uneven": UNEVEN_TENSOR},
    "global_and_local": {"even": {}, "uneven": UNEVEN_TENSOR},
    "cross_placement": {"even": {}, "uneven": UNEVEN_TENSOR},
    "two_d_sbp": {"even": {}, "other": {"batch": 8, "in_features": 12, "out_features": 20, "seed": 1}},
    "matmul_signatures": {
        "even": {},
        "uneven": {"batch": 7, "in_features": 7, "out_features": 7, "seed": 1},
    },
}

GRAPH_ONLY = set()
