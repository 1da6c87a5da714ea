"""Which numbers each rank holds of the matrices of the explorable page, and in which SBPs they were multiplied.

Needs no OneFlow.
"""

import itertools

import numpy as np

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.sbp import Layout


def shard(value, layout, rank, moved_from=None):
    """What a rank holds of an array of whole numbers in a oneflow_cookbook.measure.sbp.Layout.

    Of a P each rank holds a whole number for each element, as equal as they can be: of 7 three ranks hold 3, 2, 2.
    moved_from: the Layout in which the array was before; where that has a P and this has none, the parts are added.
    """
    moved_from = moved_from or layout
    parts = partial_sums(value, moved_from)
    for axis, (old, new) in enumerate(zip(moved_from.axes, layout.axes)):
        if old == "P" != new:
            parts = np.broadcast_to(parts.sum(axis, keepdims=True), parts.shape)
    return parts[tuple(layout.position(rank))][layout.slices(value.shape, rank)]


def partial_sums(value, layout):
    """For each place on the grid of ranks the array, or its part where an axis has P."""
    parts = value[(None,) * layout.grid.ndim]
    for axis, (sbp, n) in enumerate(zip(layout.axes, layout.grid.shape)):
        parts = np.repeat(parts, n, axis)
        if sbp == "P":
            position = np.arange(n).reshape([-1 if dim == axis else 1 for dim in range(parts.ndim)])
            parts = parts // n + (position < parts % n)
    return parts


def multiplied_sbps(values, sbps, ranks, out_sbp, out_shards):
    """The SBPs in which an eager matmul multiplied x and w: OneFlow does not say it, but the shards of out tell.

    values: x and w as arrays; sbps: theirs before the matmul; out_shards: of out, by rank. Raises ValueError unless
    just one pair of SBPs fits. On one rank all fit: of these it is that with the fewest moves.
    """
    fitting = [
        inputs
        for inputs in signatures(out_sbp)
        if not adds_partial_sum(sbps, inputs) and gives(values, sbps, inputs, ranks, out_shards)
    ]
    if len(fitting) != 1 and np.size(ranks) > 1:
        raise ValueError(f"{sbps} on {ranks} gives {out_sbp} from one of {fitting}")
    return min(fitting, key=lambda inputs: sum(old != new for old, new in zip(sbps, inputs)))


def signatures(out_sbp):
    """The pairs of SBPs of x and w whose product has the SBP `out_sbp` with no communication."""
    by_axis = [[pair for pair, product in theory.MATMUL.items() if product == sbp] for sbp in out_sbp.split(", ")]
    return [tuple(", ".join(names) for names in zip(*axes)) for axes in itertools.product(*by_axis)]


def adds_partial_sum(sbps, inputs):
    """Whether a move from `sbps` to `inputs` would end in a P, which no matmul needs."""
    axes = zip(", ".join(sbps).split(", "), ", ".join(inputs).split(", "))
    return any(new == "P" != old for old, new in axes)


def gives(values, sbps, inputs, ranks, out_shards):
    """Whether x and w, moved from `sbps` to `inputs`, multiply to these shards of out."""
    layouts = [(value, Layout(new, ranks), Layout(old, ranks)) for value, old, new in zip(values, sbps, inputs)]
    for rank, out_shard in zip(layouts[0][1].members, out_shards):
        x, w = (shard(value, new, rank, old) for value, new, old in layouts)
        if not np.array_equal(x @ w, out_shard):
            return False
    return True
