"""The chapter of data: how it is loaded, measured, normalised and drawn at random when the ranks share it."""

from itertools import combinations

import numpy as np

from tests import reference
from tests.case import Case
from tests.reference import UNIT_ROUNDOFF, Value, constant, decided, mean, row_sum, rows_together, split


def shards(seen, name):
    """The ranks' shards of a tensor."""
    return [tensors[name]["shard"] for tensors in seen]


def data_loading(n, seed=0, samples=24, batch=4, features=5):
    ranks, per_rank = list(range(n)), -(-samples // n)
    batches = -(-per_rank // batch)
    rows = n * (per_rank - (batches - 1) * batch)  # of the last batch
    shapes = {
        "order 0": (n * per_rank, 1),
        "order 1": (n * per_rank, 1),
        "numbers": (rows, 1),
        "x": (rows, features),
    }
    data = Value.drawn(np.random.default_rng(seed), samples, features)
    one_reading = np.arange(samples, dtype=np.float64)[:, None]

    def every_sample_once(seen):
        for epoch in (0, 1):
            order = np.stack(
                shards(seen, f"order {epoch}"), axis=1
            ).ravel()  # as the sampler deals: one to each in turn
            again = [order[i % samples] for i in range(samples, order.size)]
            if sorted(order[:samples]) != list(range(samples)) or list(order[samples:]) != again:
                return False
        return True

    def loaded_by_each(seen):
        return all(
            (tensors["mine"]["value"] == tensors["order 1"]["shard"]).all()
            and (tensors["numbers"]["shard"] == tensors["mine"]["value"][(batches - 1) * batch :]).all()
            for tensors in seen
        )

    def samples_of_numbers(seen):
        return all((t["x"]["value"] == data.exact[t["numbers"]["value"][:, 0].astype(int)]).all() for t in seen)

    return Case(
        {
            "data": ("local", []),
            **{name: ("S(0)", ranks) for name in shapes},
            "mine": ("local", []),
            "doubled": ("S(0)", ranks),
        },
        {
            "data": data,
            **{name: Value.unknown(*shape) for name, shape in shapes.items()},
            "mine": Value.unknown(per_rank, 1),
            "doubled": Value.known(np.concatenate([one_reading] * n)),
        },
        moves=[(("local", []), ("S(0)", ranks))] * (2 * (2 * batches + 1) + 1),
        claims={
            "an epoch loads every sample once, then the first ones again": every_sample_once,
            "what a rank loads is its shard of the order, and its last batch the shard of the last": loaded_by_each,
            "x has the samples that are numbered": samples_of_numbers,
            "another epoch has another order": lambda seen: (
                seen[0]["order 0"]["value"] != seen[0]["order 1"]["value"]
            ).any(),
        },
        drawn=(*shapes, "doubled"),
    )


def metrics(n, seed=0, batch=25, features=5, classes=3, gain=1.0):
    ranks, rng = list(range(n)), np.random.default_rng(seed)
    x, w = Value.drawn(rng, batch, features), Value.drawn(rng, features, classes)
    y = Value.known(np.eye(classes)[rng.integers(classes, size=batch)])
    out = Value.known(gain) * (x @ w)
    errors = (out - y) * (out - y)
    error_sums = errors @ Value.known(np.ones((classes, 1)))
    samples = Value(
        np.concatenate([error_sums.exact, (decided(out) == y.exact.argmax(axis=1))[:, None]], axis=1),
        np.concatenate([error_sums.bound, np.zeros((batch, 1))], axis=1),
    )
    parts = [samples[split((batch, 2), 0, rank, n)] for rank in range(n)]
    counts = [Value.known(part.exact.shape[0]) for part in parts]
    sums, all_samples = row_sum(samples), Value.known(batch)
    of_means = row_sum(rows_together([(row_sum(part) / count).rounded() for part, count in zip(parts, counts)]))
    layout = {"x": "S(0)", "y": "S(0)", "w": "B", "out": "S(0)", "samples": "S(0)", "sums": "P", "means": "B"}
    return Case(
        {
            **{name: (sbp, ranks) for name, sbp in {**layout, "built_in": "P"}.items()},
            **dict.fromkeys(("by_hand", "of_means"), ("local", [])),
        },
        {
            "x": x,
            "y": y,
            "w": w,
            "out": out,
            "samples": samples,
            "sums": sums,
            "means": sums / all_samples,
            "built_in": (sums / all_samples).rounded(),
            "by_hand": (sums / all_samples)[0],
            "of_means": (of_means / Value.known(n))[0],
        },
        [("x", "w", "out")],
        {
            "sums": [row_sum(part) for part in parts],
            "built_in": [(row_sum(part) / all_samples).rounded() for part in parts],
        },
        moves=[(("P", ranks), ("B", ranks))],
        added=("means", "built_in", "by_hand", "of_means"),
        drawn=tuple(layout),
    )


def batch_norm(n, seed=0, steps=3, batch=8, in_features=4, out_features=8, gain=1.0):
    ranks, gain = list(range(n)), Value.known(gain)
    rng = np.random.default_rng(seed)
    x, y = Value.drawn(rng, batch, in_features), Value.drawn(rng, batch, out_features)
    w = new_w = Value.drawn(rng, in_features, out_features)
    shards = [split((batch, out_features), 0, rank, n) for rank in range(n)]
    running = [(Value.known(np.zeros(out_features)), Value.known(np.ones(out_features)))] * n
    losses, update = [], reference.Optimizer("sgd")
    for _ in range(steps):
        h = gain * (x @ new_w)
        by_shard = [reference.batch_norm(h[shard]) for shard in shards]
        running = [
            averaged(*old, *new[1:3], len(x.exact[shard[0]])) for old, new, shard in zip(running, by_shard, shards)
        ]
        out, mean_of_all, var, back = reference.batch_norm(h)
        error = out - y
        losses.append(mean(error * error))
        gradient = gain * (x.T @ back(constant(2 / error.exact.size) * error))
        new_w = update.step({"w": new_w}, {"w": gradient})["w"]
    means, variances = ([one[i] for one in running] for i in (0, 1))
    layout = {"x": "S(0)", "y": "S(0)", "w": "B", "by_shard": "S(0)", "running_mean": "B", "running_var": "B"}
    layout.update({"mean": "B", "var": "B", "out": "S(0)", "w grad": "B", "new w": "B", "losses": "B"})
    return Case(
        {name: (sbp, ranks) for name, sbp in layout.items()},
        {
            "x": x,
            "y": y,
            "w": w,
            "by_shard": rows_together([one[0].rounded() for one in by_shard]),
            "running_mean": means[0],
            "running_var": variances[0],
            "mean": mean_of_all,
            "var": var,
            "out": out,
            "w grad": gradient,
            "new w": new_w,
            "losses": Value(*(np.array([getattr(loss, part) for loss in losses]) for part in ("exact", "bound"))),
        },
        [("x", "w", ("S(0)", ranks, (batch, out_features)))],
        {"running_mean": means, "running_var": variances},
        moves_before=[(("local", []), ("B", ranks))] * 5,  # the buffers and weights of nn.BatchNorm1d
        moves=[(("P", ranks), ("B", ranks))] * 2,
        in_graph={"w grad": ("P", ranks)},
        steps=steps,
        moves_after=[(("P", ranks), ("B", ranks))] * steps,
        added=("by_shard", "running_mean", "running_var", "mean", "var", "out", "w grad", "new w", "losses"),
        drawn=("x", "y", "w", "by_shard", "mean", "var", "out"),
        sends=[2 * (n - 1) / n * (w.exact.size + 4 * out_features)] * n,
    )


def averaged(old_mean, old_var, mean, var, rows):
    """The running statistics of nn.BatchNorm1d: a tenth of the new mean, and of the new variance by rows - 1."""
    unbiased = var * constant(rows / (rows - 1))
    return tuple(constant(0.9) * old + constant(0.1) * new[0] for old, new in ((old_mean, mean), (old_var, unbiased)))


def random_numbers(n, seed=0, batch=16, features=8, dim=0):
    ranks, keep = list(range(n)), 0.5
    x = Value.drawn(np.random.default_rng(seed), batch, features)
    layout = dict.fromkeys(("x", "repeated", "again", "mask", "out"), f"S({dim})")
    values = {name: Value.unknown(batch, features) for name in layout}
    values.update({"x": x, "weight": Value.unknown(features, features)})

    def applied(out, mask, seen):
        """Whether out is x, scaled, where the mask is not 0, and 0 elsewhere."""
        wanted = x.exact * mask / keep
        return all((np.abs(t[out]["value"] - wanted) <= 4 * UNIT_ROUNDOFF * np.abs(wanted)).all() for t in seen)

    return Case(
        {name: (sbp, ranks) for name, sbp in {**layout, "weight": "B"}.items()},
        values,
        claims={
            "nn.Dropout drops the same places of every shard": lambda seen: all(
                alike([shard != 0 for shard in shards(seen, name)]) for name in ("repeated", "again")
            ),
            "each nn.Dropout drops the same places": lambda seen: (
                seen[0]["repeated"]["value"] == seen[0]["again"]["value"]
            ).all(),
            "each shard of the mask is drawn by itself": lambda seen: all_differ(shards(seen, "mask")),
            "the mask has zeros and ones": lambda seen: set(seen[0]["mask"]["value"].ravel()) == {0, 1},
            "nn.Dropout scales what it keeps": lambda seen: all(
                applied(name, seen[0][name]["value"] != 0, seen) for name in ("repeated", "again")
            ),
            "out is x by the mask": lambda seen: applied("out", seen[0]["mask"]["value"], seen),
        },
    )


def beginnings(blocks):
    """The first elements of each block, as many as the smallest has: blocks of an uneven split can be compared."""
    return [block.ravel()[: min(one.size for one in blocks)] for block in blocks]


def alike(blocks):
    first, *others = beginnings(blocks)
    return all((other == first).all() for other in others)


def all_differ(blocks):
    return all((one != other).any() for one, other in combinations(beginnings(blocks), 2))


CASES = {
    "data_loading": data_loading,
    "metrics": metrics,
    "batch_norm": batch_norm,
    "random_numbers": random_numbers,
}
SIZES = {
    "random_numbers": {
        "even": {},
        "uneven": {"batch": 17, "features": 11, "seed": 1},
        "columns": {"dim": 1},
        "uneven columns": {"batch": 17, "features": 11, "seed": 1, "dim": 1},
    },
    "batch_norm": {
        "even": {},
        "uneven": {"batch": 9, "in_features": 3, "out_features": 5, "steps": 1, "seed": 1},
    },
    "metrics": {"even": {}, "divisible": {"batch": 24, "seed": 1}},
    "data_loading": {
        "even": {},
        "uneven": {"samples": 25, "features": 9, "seed": 1},
        "few": {"samples": 5, "batch": 3, "seed": 4},
    },
}
GRAPH_ONLY = set()
