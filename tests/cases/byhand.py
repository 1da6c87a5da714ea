"""The chapter of what OneFlow does by itself, done by hand: the ring, the server, late gradients, replicas."""

import numpy as np

from tests.cases import reference
from tests.cases.case import Case, case_of_recipe, in_steps
from tests.cases.reference import Value
from tests.cases.training import UNEVEN, reduced, weights_of


def total(parts):
    """The sum of some Values, added up in any order."""
    stacked = reference.stacked([Value(part.exact.ravel(), part.bound.ravel()) for part in parts])
    summed = Value.known(np.ones((1, len(parts)))) @ stacked
    shape = parts[0].exact.shape
    return Value(summed.exact.reshape(shape), summed.bound.reshape(shape))


@case_of_recipe({"uneven": {"in_features": 7, "out_features": 5, "seed": 1, "steps": 2}})
def ring_all_reduce(n, graph=False, seed=0, steps=1, in_features=8, out_features=4):
    ranks = list(range(n))
    own = [Value.drawn(np.random.default_rng([seed, rank]), in_features, out_features) for rank in ranks]
    chunks = [in_features * (i + 1) // n - in_features * i // n for i in ranks]  # rows of each
    kept_back = [chunks[(rank + 1) % n] + chunks[(rank + 2) % n] for rank in ranks]  # those it gets, and never sends
    layout = {"gradient": ("P", ranks), "own": ("local", []), "summed": ("local", []), "reduced": ("B", ranks)}
    return Case(
        layout,
        {**dict.fromkeys(layout, total(own)), "own": own[0]},
        moves=[(("local", []), ("P", ranks)), (("P", ranks), ("B", ranks))],
        parts={"gradient": own, "own": own},
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


@case_of_recipe({"uneven": UNEVEN})
def parameter_server(n, graph=False, steps=3, gain=1.0, **sizes):
    values = reference.trained("momentum", steps=steps, gain=gain, **sizes)
    values = {**worker_rows(values, n), **{name: value for name, value in values.items() if name not in "xy"}}
    moves = [(("B", [old]), ("B", [new])) for k in range(n) for old, new in ((0, k), (0, k), (k, 0))]
    weights = weights_of(values)
    return Case(
        {name: ("B", [int(name[1:]) if name[0] in "xy" else 0]) for name in values},
        values,
        in_steps(graph, steps, on_workers(values, n)),
        in_steps(graph, steps, moves),
        graph_calls=steps,
        summed=tuple(values),
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
    return {**values, "ages": Value.known(ages, "int64")}


ALWAYS = {"sync_every": 1, "seed": 2}


@case_of_recipe({"uneven": {**UNEVEN, "steps": 4, "sync_every": 3}, "always synchronised": ALWAYS})
def async_update(n, graph=False, steps=4, sync_every=2, gain=1.0, **sizes):
    values = late_and_stale(n, steps, sync_every, gain, **sizes)
    moves, weights = [], weights_of(values)
    for every in (1, sync_every):
        for step in range(steps):
            fetching = [k for k in range(n) if k < n - 1 or step % every == 0]
            moves += [(("B", [0]), ("B", [k])) for k in fetching for _ in "01"]
            moves += [(("B", [k]), ("B", [0])) for k in range(n) for _ in "01"]
            moves += [(("B", [k]), ("B", [0])) for k in range(n)]
    return Case(
        {name: ("B", [int(name[1:]) if name[0] in "xy" else 0]) for name in values},
        values,
        on_workers(values, n) * 2 * steps,
        moves,
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


@case_of_recipe({"uneven": {**UNEVEN, "steps": 2}, "by rows": {**UNEVEN, "steps": 3, "weigh": "rows"}})
def ddp(n, graph=False, steps=3, weigh="ranks", gain=1.0, **sizes):
    ranks = list(range(n))
    values, parts = replicas(n, steps, weigh, gain, **sizes)
    (inner, hidden), (_, outer) = shapes = [values[w].exact.shape for w in ("w0", "w1")]
    rows = [len(x.exact) for x in parts["x"]]
    x, between, out = (("local", [], [(count, width) for count in rows]) for width in (inner, hidden, outer))
    w0, w1 = (("local", [], [shape] * n) for shape in shapes)
    return Case(
        {name: ("S(0)", ranks) if name.endswith("of all") else ("local", []) for name in values},
        values,
        [(x, w0, between), (between, w1, out)] * (steps + 1),  # there is one backward more than steps
        [(("local", []), ("S(0)", ranks))] * 2,
        parts,
        sends=[reduced(n, weights_of(values))] * n,
    )
