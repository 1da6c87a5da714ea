"""In which SBPs an eager matmul multiplied: OneFlow does not say it, but what each rank holds tells."""

import itertools

import numpy as np

from harness.explore.shards import shard
from harness.measure import theory
from harness.measure.sbp import Layout


def signatures(out):
    """The pairs of SBPs of x and w whose product has the SBP `out` without a move, on a mesh for each axis."""
    by_axis = [[pair for pair, product in theory.MATMUL.items() if product == one] for one in out.split(", ")]
    return [tuple(", ".join(names) for names in zip(*axes)) for axes in itertools.product(*by_axis)]


def makes_partial_sums(pair, inputs):
    """Whether a move from the one to the other would make a P, as no matmul needs it."""
    axes = zip(", ".join(pair).split(", "), ", ".join(inputs).split(", "))
    return any(new == "P" != old for old, new in axes)


def gives(values, pair, inputs, ranks, shards):
    """Whether x and w, given in `pair` and moved to `inputs`, are multiplied to these shards of out by rank."""
    layouts = [(value, Layout(new, ranks), Layout(old, ranks)) for value, old, new in zip(values, pair, inputs)]
    for rank, held in zip(layouts[0][1].members, shards):
        x, w = (shard(value, new, rank, old) for value, new, old in layouts)
        if not np.array_equal(x @ w, held):
            return False
    return True


def inputs_of(values, pair, ranks, out, shards):
    """The SBPs in which x and w were multiplied, of which every rank's shards give its shard of out.

    values: x and w as arrays; pair: their SBPs; out: its SBP; shards: of out, by rank. Raises ValueError unless just
    one pair of SBPs fits. On one rank all fit: of these it is that with the fewest moves.
    """
    fitting = [
        inputs
        for inputs in signatures(out)
        if not makes_partial_sums(pair, inputs) and gives(values, pair, inputs, ranks, shards)
    ]
    if len(fitting) != 1 and np.size(ranks) > 1:
        raise ValueError(f"{pair} on {ranks} gives {out} from one of {fitting}")
    return min(fitting, key=lambda inputs: sum(old != new for old, new in zip(pair, inputs)))
