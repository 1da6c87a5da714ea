"""recipes/transformer/gpt.py on all meshes: the runs of docs/gpt.md, and what is asserted of any run."""

from collections import Counter
from functools import lru_cache

import numpy as np

from harness.measure import megatron
from harness.measure.sent import between_ranks
from harness.start.recipe import path_of
from tests.cases import ROOT, reference, reference_gpt
from tests.cases.ladder import Checks

TRAINED = f"{ROOT / 'tests' / 'on_rank_gpt.py'}:trained"
MESHES = [
    (data, tensor, pipeline)
    for data in (1, 2, 4)
    for tensor in (1, 2, 4)
    for pipeline in (1, 2, 4)
    if data * tensor * pipeline <= 4
]
SIZES = {"batch": 16, "length": 32, "layers": 4, "width": 128, "heads": 4}  # large enough for the formulas of bytes
LAYOUTS = {  # options and steps, by their names in docs/gpt.md
    "plain": {"steps": 50, "sample": 40},
    "sequence parallel": {"steps": 4, "sequence_parallel": True},
    "sharded weights": {"steps": 4, "shard_weights": True},
}
ROWS = [  # of the page's table: each layout on the meshes where it differs from the plain one
    (mesh, layout)
    for mesh in MESHES
    for layout in LAYOUTS
    if layout == "plain" or mesh[1 if layout == "sequence parallel" else 0] > 1
]
SMALL = {"batch": 8, "length": 8, "layers": 2, "width": 16, "heads": 4}
RUNS = [  # of the default suite: data, tensor, pipeline, and what else
    ((2, 1, 1), {"shard_weights": True, "micro_batches": 2, "clip": 0.5}),
    ((1, 2, 1), {"graph": True, "sequence_parallel": True, "micro_batches": 2}),
    ((1, 1, 2), {"graph": True, "micro_batches": 4}),
]
wanted = lru_cache(maxsize=None)(reference_gpt.trained)

KINDS = {"tokens": "vocabulary", "qkv": "column", "project": "row", "up": "column", "down": "row"}
SBPS = {"vocabulary": ("B", "S(0)"), "column": ("B", "S(1)"), "row": ("B", "S(0)"), "whole": ("B", "B")}
MATMULS = {  # the SBPs of x, of w and of the product, on each mesh: columns, attention by heads, rows
    ("S(1), B", "B, S(1)", "S(1), S(2)"),
    ("S(0), S(1)", "S(0), S(1)", "S(0), S(1)"),
    ("S(1), S(2)", "B, S(0)", "S(1), P"),
}
SHARDED = {"vocabulary": ("S(1)", "S(0)"), "column": ("S(0)", "S(1)"), "row": ("S(1)", "S(0)"), "whole": ("B", "B")}


def mesh_of(mesh):
    """The arguments of `run` for (data, tensor, pipeline)."""
    return dict(zip(("data", "tensor", "pipeline"), mesh))


def prove(pool, path, mesh, **more):
    """Two small steps of the recipe, or of a changed one, on a mesh."""
    seen = pool.call(TRAINED, path=str(path), steps=2, sample=9, **mesh_of(mesh), **more, **SMALL)
    check(seen, wanted(steps=2, sample=9, clip=more.get("clip", 0.0), **SMALL), mesh, SMALL["layers"], **more)


def row_run(pool, mesh, layout, graph, **shorter):
    """Make the run of a row on a pool, check it and return its figures, as data. shorter: other steps and sample."""
    given = {**LAYOUTS[layout], **shorter}
    seen = pool.call(TRAINED, path=str(path_of("gpt")), graph=graph, **mesh_of(mesh), **given, **SIZES)
    exact = known(layout, **shorter)
    check(seen, exact, mesh, SIZES["layers"], mesh, layout, **given)
    return {"mesh": mesh, "layout": layout, "graph": graph, **facts(seen, exact, mesh)}


def known(layout, **shorter):
    """What numpy finds for a row."""
    given = {"sample": 0, **LAYOUTS[layout], **shorter}
    return wanted(steps=given["steps"], sample=given["sample"], **SIZES)


def facts(seen, exact, mesh):
    """The figures of a run: how far it is from numpy, what moved along each axis in a step, what a rank keeps."""
    first = seen[0]
    off = first["tensors"]["losses"]["value"] - exact["losses"]
    gradients = [
        np.abs(first["moments"][name] / 0.1 - gradient).max() / np.abs(gradient).max()
        for name, gradient in exact["first"].items()
    ]
    moved = dict.fromkeys((*megatron.AXES, "others"), 0)
    for ranks, count in sent_in_a_step(seen).items():
        moved[axis_of(mesh, *ranks)] += count
    most = max((result["kept"] for result in seen), key=lambda kept: sum(kept.values()))
    moved = {axis: round(count) for axis, count in moved.items()}
    return {"off": off.tolist(), "gradient": max(gradients), "moved": moved, "kept": most}


def sent_in_a_step(seen):
    """The bytes between two ranks, by (from, to): half of what two steps sent."""
    before, after = ([result["sent"][step] for result in seen] for step in sorted(seen[0]["sent"]))
    return {ranks: count / 2 for ranks, count in between_ranks(before, after).items()}


def axis_of(mesh, *ranks):
    """The axis along which two ranks differ: of several, the pipeline's, else none of them."""
    data, tensor, pipeline = mesh
    here, there = (np.unravel_index(rank, (pipeline, data, tensor)) for rank in ranks)
    if here[0] != there[0]:
        return "pipeline"
    axes = [axis for axis, one, other in zip(("data", "tensor"), here[1:], there[1:]) if one != other]
    return axes[0] if len(axes) == 1 else "others"


@lru_cache(maxsize=None)
def letters():
    """The rows of the table of letters, which the heads divide."""
    return -(-len(reference_gpt.text()[0]) // SIZES["heads"]) * SIZES["heads"]


def formulas(mesh, layout):
    """(bytes by axis, bytes that are kept) of a row by megatron.py."""
    sizes = {**SIZES, "letters": letters()}
    options = [name for name in LAYOUTS[layout] if name not in ("steps", "sample")]
    given = {**{name: size for name, size in sizes.items() if name != "heads"}, **dict.fromkeys(options, True)}
    return megatron.moved(mesh, **given), megatron.kept(mesh, **given)


def layout_of(name, mesh, layers, shard_weights):
    """The SBPs of a weight, and the ranks of its stage."""
    data, tensor, pipeline = mesh
    part, *number, weight = name.split(".")
    stage = {"embedding": 0, "head": pipeline - 1}.get(part, number and int(number[0]) * pipeline // layers)
    table = SHARDED if shard_weights else SBPS
    ranks = np.arange(data * tensor * pipeline).reshape(pipeline, data, tensor)[stage]
    return table[KINDS.get(weight, "whole")], ranks


def check_layout(name, found, sbps, ranks, rank):
    Checks.equal((found["sbp"], found["ranks"]), (", ".join(sbps), ranks.tolist()), rank, name, "SBP and ranks")
    [*where], value = np.argwhere(ranks == rank), found["value"]
    Checks.equal(found["shard"] is not None, len(where) > 0, rank, name, "holds something")
    for place in where:
        for sbp, position, n in zip(sbps, place, ranks.shape):
            if sbp != "B":
                value = value[reference.split(value.shape, int(sbp[2:-1]), position, n)]
        Checks.that((found["shard"] == value).all(), rank, name, "shard")


def moves_of(layers, sequence_parallel, shard_weights):
    """{(SBP before, after, that of the gradient): how many} in a pass: of the residual, and of sharded weights."""
    residual, twice = "S(1), S(0)" if sequence_parallel else "S(1), B", 2 * layers
    moves = {(residual, "S(1), B", residual): twice + 1, ("S(1), P", residual, "S(1), B"): twice + 1}
    of_kinds = {"column": twice, "row": twice + 1} if shard_weights else {}  # the table is split as a row weight is
    for kind, count in of_kinds.items():
        at_rest, in_use = ", ".join(SHARDED[kind]), ", ".join(SBPS[kind])
        moves[at_rest, in_use, at_rest] = count
    return moves


def by_axis(found, mesh):
    """The same tuples of SBPs, with B along an axis of one rank: there OneFlow may call a split B, or a B split.

    found: a set of them, or how many of each; returns the same.
    """
    sizes, named = mesh[:2], Counter()
    for sbps in found:
        key = tuple(", ".join("B" if n == 1 else one for one, n in zip(sbp.split(", "), sizes)) for sbp in sbps)
        named[key] += found[sbps] if isinstance(found, dict) else 1
    return named if isinstance(found, dict) else set(named)


def stages_of(mesh, layers):
    """(number, ranks) of the stage of the embedding, of each block and of the head."""
    data, tensor, pipeline = mesh
    ranks = np.arange(data * tensor * pipeline).reshape(pipeline, data, tensor).tolist()
    return [(i, ranks[i]) for i in (0, *(block * pipeline // layers for block in range(layers)), pipeline - 1)]


def parts_of(name, array, heads):
    """The gradients of queries, keys and values, whose sizes differ; any other as it is."""
    return np.split(array.reshape(len(array), heads, -1), 3, axis=-1) if name.endswith("qkv") else [array]


def check(seen, wanted, mesh, layers, *what, shard_weights=False, sequence_parallel=False, **_):
    """What all ranks saw of a run on a mesh, against what numpy found."""
    steps = len(wanted["losses"]) - 1
    for rank, result in enumerate(seen):
        tensors, told = result["tensors"], (*what, "rank", rank)
        for name, gradient in wanted["first"].items():
            check_layout(name, tensors[name], *layout_of(name, mesh, layers, shard_weights), rank)
            found = result["moments"][name] / 0.1  # AdamW's first moment is a tenth of it
            for one, exact in zip(parts_of(name, found, wanted["heads"]), parts_of(name, gradient, wanted["heads"])):
                off = np.abs(one - exact).max() / np.abs(exact).max()  # at most 1e-6 was seen
                Checks.that(off <= 4e-6, *told, name, "first gradient is off by", off, "of the largest")
            off = np.abs(tensors[name]["value"] - wanted["weights"][name]).mean()  # AdamW scales tiny gradients up
            Checks.that(off <= 1e-7 * steps, *told, name, "weight at the end is off by", off)
        off = np.abs(tensors["losses"]["value"] - wanted["losses"]).max()
        Checks.that(off <= 1e-4, *told, "losses are off by", off)
        off = abs(tensors["loss alone"]["value"] - wanted["losses"][-1])
        Checks.that(off <= 1e-4, *told, "the loss by rank 0 alone is off by", off)
        Checks.equal(tensors["loss alone"]["ranks"], [[0]], *told, "ranks of the loss by rank 0 alone")
        Checks.equal(tensors["drawn"]["value"].tolist(), wanted["drawn"], *told, "letters")
        Checks.equal(by_axis(result["matmuls"], mesh), by_axis(MATMULS, mesh), *told, "SBPs of the matmuls")
        logits = by_axis(result["logits"], mesh)  # any SBP gives the right values
        Checks.equal(logits, by_axis({("S(0), S(1)",)}, mesh), *told, "SBP of the logits in the loss")
        if result["stages"] is not None:
            Checks.equal(result["stages"], stages_of(mesh, layers), *told, "stages of the graph")
        for matmuls, moves in result["passes"]:
            Checks.equal(matmuls, 6 * layers + 1, *told, "number of matmuls in a forward pass")
            moves_wanted = moves_of(layers, sequence_parallel, shard_weights)
            Checks.equal(by_axis(moves, mesh), by_axis(moves_wanted, mesh), *told, "moves in a forward pass")
        Checks.equal(result["without_identity"], [], *told, "weights that micro-batches read without identity")
