"""The chapter of what OneFlow does by itself, done by hand: the ring, the server, late gradients, replicas."""

import numpy as np

from tests import reference
from tests.case import Case
from tests.chapters.training import UNEVEN, weights_of
from tests.reference import Value


def total(parts):
    """The sum of some Values, added up in any order."""
    stacked = Value(*(np.stack([getattr(part, one).ravel() for part in parts]) for one in ("exact", "bound")))
    summed = Value.known(np.ones((1, len(parts)))) @ stacked
    shape = parts[0].exact.shape
    return Value(summed.exact.reshape(shape), summed.bound.reshape(shape))


def ring_all_reduce(n, seed=0, steps=1, in_features=8, out_features=4):
    ranks = list(range(n))
    own = [Value.drawn(np.random.default_rng([seed, rank]), in_features, out_features) for rank in ranks]
    chunks = [in_features * (i + 1) // n - in_features * i // n for i in ranks]  # rows of each
    kept_back = [chunks[(rank + 1) % n] + chunks[(rank + 2) % n] for rank in ranks]  # those it gets, and never sends
    layout = {"gradient": ("P", ranks), "own": ("local", []), "summed": ("local", []), "reduced": ("B", ranks)}
    return Case(
        layout,
        {**{name: total(own) for name in layout}, "own": own[0]},
        parts={"gradient": own, "own": own},
        moves=[(("local", []), ("P", ranks)), (("P", ranks), ("B", ranks))],
        sends=[(2 * in_features - rows) * out_features for rows in kept_back],
    )


def worker_rows(values, n):
    """x and y of a batch as n workers hold them: x0, y0, x1, y1, ..."""
    rows = [reference.split(values["x"].exact.shape, 0, k, n)[0] for k in range(n)]
    return {f"{name}{k}": values[name][part] for k, part in enumerate(rows) for name in "xy"}


def on_workers(values, n):
    """The two matmuls of each worker, with weights that are not those of rank 0."""
    matmuls, [inner, hidden], [_, outer] = [], values["w0"].exact.shape, values["w1"].exact.shape
    for k in range(n):
        rows = len(values[f"x{k}"].exact)
        between = ("B", [k], (rows, hidden))
        matmuls.append((f"x{k}", ("B", [k], (inner, hidden)), between))
        matmuls.append((between, ("B", [k], (hidden, outer)), ("B", [k], (rows, outer))))
    return matmuls


def parameter_server(n, steps=3, gain=1.0, **sizes):
    values = reference.trained("momentum", steps=steps, gain=gain, **sizes)
    values = {**worker_rows(values, n), **{name: value for name, value in values.items() if name not in "xy"}}
    layout = {name: ("B", [int(name[1:]) if name[0] in "xy" else 0]) for name in values}
    weights = weights_of(values)
    return Case(
        layout,
        values,
        on_workers(values, n),
        moves=[(("B", [old]), ("B", [new])) for k in range(n) for old, new in ((0, k), (0, k), (k, 0))],
        steps=steps,
        added=tuple(name for name in values if " " in name or name == "losses"),
        drawn=tuple(name for name in layout if not name.startswith("new") and not name.endswith("buf"))[:-1],
        sends=[(n - 1) * weights] + [weights] * (n - 1),
    )


CASES = {
    "parameter_server": parameter_server,
    "ring_all_reduce": ring_all_reduce,
}
SIZES = {
    "parameter_server": {"even": {}, "uneven": UNEVEN},
    "ring_all_reduce": {"even": {}, "uneven": {"in_features": 7, "out_features": 5, "seed": 1, "steps": 2}},
}
GRAPH_ONLY = set()
