"""Which numbers each rank holds of a tensor that the explorable page shows. Needs no OneFlow."""

import numpy as np


def shard(value, layout, rank):
    """What a rank holds of an array of whole numbers in a harness.measure.sbp.Layout.

    Of a P each rank holds a whole number for each element, as equal as they can be: of 7 three ranks hold 3, 2, 2.
    """
    part = value[tuple(slice(*span) for span in layout.block(value.shape, rank))]
    for sbp, n, position in zip(layout.axes, layout.grid.shape, np.argwhere(layout.grid == rank)[0]):
        if sbp == "P":
            share, larger = np.divmod(part, n)
            part = share + (position < larger)
    return part
