"""The chapter of memory: the same network, with less of it on each rank."""

from tests import reference
from tests.case import Case
from tests.chapters.training import UNEVEN, weights_of


def fully_sharded(n, steps=3, gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained("adam", steps=steps, gain=gain, **sizes)
    hidden = ("S(0)", ranks, (values["x"].exact.shape[0], values["w0"].exact.shape[1]))
    whole = {name: ("B", ranks, values[name].exact.shape) for name in ("w0", "w1")}
    return Case(
        {name: ("B" if name == "losses" else "S(0)", ranks) for name in values},
        values,
        [("x", whole["w0"], hidden), (hidden, whole["w1"], ("S(0)", ranks, values["y"].exact.shape))],
        moves=[(("S(0)", ranks), ("B", ranks))] * 2,
        steps=steps,
        moves_after=[(("P", ranks), ("B", ranks))] * steps,
        added=tuple(name for name in values if name not in ("x", "y", "w0", "w1")),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


CASES = {"fully_sharded": fully_sharded}
SIZES = {"fully_sharded": {"even": {}, "uneven": UNEVEN}}
GRAPH_ONLY = set()
