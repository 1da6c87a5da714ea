"""The chapter of training: a two-layer network under each strategy."""

from tests import reference
from tests.case import Case

UNEVEN = {"batch": 7, "in_features": 6, "hidden": 10, "out_features": 5, "steps": 1, "seed": 1}


def weights_of(values):
    """Elements of all weights."""
    return values["w0"].exact.size + values["w1"].exact.size


def train_data_parallel(n, steps=3, optimizer="adam", gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained(optimizer, steps=steps, gain=gain, **sizes)
    layout = {name: ("S(0)" if name in "xy" else "B", ranks) for name in values}
    hidden = (values["x"].exact.shape[0], values["w0"].exact.shape[1])
    return Case(
        layout,
        values,
        [
            ("x", "w0", ("S(0)", ranks, hidden)),
            (("S(0)", ranks, hidden), "w1", ("S(0)", ranks, values["y"].exact.shape)),
        ],
        in_graph={name: ("P", ranks) for name in ("w0 grad", "w1 grad")},
        steps=steps,
        moves_after=[(("P", ranks), ("B", ranks))] * steps,
        added=tuple(name for name in values if name not in ("x", "y", "w0", "w1")),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


CASES = {
    "train_data_parallel": train_data_parallel,
}
SIZES = {
    "train_data_parallel": {
        "even": {},
        "uneven": UNEVEN,
        **{name: {"optimizer": name} for name in ("adamw", "momentum", "sgd")},
    },
}
GRAPH_ONLY = set()
