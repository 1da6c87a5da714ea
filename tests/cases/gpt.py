"""What is asserted of a run of recipes/transformer/gpt.py: layout, first gradients, losses, letters."""

import numpy as np

from tests.cases import reference
from tests.cases.ladder import Checks

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


def moves_of(sequence_parallel, shard_weights):
    """(SBP before, after, that of the gradient) of moves that must be made: of the residual, and of sharded weights."""
    residual = "S(1), S(0)" if sequence_parallel else "S(1), B"
    moves = {(residual, "S(1), B", residual), ("S(1), P", residual, "S(1), B")}
    for kind in ("column", "row") if shard_weights else ():
        at_rest, in_use = ", ".join(SHARDED[kind]), ", ".join(SBPS[kind])
        moves.add((at_rest, in_use, at_rest))
    return moves


def by_axis(found, mesh):
    """The same tuples of SBPs, with B along an axis of one rank: there OneFlow may call a split B, or a B split."""
    sizes = mesh[:2]
    return {
        tuple(", ".join("B" if n == 1 else one for one, n in zip(sbp.split(", "), sizes)) for sbp in sbps)
        for sbps in found
    }


def check(seen, wanted, mesh, layers, *what, shard_weights=False, sequence_parallel=False, **_):
    """What all ranks saw of a run on a mesh, against what numpy found."""
    for rank, result in enumerate(seen):
        tensors, told = result["tensors"], (*what, "rank", rank)
        for name, gradient in wanted["first"].items():
            check_layout(name, tensors[name], *layout_of(name, mesh, layers, shard_weights), rank)
            off = np.abs(result["moments"][name] / 0.1 - gradient).max()  # AdamW's first moment is a tenth of it
            Checks.that(off <= 1e-5 * np.abs(gradient).max(), *told, name, "first gradient is off by", off)
        off = np.abs(tensors["losses"]["value"] - wanted["losses"]).max()
        Checks.that(off <= 1e-4, *told, "losses are off by", off)
        off = abs(tensors["loss alone"]["value"] - wanted["losses"][-1])
        Checks.that(off <= 1e-4, *told, "the loss by rank 0 alone is off by", off)
        Checks.equal(tensors["drawn"]["value"].tolist(), wanted["drawn"], *told, "letters")
        Checks.equal(by_axis(result["matmuls"], mesh), by_axis(MATMULS, mesh), *told, "SBPs of the matmuls")
        missing = by_axis(moves_of(sequence_parallel, shard_weights), mesh) - by_axis(result["moves"], mesh)
        Checks.equal(missing, set(), *told, "moves that are missing")
        Checks.equal(result["without_identity"], [], *told, "weights that micro-batches read without identity")
