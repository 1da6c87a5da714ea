"""The chapters of single layers and of layouts: the forward pass of each recipe."""

import numpy as np

from oneflow_cookbook.measure.sbp import NAMES as SBPS
from tests.cases import reference
from tests.cases.layouts import LOCAL
from tests.cases.recipe_case import (
    NOT_SQUARE,
    Case,
    Main,
    case_of_recipe,
    shares,
)
from tests.cases.reference import Value

UNEVEN_LAYERS = {"batch": 7, "in_features": 6, "hidden_size": 10, "out_features": 9, "seed": 1}
UNEVEN_TENSOR = {"rows": 7, "columns": 9, "seed": 1}


def work_of(values):
    """The floating-point operations of x @ w."""
    return 2 * values["x"].exact.size * values["w"].exact.shape[1]


@case_of_recipe(
    main=Main(
        prints=[
            "[0] x (4, 5) on cpu:0",
            "[0] w (5, 8) on cpu:0",
            "[0] out (4, 8) on cpu:0",
            "[0] out equals x @ w in numpy",
        ],
    )
)
def single_device(n, graph=False, **sizes):
    values = reference.one_layer(**sizes)
    return Case(values, [work_of(values)], sends=[0])


@case_of_recipe(
    main=Main(
        prints=["[0] out is oneflow.sbp.split(dim=0) and equals x @ w on a single device"],
    )
)
def data_parallel(n, graph=False, **sizes):
    values = reference.one_layer(**sizes)
    batch = len(values["x"].exact)
    return Case(values, shares(n, batch, work_of(values) / batch), sends=[0] * n)


@case_of_recipe(
    main=Main(
        prints=["[0] out is oneflow.sbp.split(dim=1) and equals x @ w on a single device"],
    )
)
def model_parallel(n, graph=False, **sizes):
    values = reference.one_layer(**sizes)
    columns = values["w"].exact.shape[1]
    return Case(values, shares(n, columns, work_of(values) / columns), sends=[0] * n)


@case_of_recipe(
    main=Main(
        prints=["[0] out is oneflow.sbp.broadcast and equals x @ w on a single device"],
    )
)
def row_parallel(n, graph=False, matmul_scale=1.0, **sizes):
    values = reference.one_layer(matmul_scale=matmul_scale, **sizes)
    x, w, out = values.values()
    return Case(
        {**values, "partial": out},
        shares(n, len(w.exact), work_of(values) / len(w.exact)),
        parts={"partial": [matmul_scale * (x[:, part] @ w[part]) for part in reference.rows_of(len(w.exact), n)]},
    )


@case_of_recipe(
    {"uneven": UNEVEN_LAYERS},
    main=Main(
        prints=["[0] out is oneflow.sbp.broadcast on rank 1 and equals x @ w0 @ w1 ... on a single device"],
    ),
)
def pipeline_parallel(n, graph=False, **sizes):
    layers, weights = reference.layers(n, **sizes), [f"w{k}" for k in range(n)]
    return Case(
        {**{w: layers[w] for w in weights}, "x": layers["x0"], "out": layers[f"out{n - 1}"]},
        [2 * len(layers["x0"].exact) * layers[w].exact.size for w in weights],
        {**{w: ("B", [k]) for k, w in enumerate(weights)}, "out": ("B", [n - 1])},
        stages=[(k, [k]) for k in range(n)],
    )


@case_of_recipe(
    {"uneven": UNEVEN_LAYERS},
    main=Main(
        prints=["[0] out1 is oneflow.sbp.split(dim=1) on ranks 2 3 and equals x0 @ w0 @ w1 on a single device"],
    ),
)
def hybrid_parallel(n, graph=False, **sizes):
    values = reference.layers(2, **sizes)
    batch, (hidden, columns) = len(values["x0"].exact), values["w1"].exact.shape
    return Case(
        values,
        shares(2, batch, 2 * values["w0"].exact.size) + shares(2, columns, 2 * batch * hidden),
        {"out0": ("S(0)", [2, 3])} if graph else {},  # set_stage moves it before the second stage sees it
        stages=[(0, [0, 1]), (1, [2, 3])],
    )


@case_of_recipe(
    {"uneven": UNEVEN_TENSOR},
    shares_moves=True,
    main=Main(
        on_cpu=1,
        prints=[
            "[0] sum of the block on each rank: B has that of x everywhere; S(0), S(1) and P add up to it",
            "[0] each of the 16 equals x = sum(parts) on a single device",
        ],
    ),
)
def sbp_conversions(n, graph=False, ranks=None, **sizes):
    ranks = ranks or list(range(n))
    case = cross_placement(n, source=ranks, target=ranks, **sizes)
    _, parts, rows, columns, first = reference.conversions(ranks, world_size=n, **sizes)
    case.parts.update({"P -> P": parts, "B -> P": first})
    case.parts.update({"S(0) -> P": first if graph else rows, "S(1) -> P": first if graph else columns})
    return case


def placement_sizes(n):
    """Pairs of placements besides the two halves of the ranks."""
    others = {
        2: {"one to two": ([0], [0, 1]), "two to one": ([0, 1], [0])},
        3: {"one in common": ([0, 1], [1, 2]), "two to another": ([0, 1], [2])},
        4: {
            "growing": ([0, 1], [0, 1, 2, 3]),
            "shrinking": ([0, 1, 2, 3], [0, 1]),
            "overlapping": ([0, 1, 2], [1, 2, 3]),
        },
    }
    sizes = {name: {"source": source, "target": target} for name, (source, target) in others[n].items()}
    return {"uneven": UNEVEN_TENSOR, **sizes}


@case_of_recipe(
    placement_sizes,
    shares_moves=True,
    main=Main(
        on_cpu=1,
        prints=[
            "[0] sum of the block on each rank, 0 for none: of x, then of its conversions on the other ranks",
            "[0] each of the 16 equals x = sum(parts) on a single device",
        ],
    ),
)
def cross_placement(n, graph=False, source=(), target=(), **sizes):
    source, target = list(source or range(n // 2)), list(target or range(n // 2, n))
    [x], parts, *_ = reference.conversions(source, world_size=n, **sizes)
    pairs = [(old, new) for old in SBPS for new in SBPS]
    layout = {sbp: (sbp, source) for sbp in SBPS}
    layout.update({f"{old} -> {new}": (new, target) for old, new in pairs})
    return Case(dict.fromkeys(layout, x), layout=layout, parts={"P": parts})


# The SBP of out: a row for each SBP of x, a column for each of w. It depends on the sizes, as OneFlow moves what is
# smaller; "large" is three times as large.
SIGNATURES = {
    "equal": [["B", "S(1)", "S(1)", "P"], ["S(0)"] * 4, ["S(0)", "P", "S(1)", "P"], ["P", "P", "S(1)", "P"]],
    "large x": [["B", "S(1)", "S(1)", "P"], ["S(0)"] * 4, ["S(0)", "P", "P", "P"], ["P", "P", "P", "P"]],
    "large w": [["B", "S(1)", "S(1)", "P"], *[["S(0)", "P", "S(1)", "P"]] * 2, ["P", "P", "S(1)", "P"]],
}


def signature_sizes(n):
    larger = {"large x": {"batch": 36}, "large w": {"out_features": 36}}
    return {"uneven": {"batch": 7, "in_features": 7, "out_features": 7, "seed": 1}, **(larger if n == 2 else {})}


@case_of_recipe(
    signature_sizes,
    measured_at=dict(batch=720, in_features=720, out_features=720),
    main=Main(
        prints=[
            "[0] the SBP of x @ w, a row for each SBP of x, a column for each of w",
            "[0] x, w     B  S(0)  S(1)     P",
            "[0] B        B  S(1)  S(1)     P",
            "[0] S(0)  S(0)  S(0)  S(0)  S(0)",
            "[0] S(1)  S(0)     P  S(1)     P",
            "[0] P        P     P  S(1)     P",
            "[0] each of the 16 equals x @ w on a single device",
        ],
    ),
)
def matmul_signatures(n, graph=False, seed=0, batch=4, in_features=4, out_features=4, matmul_scale=1.0):
    pairs = [(x, w) for x in SBPS for w in SBPS]
    values = reference.one_layer(seed, batch, in_features, out_features, matmul_scale)
    which = "large x" if batch > out_features else "large w" if batch < out_features else "equal"
    layout = {f"{name} {sbp}": sbp for name in "xw" for sbp in SBPS}
    layout.update({f"{x} @ {w}": out for (x, w), out in zip(pairs, sum(SIGNATURES[which], []))})
    return Case(
        {name: values["out" if "@" in name else name[0]] for name in layout},
        layout=layout,
        parts={f"{name} P": [values[name]] + [Value(0 * values[name].exact)] * (n - 1) for name in "xw"},
    )


@case_of_recipe(
    {"other": {"batch": 8, "in_features": 12, "out_features": 20, "seed": 1}},
    main=Main(
        prints=["[0] out, rows and columns equal x @ w on a single device"],
        refused_expressions=[
            f"run({mesh}, {size}=6)"
            for mesh in ("placements('cpu', 4)", *(f"flow.placement('cpu', {ranks})" for ranks in NOT_SQUARE))
            for size in ("batch", "in_features", "out_features")
        ],
    ),
)
def two_d_sbp(n, graph=False, matmul_scale=1.0, **sizes):
    values = reference.one_layer(matmul_scale=matmul_scale, **{"in_features": 4, **sizes})
    values.update(dict.fromkeys(("rows", "columns"), values["out"]))
    return Case(values, [work_of(values) / 4] * 4, ranks=[[0, 1], [2, 3]])


@case_of_recipe(
    {"uneven": {"batch": 7, "in_features": 9}},
    main=Main(
        comparisons=5,
        prints=[
            "[0] local (4, 3), last row [ 9. 10. 11.]",
            "[0] rows and columns are the ranks' tensors concatenated, total is their sum, first that of rank 0",
            "[1] local (4, 3), last row [21. 22. 23.]",
        ],
    ),
)
def global_and_local(n, graph=False, batch=4, in_features=3):
    own = np.arange(n * batch * in_features, dtype=np.float64).reshape(n, batch, in_features)
    values = {"rows": np.concatenate(own), "columns": np.concatenate(own, axis=1), "total": own.sum(axis=0)}
    values.update({"value": values["total"], **dict.fromkeys(("local", "first", "sliced", "block"), own[0])})
    return Case(
        {name: Value(exact) for name, exact in values.items()},
        layout=dict.fromkeys(("local", "block", "value"), LOCAL),
        parts=dict.fromkeys(("local", "block", "total"), [Value(tensor) for tensor in own]),
    )
