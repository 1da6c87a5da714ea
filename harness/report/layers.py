"""docs/layers.md: what each ready-made layer does under each layout, and what it must send."""

import re
from typing import NamedTuple

import numpy as np

from harness.pool import PoolError
from harness.start.recipe import HARNESS, path_of

RUN = f"{HARNESS / 'measure' / 'layers.py'}:run"
CONTROL = 60_000  # bytes of OneFlow's own messages for a step, at most
ROUNDING = 1e-5  # the norm of 400,000 gradients is off by 6e-6 in a graph, which adds in another order

# What all p ranks send for a collective, in units of its tensor. From or to S(1) eager mode adds an all-to-all.
FORMULAS = {
    "all-gather": lambda p: p - 1,
    "reduce-scatter": lambda p: p - 1,
    "all-reduce": lambda p: 2 * (p - 1),
    "all-to-all": lambda p: (p - 1) / p,
    "all-gather from S(1)": lambda p: (p - 1) + (p - 1) / p,
    "reduce-scatter to S(1)": lambda p: (p - 1) + (p - 1) / p,
}


class Kind(NamedTuple):
    """A layer of oneflow.nn. From sizes `options` makes its arguments, and `shape` the shape of x.

    units: the large tensors, W is all parameters together. sizes: as many as units, so that what was sent tells how
    much of each moved. small: the sizes at which the values are compared with numpy.
    """

    options: object
    shape: object
    units: tuple
    sizes: list
    small: tuple


PLAIN = Kind(lambda n, m: {}, lambda n, m: (n, m), ("x",), [(512, 1024)], (12, 6))
NORM = Kind(None, lambda n, m: (n, m), ("x", "W"), [(8, 65536), (16, 65536)], (12, 6))
KINDS = {
    "Linear": Kind(
        lambda n, i, o: {"in_features": i, "out_features": o},
        lambda n, i, o: (n, i),
        ("x", "W", "out"),
        [(512, 512, 768), (1024, 512, 768), (512, 1024, 768)],
        (12, 6, 18),
    ),
    "Embedding": Kind(
        lambda n, v, m: {"num_embeddings": v, "embedding_dim": m},
        lambda n, v, m: (n,),
        ("W", "out"),
        [(512, 768, 512), (1024, 768, 512)],
        (12, 18, 6),
    ),
    "LayerNorm": NORM._replace(options=lambda n, m: {"normalized_shape": m}),
    "Conv2d": Kind(
        lambda n, i, o, side: {"in_channels": i, "out_channels": o, "kernel_size": 3, "padding": 1},
        lambda n, i, o, side: (n, i, side, side),
        ("x", "W", "out"),
        [(8, 128, 192, 16), (16, 128, 192, 16), (8, 256, 192, 16)],
        (6, 6, 12, 3),
    ),
    "BatchNorm1d": NORM._replace(options=lambda n, m: {"num_features": m}),
    "BatchNorm2d": NORM._replace(options=lambda n, m: {"num_features": m}, shape=lambda n, m: (n, m, 1, 2)),
    "ReLU": PLAIN,
    "GELU": PLAIN,
    "Dropout": PLAIN,
    "CrossEntropyLoss": PLAIN,
    "LSTM": Kind(
        lambda n, i, o: {"input_size": i, "hidden_size": o},
        lambda n, i, o: (4, n, i),
        ("x", "W", "out"),
        [(64, 512, 512), (128, 512, 512), (64, 1024, 512)],
        (6, 4, 6),
    ),
}


class Cell(NamedTuple):
    """One layout. x: the SBP of the input; sbps: those of the parameters that are not B; moves: {phase: {unit:
    "2 all-to-all, all-reduce"}}; more: the SBP of targets or of h0; how: see measure/layers.py."""

    x: str
    sbps: dict = {}
    moves: dict = {}
    more: str = "B"
    how: str = None


SPLIT = {"weight": "S(0)", "bias": "S(0)"}
OUT_OF_ROW = {"forward": {"x": "reduce-scatter"}, "backward": {"x": "all-gather"}}
DATA = Cell("S(0)", {}, {"backward": {"W": "all-reduce"}})
GATHERED = {"forward": {"W": "all-gather"}, "backward": {"W": "reduce-scatter"}}
SHARDED = Cell("S(0)", {}, GATHERED, how=f"{path_of('fully_sharded_module')}:shard")
TENSOR_PARALLEL = path_of("tensor_parallel_module")
LINEAR = {
    "data": [DATA],
    "column": [Cell("B", SPLIT, {"backward": {"x": "all-reduce"}})],
    "row": [Cell("S(1)", {"weight": "S(1)"})],
    "sharded": [SHARDED],
}
BATCH_NORM = {
    "data": [DATA],
    "column": [
        Cell("B", SPLIT, {"forward": {"W": "all-gather"}, "backward": {"W": "0.5 all-gather"}}),
        Cell(
            "S(1)",
            SPLIT,
            {
                "forward": {"x": "all-to-all", "W": "all-gather"},
                "backward": {"x": "2 all-to-all", "W": "0.5 all-gather, reduce-scatter"},
            },
        ),
    ],
    "row": [Cell("S(1)", {}, {"forward": {"x": "all-to-all"}, "backward": {"x": "2 all-to-all", "W": "all-reduce"}})],
    "sharded": [SHARDED],
}
ROWS = {  # (title, kind) -> {column: [Cell]}
    ("Linear", "Linear"): LINEAR,
    ("Linear as Column, Row", "Linear"): {
        "column": [LINEAR["column"][0]._replace(how=f"{TENSOR_PARALLEL}:Column")],
        "row": [Cell("S(1)", {"weight": "S(1)"}, {"forward": {"out": "all-reduce"}}, how=f"{TENSOR_PARALLEL}:Row")],
    },
    ("Embedding", "Embedding"): {
        "data": [DATA],
        "column": [Cell("B", {"weight": "S(0)"})],
        "row": [Cell("B", {"weight": "S(1)"})],
        "sharded": [SHARDED],
    },
    ("LayerNorm", "LayerNorm"): {
        "data": [DATA],
        "column": [
            Cell("B", SPLIT, {"forward": {"W": "all-gather"}, "backward": {"W": "1.5 all-gather"}}),
            Cell("S(1)", SPLIT, {"forward": {"x": "all-gather from S(1)"}}),
        ],
        "row": [
            Cell(
                "S(1)",
                {},
                {
                    "forward": {"x": "all-gather from S(1), all-to-all"},
                    "backward": {"x": "4 all-to-all", "W": "all-reduce"},
                },
            ),
            Cell(
                "P",
                {},
                {
                    "forward": {"x": "reduce-scatter, all-reduce"},
                    "backward": {"x": "5 all-gather, 5 all-to-all", "W": "all-reduce"},
                },
            ),
        ],
        "sharded": [SHARDED],
    },
    ("Conv2d", "Conv2d"): {
        "data": [DATA],
        "column": [Cell("B", SPLIT, {"forward": {"W": "all-gather"}, "backward": {"W": "all-gather"}})],
        "row": [
            Cell(
                "S(1)",
                {"weight": "S(1)"},
                {
                    "forward": {"x": "all-to-all", "W": "all-gather from S(1)"},
                    "backward": {"x": "3 all-to-all", "W": "all-gather from S(1), reduce-scatter to S(1)"},
                },
            )
        ],
        "sharded": [SHARDED],
    },
    ("BatchNorm1d", "BatchNorm1d"): BATCH_NORM,
    ("BatchNorm2d", "BatchNorm2d"): BATCH_NORM,
    ("ReLU", "ReLU"): {"data": [Cell("S(0)")], "row": [Cell("S(1)"), Cell("P", {}, OUT_OF_ROW)]},
    ("GELU", "GELU"): {
        "data": [Cell("S(0)")],
        "row": [
            Cell("S(1)"),
            Cell("P", {}, {**OUT_OF_ROW, "backward": {"x": "reduce-scatter, all-gather"}}),
        ],
    },
    ("Dropout", "Dropout"): {"data": [Cell("S(0)")], "row": [Cell("S(1)"), Cell("P", {}, OUT_OF_ROW)]},
    ("CrossEntropyLoss", "CrossEntropyLoss"): {
        "data": [Cell("S(0)", more="S(0)")],
        "row": [Cell("S(1)", {}, {"forward": {"x": "2 all-to-all"}, "backward": {"x": "3 all-to-all"}})],
    },
    ("LSTM, h0 S(1)", "LSTM"): {
        "data": [Cell("S(1)", {}, {"backward": {"W": "all-reduce", "out": "all-to-all"}}, more="S(1)")],
        "sharded": [
            SHARDED._replace(
                x="S(1)", more="S(1)", moves={**GATHERED, "backward": {"W": "reduce-scatter", "out": "all-to-all"}}
            )
        ],
    },
    ("clip_grad_norm_", "clipped Linear"): {
        "data": LINEAR["data"],
        "column": [LINEAR["column"][0]._replace(moves={"clip": {"W": "all-gather"}})],
        "row": [LINEAR["row"][0]._replace(moves={"clip": {"W": "all-gather from S(1)"}})],
        "sharded": [SHARDED._replace(moves={"clip": {"W": "all-gather"}})],
    },
}


def cells():
    """((title, column, number), kind, Cell) of each run."""
    for (title, kind), columns in ROWS.items():
        for column, several in columns.items():
            for number, cell in enumerate(several):
                yield (title, column, number), kind, cell


def call(pool, kind, cell, sizes, **more):
    """What a run of a cell returns on each rank."""
    name = kind.split()[-1]
    layer = {"kind": name, "options": KINDS[name].options(*sizes), "shape": KINDS[name].shape(*sizes)}
    layout = {field: value for field, value in cell._asdict().items() if field != "moves"}
    return pool.call(RUN, **layer, layout=layout, clip=kind != name, **more)


def sizes_of(kind):
    return KINDS[kind].sizes if kind in KINDS else KINDS["Linear"].sizes[:1]


def phases(kind):
    """What is measured by itself. The moves of the layer whose gradients are clipped are those of the layer."""
    return ["forward", "backward"] if kind in KINDS else ["clip"]


def sent(by_rank, phase):
    """The bytes that all ranks sent."""
    return sum(one["sent"][phase] for one in by_rank)


def formula(cell, phase, unit, p):
    """What p ranks must send of a unit, in units."""
    found = collectives(cell.moves.get(phase, {}).get(unit, ""))
    return sum(times * FORMULAS[collective](p) for times, collective in found)


def collectives(words):
    """[(how often, collective)] of "2 all-to-all, all-reduce"."""
    parts = [re.fullmatch(r"(?:([\d.]+) )?(.+)", part).groups() for part in filter(None, words.split(", "))]
    return [(float(times or 1), collective) for times, collective in parts]


def measured_on(pool):
    """{key of a cell: what was found}, of which layers_page.py makes the table."""
    return {key: measured_cell(pool, kind, cell) for key, kind, cell in cells()}


def measured_cell(pool, kind, cell):
    """{"sbp", "wrong": whether values are, "sent": {phase: {unit: multiple}}, "graph"}.

    "graph" is None where a graph sends in all what eager mode does; otherwise what it sends, or in words how it ends.
    """
    clipped = kind not in KINDS
    units, sizes = ("W",) if clipped else KINDS[kind].units, sizes_of(kind)
    runs = [call(pool, kind, cell, one) for one in sizes]
    found = {phase: in_units(runs, units, [sent(run, phase) for run in runs]) for phase in phases(kind)}
    result = {"sbp": runs[0][0]["sbp"], "sent": found, "wrong": is_wrong(runs[0]), "graph": None}
    before = [sent(run, "forward") + sent(run, "backward") for run in runs]
    try:
        graphs = [call(pool, kind, cell, sizes[0], graph=True)]
    except PoolError as error:
        return {**result, "graph": "aborts" if error.signal else "is refused"}
    assert is_wrong(graphs[0]) == result["wrong"] and graphs[0][0]["sbp"] == result["sbp"], (kind, cell)
    if clipped or not near(sent(graphs[0], "graph"), before[0]):
        graphs += [call(pool, kind, cell, one, graph=True) for one in sizes[1:]]
        more = [sent(run, "graph") - clipped * old for run, old in zip(graphs, before)]
        result["graph"] = in_units(graphs, units, more)
    return result


def is_wrong(by_rank):
    return any(max(one["off"].values()) > ROUNDING or one["same mask"] for one in by_rank)


def near(sent, wanted):
    """Within 2 % and OneFlow's own messages."""
    return abs(sent - wanted) <= 0.02 * wanted + CONTROL


def in_units(runs, units, totals):
    """{unit: multiple} that gives these totals, in bytes, for the sizes of these runs."""
    sizes = [[by_rank[0]["sizes"][unit] for unit in units] for by_rank in runs]
    return dict(zip(units, np.linalg.solve(sizes, totals)))
