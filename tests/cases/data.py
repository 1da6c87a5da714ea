"""The chapter of data: how it is loaded, measured, normalised and drawn at random when the ranks share it."""

from itertools import combinations

import numpy as np

from tests.cases import reference
from tests.cases.case import Case, all_reduce, case_of_recipe, in_steps, placed, reduced
from tests.cases.reference import Value, drawn, mse, rows_of, unknown


def shards(seen, name):
    """The ranks' shards of a tensor."""
    return [tensors[name]["shard"] for tensors in seen]


UNEVEN_SAMPLES = {"samples": 25, "features": 9, "seed": 1}


@case_of_recipe({"uneven": UNEVEN_SAMPLES, "few": {"samples": 5, "batch": 3, "seed": 4}})
def data_loading(n, graph=False, seed=0, samples=24, batch=4, features=5):
    ranks, per_rank = list(range(n)), -(-samples // n)
    batches = -(-per_rank // batch)
    rows = n * (per_rank - (batches - 1) * batch)  # of the last batch
    shapes = {"order 0": (n * per_rank, 1), "order 1": (n * per_rank, 1), "numbers": (rows, 1), "x": (rows, features)}
    data = drawn(np.random.default_rng(seed), samples, features)
    one_reading = np.arange(samples, dtype=np.float64)[:, None]

    def once(order):
        """Every sample once, then the first ones again."""
        first = order[:samples]
        return sorted(first) == list(range(samples)) and (order == np.resize(first, order.size)).all()

    def loaded(rank):
        mine, last = rank["mine"]["value"], rank["numbers"]["shard"]
        return (mine == rank["order 1"]["shard"]).all() and (last == mine[(batches - 1) * batch :]).all()

    def claims(seen):
        numbered = [data.exact[rank["numbers"]["value"][:, 0].astype(int)] for rank in seen]
        # as the sampler deals: one to each rank in turn
        orders = [np.stack(shards(seen, f"order {epoch}"), axis=1).ravel() for epoch in (0, 1)]
        return {
            "an epoch loads every sample": all(once(order) for order in orders),
            "what a rank loads is its shard of the order": all(loaded(rank) for rank in seen),
            "x has the samples": all((rank["x"]["value"] == x).all() for rank, x in zip(seen, numbered)),
            "another epoch has another order": (seen[0]["order 0"]["value"] != seen[0]["order 1"]["value"]).any(),
        }

    local, global_ = ("local", []), ("S(0)", ranks)
    return Case(
        {"data": local, **dict.fromkeys(shapes, global_), "mine": local, "doubled": global_},
        {
            "data": data,
            **{name: unknown(*shape) for name, shape in shapes.items()},
            "mine": unknown(per_rank, 1),
            "doubled": Value(np.concatenate([one_reading] * n)),
        },
        moves=[(local, global_)] * (2 * (2 * batches + 1) + 1),
        claims=claims,
    )


@case_of_recipe({"divisible": {"batch": 24, "seed": 1}})
def metrics(n, graph=False, seed=0, batch=25, features=5, classes=3, matmul_scale=1.0):
    ranks, rng = list(range(n)), np.random.default_rng(seed)
    x, w = drawn(rng, batch, features), drawn(rng, features, classes)
    y = Value(np.eye(classes)[rng.integers(classes, size=batch)])
    out = matmul_scale * (x @ w)
    best = np.sort(out.exact, axis=1)
    assert (best[:, -1] - best[:, -2] > 1e-4).all(), "rounding must not choose the class"
    hits = out.exact.argmax(axis=1) == y.exact.argmax(axis=1)
    samples = Value(np.column_stack([((out - y).exact ** 2).sum(axis=1), hits]), rounded=True)
    parts = [samples[rows] for rows in rows_of(batch, n)]
    of_means = Value(np.mean([part.exact.mean(axis=0) for part in parts], axis=0), rounded=True)
    sums, means = samples.sum(0), samples.mean(0)
    layout = {"x": "S(0)", "y": "S(0)", "w": "B", "out": "S(0)", "samples": "S(0)", "sums": "P", "means": "B"}
    layout.update(built_in="P", by_hand=("local", []), of_means=("local", []))
    values = {"x": x, "y": y, "w": w, "out": out, "samples": samples, "sums": sums, "means": means, "built_in": means}
    return Case(
        placed(layout, ranks, **layout),
        {**values, "by_hand": means[0], "of_means": of_means},
        [("x", "w", "out")],
        [all_reduce(ranks)],
        {"sums": [part.sum(0) for part in parts], "built_in": [part.sum(0) / batch for part in parts]},
        summed=("means", "built_in", "by_hand", "of_means"),
    )


UNEVEN_COLUMNS = {"batch": 9, "in_features": 3, "out_features": 5, "steps": 1, "seed": 1}


@case_of_recipe({"uneven": UNEVEN_COLUMNS})
def batch_norm(n, graph=False, seed=0, steps=3, batch=8, in_features=4, out_features=8, matmul_scale=1.0):
    ranks, rng = list(range(n)), np.random.default_rng(seed)
    x, y, w = drawn(rng, batch, in_features), drawn(rng, batch, out_features), drawn(rng, in_features, out_features)
    running = [(np.zeros(out_features), np.ones(out_features))] * n  # of nn.BatchNorm1d on each rank

    def forward(weights, _):
        h = matmul_scale * (x @ weights["w"])
        by_shard = []
        for rank, rows in enumerate(rows_of(batch, n)):
            shard = h[rows]
            normed, *new = normalised(shard)
            new[1] = new[1] * len(shard.exact) / (len(shard.exact) - 1)
            running[rank] = [0.9 * old + 0.1 * one.exact[0] for old, one in zip(running[rank], new)]
            by_shard.append(normed.exact)
        out, mean, var = normalised(h)
        made = {"by_shard": Value(np.concatenate(by_shard), rounded=True)}
        made.update({name: Value(one, rounded=True) for name, one in zip(("running_mean", "running_var"), running[0])})
        return {**made, "mean": mean, "var": var, "out": out}, mse(out, y)

    trained, _ = reference.descend({"w": w}, forward, steps)
    values = {"x": x, "y": y, "w": w, **trained}
    means, variances = ([Value(one, rounded=True) for one in ones] for ones in zip(*running))
    rows = ("S(0)", ranks)
    layout = placed(values, ranks, x=rows, y=rows, by_shard=rows, out=rows, grad="P" if graph else "B")
    summing, to_b = all_reduce(ranks), (("local", []), ("B", ranks))
    return Case(
        layout,
        values,
        in_steps(graph, steps, [("x", "w", (*rows, (batch, out_features)))]),
        # first the buffers and weights of nn.BatchNorm1d, last the losses
        [to_b] * 5 + in_steps(graph, steps, [summing] * 2) + [summing] * steps,
        {"running_mean": means, "running_var": variances},
        sends=[reduced(n, w.exact.size + 4 * out_features)] * n,
    )


def normalised(h):
    """Each column of h minus its mean, by its standard deviation; the mean; the variance."""
    mean = h.mean(0)
    var = ((h - mean) ** 2).mean(0)
    return (h - mean) / (var + 1e-5) ** 0.5, mean, var


UNEVEN_NUMBERS = {"batch": 17, "features": 11, "seed": 1}
COLUMNS = {"columns": {"dim": 1}, "uneven columns": {**UNEVEN_NUMBERS, "dim": 1}}


@case_of_recipe({"uneven": UNEVEN_NUMBERS, **COLUMNS})
def random_numbers(n, graph=False, seed=0, batch=16, features=8, dim=0):
    ranks, keep = list(range(n)), 0.5
    x = drawn(np.random.default_rng(seed), batch, features)
    layout = dict.fromkeys(("x", "repeated", "again", "mask", "out"), (f"S({dim})", ranks))
    values = {**dict.fromkeys(layout, unknown(batch, features)), "x": x}

    def applied(rank, out, mask):
        """Whether out is x, scaled, where the mask is not 0, and 0 elsewhere."""
        wanted = x.exact * mask / keep
        return (np.abs(rank[out]["value"] - wanted) <= reference.ROUNDING * np.abs(wanted)).all()

    def claims(seen):
        first, dropped = {name: tensor["value"] for name, tensor in seen[0].items()}, ("repeated", "again")
        places = {name: [shard != 0 for shard in shards(seen, name)] for name in dropped}
        kept = [applied(rank, name, first[name] != 0) for rank in seen for name in dropped]
        return {
            "nn.Dropout drops the same places of every shard": all(alike(places[name]) for name in dropped),
            "each nn.Dropout drops the same places": (first["repeated"] == first["again"]).all(),
            "each shard of the mask is drawn by itself": all_differ(shards(seen, "mask")),
            "the mask has zeros and ones": set(first["mask"].ravel()) == {0, 1},
            "nn.Dropout scales what it keeps": all(kept),
            "out is x by the mask": all(applied(rank, "out", first["mask"]) for rank in seen),
        }

    return Case({**layout, "weight": ("B", ranks)}, {**values, "weight": unknown(features, features)}, claims=claims)


def beginnings(blocks):
    """The first elements of each block, as many as the smallest has: blocks of an uneven split can be compared."""
    return [block.ravel()[: min(one.size for one in blocks)] for block in blocks]


def alike(blocks):
    first, *others = beginnings(blocks)
    return all((other == first).all() for other in others)


def all_differ(blocks):
    return all((one != other).any() for one, other in combinations(beginnings(blocks), 2))
