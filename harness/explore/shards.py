"""Which numbers each rank holds of a tensor that the explorable page shows. Needs no OneFlow."""

import numpy as np


def shard(value, layout, rank, given=None):
    """What a rank holds of an array of whole numbers in a harness.measure.sbp.Layout.

    Of a P each rank holds a whole number for each element, as equal as they can be: of 7 three ranks hold 3, 2, 2.
    given: the Layout from which the array was moved, if it was: where a P became something else, its parts were added.
    """
    given = given or layout
    parts = partial_sums(value, given)
    for axis, (old, new) in enumerate(zip(given.axes, layout.axes)):
        if old == "P" != new:
            parts = np.broadcast_to(parts.sum(axis, keepdims=True), parts.shape)
    part = parts[tuple(np.argwhere(layout.grid == rank)[0])]
    return part[tuple(slice(*span) for span in layout.block(value.shape, rank))]


def partial_sums(value, layout):
    """For each place on the grid of ranks the array, or its part where an axis has P."""
    parts = value[(None,) * layout.grid.ndim]
    for axis, (sbp, n) in enumerate(zip(layout.axes, layout.grid.shape)):
        parts = np.repeat(parts, n, axis)
        if sbp == "P":
            position = np.arange(n).reshape([-1 if dim == axis else 1 for dim in range(parts.ndim)])
            parts = parts // n + (position < parts % n)
    return parts
