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
        drawn=("x0", "x1", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[(n - 1) * weights] + [weights] * (n - 1),
    )


def late_and_stale(n, steps, sync_every, gain, **sizes):
    """x0, y0, ..., weights, by schedule weights and losses after training with one slow worker, and how old its are."""
    start = reference.trained("sgd", steps=1, **sizes)  # what was drawn
    values = {**worker_rows(start, n), "w0": start["w0"], "w1": start["w1"]}
    size, rate = start["y"].exact.size, reference.constant(reference.LEARNING_RATE)
    for schedule, every in (("late", 1), ("stale", sync_every)):
        weights, losses = {"w0": values["w0"], "w1": values["w1"]}, []
        old = weights
        for step in range(steps):
            old = weights if step % every == 0 else old
            loss, seen = Value.known(0.0), [weights] * (n - 1) + [old]
            for k, fetched in enumerate(seen):
                x, y = values[f"x{k}"], values[f"y{k}"]
                part, gradients = reference.layered(x, y, fetched, gain, share=y.exact.size / size)
                weights = {name: w - rate * gradients[name] for name, w in weights.items()}
                loss = loss + part
            losses.append(loss)
        losses = reference.stacked(losses)
        values.update({f"{schedule} {name}": w for name, w in weights.items()})
        values["late losses" if schedule == "late" else "losses"] = losses
    ages = [[0] * (n - 1) + [step % sync_every] for step in range(steps)]
    return {**values, "ages": Value.known(ages)}


def async_update(n, steps=4, sync_every=2, gain=1.0, **sizes):
    values = late_and_stale(n, steps, sync_every, gain, **sizes)
    layout = {name: ("B", [int(name[1:]) if name[0] in "xy" else 0]) for name in values}
    moves, weights = [], weights_of(values)
    for every in (1, sync_every):
        for step in range(steps):
            fetching = [k for k in range(n) if k < n - 1 or step % every == 0]
            moves += [(("B", [0]), ("B", [k])) for k in fetching for _ in "01"]
            moves += [(("B", [k]), ("B", [0])) for k in range(n) for _ in "01"]
            moves += [(("B", [k]), ("B", [0])) for k in range(n)]
    return Case(
        layout,
        values,
        on_workers(values, n) * 2 * steps,
        moves=moves,
        steps=1,  # as its steps differ, matmuls and moves are those of all of them
        drawn=("x0", "y0", "x1", "y1", "w0", "w1"),
        dtypes={"ages": "int64"},
        sends=[(n - 1 + n - 2 + 1 / sync_every) * weights] + [2 * weights] * (n - 1),
    )


def mean_of(parts):
    """What the mean over the ranks is, each part divided before it is added."""
    return total([reference.constant(1 / len(parts)) * part for part in parts])


def replicas(n, steps, weigh, gain, seed=0, **sizes):
    """Training on n ranks which average their gradients: values by name, and by name what differs between ranks."""
    start = reference.trained("sgd", steps=1, seed=seed, **sizes)  # what was drawn
    rows = worker_rows(start, n)
    own = []
    for rank in range(n):
        rng = np.random.default_rng([seed, rank])
        own.append({name: Value.drawn(rng, *start[name].exact.shape) for name in ("w0", "w1")})
    parts = {name: [rows[f"{name}{k}"] for k in range(n)] for name in "xy"}
    parts.update({f"own {name}": [weights[name] for weights in own] for name in ("w0", "w1")})
    batch = len(start["x"].exact)
    shares = [len(x.exact) * n / batch if weigh == "rows" else 1.0 for x in parts["x"]]

    def each(weights):
        every = zip(parts["x"], parts["y"], shares)
        found = [reference.layered(x, y, weights, gain, share) for x, y, share in every]
        return [loss for loss, _ in found], {name: [gradients[name] for _, gradients in found] for name in weights}

    rate, weights, losses = reference.constant(reference.LEARNING_RATE), own[0], []
    for _ in range(steps):
        loss, gradients = each(weights)
        losses.append(total(loss) / Value.known(n))
        gradients = {name: mean_of(found) for name, found in gradients.items()}
        weights = {name: w - rate * gradients[name] for name, w in weights.items()}
    _, more = each(weights)
    summed = {name: mean_of([gradients[name] + part for part in found]) for name, found in more.items()}
    values = {"x": parts["x"][0], "y": parts["y"][0], "x of all": start["x"], "y of all": start["y"]}
    values.update({f"own {name}": w for name, w in own[0].items()})
    values.update(own[0])
    values.update({f"{name} grad": gradient for name, gradient in gradients.items()})
    values.update({f"summed {name} grad": gradient for name, gradient in summed.items()})
    values.update({f"new {name}": w for name, w in weights.items()})
    values["losses"] = reference.stacked(losses)
    return values, parts


def ddp(n, steps=3, weigh="ranks", gain=1.0, **sizes):
    ranks = list(range(n))
    values, parts = replicas(n, steps, weigh, gain, **sizes)
    layout = {name: ("S(0)", ranks) if name.endswith("of all") else ("local", []) for name in values}
    (_, hidden), (_, outer) = values["w0"].exact.shape, values["w1"].exact.shape
    rows = [len(x.exact) for x in parts["x"]]
    between, out = (("local", [], [(r, width) for r in rows]) for width in (hidden, outer))
    return Case(
        layout,
        values,
        [("x", "w0", between), (between, "w1", out)] * (steps + 1),
        parts,
        moves=[(("local", []), ("S(0)", ranks))] * 2,
        steps=1,  # as there is one backward more than steps, matmuls are those of all of them
        drawn=("x", "x of all", "own w0", "w0", "w0 grad"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


CASES = {
    "ddp": ddp,
    "async_update": async_update,
    "parameter_server": parameter_server,
    "ring_all_reduce": ring_all_reduce,
}
SIZES = {
    "ddp": {
        "even": {},
        "uneven": {**UNEVEN, "steps": 2},
        "by rows": {**UNEVEN, "steps": 3, "weigh": "rows"},
    },
    "async_update": {
        "even": {},
        "uneven": {**UNEVEN, "steps": 4, "sync_every": 3},
        "always synchronised": {"sync_every": 1, "seed": 2},
    },
    "parameter_server": {"even": {}, "uneven": UNEVEN},
    "ring_all_reduce": {"even": {}, "uneven": {"in_features": 7, "out_features": 5, "seed": 1, "steps": 2}},
}
GRAPH_ONLY = set()
