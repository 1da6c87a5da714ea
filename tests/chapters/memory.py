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


def zero_optimizer(n, steps=3, stage="2", shard_min_size=1, gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained("adam", steps=steps, gain=gain, **sizes)
    layout = {name: ("S(0)" if name in "xy" else "B", ranks) for name in values}
    layout.update({name: ("P", ranks) for name in ("w0 grad", "w1 grad")})
    for name in ("w0", "w1"):
        rows, columns = values[name].exact.shape
        if rows // n * columns >= shard_min_size and rows >= n:  # the smallest shard counts
            layout.update({key: ("S(0)", ranks) for key in (f"{name} exp_avg", f"{name} exp_avg_sq", f"new {name}")})
    hidden = ("S(0)", ranks, (values["x"].exact.shape[0], values["w0"].exact.shape[1]))
    return Case(
        layout,
        values,
        [("x", "w0", hidden), (hidden, "w1", ("S(0)", ranks, values["y"].exact.shape))],
        steps=steps,
        moves_after=[(("P", ranks), ("B", ranks))] * steps,
        drawn=("x", "y", "w0", "w1", "w0 exp_avg", "w1 exp_avg", "new w0", "new w1"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


CASES = {"fully_sharded": fully_sharded, "zero_optimizer": zero_optimizer}
SIZES = {
    "fully_sharded": {"even": {}, "uneven": UNEVEN},
    "zero_optimizer": {
        "even": {},
        "uneven": UNEVEN,
        "few rows": {"batch": 4, "in_features": 3, "hidden": 2, "seed": 2},  # fewer than ranks: such a weight stays B
        "small shards": {"in_features": 6, "hidden": 12, "out_features": 5, "shard_min_size": 20},
    },
}
GRAPH_ONLY = {"zero_optimizer"}
