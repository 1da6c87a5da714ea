"""The chapter of data: how it is loaded, measured, normalised and drawn at random when the ranks share it."""

from dataclasses import dataclass
from itertools import combinations
from typing import Callable

import numpy as np

from tests.cases import reference
from tests.cases.case import Case, case_of_recipe, in_steps
from tests.cases.reference import UNIT_ROUNDOFF, Value, constant, decided, mean, row_sum, rows_together, split
from tests.cases.training import reduced


@dataclass
class RandomCase(Case):
    """A case with values that OneFlow draws at random, of which only claims can be checked."""

    true: Callable = None  # from each rank's tensors to what `claims` returns

    def claims(self, seen):
        return self.true(seen)


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
    data = Value.drawn(np.random.default_rng(seed), samples, features)
    one_reading = np.arange(samples, dtype=np.float64)[:, None]

    def once(order):
        order = np.stack(order, axis=1).ravel()  # as the sampler deals: one to each rank in turn
        again = [order[i % samples] for i in range(samples, order.size)]
        return sorted(order[:samples]) == list(range(samples)) and list(order[samples:]) == again

    def loaded(rank):
        mine, last = rank["mine"]["value"], rank["numbers"]["shard"]
        return (mine == rank["order 1"]["shard"]).all() and (last == mine[(batches - 1) * batch :]).all()

    def claims(seen):
        numbered = [data.exact[rank["numbers"]["value"][:, 0].astype(int)] for rank in seen]
        orders = [seen[0][f"order {epoch}"]["value"] for epoch in (0, 1)]
        return {
            "an epoch loads every sample once, then the first ones again": all(
                once(shards(seen, f"order {epoch}")) for epoch in (0, 1)
            ),
            "what a rank loads is its shard of the order, and its last batch the shard of the last": all(
                loaded(rank) for rank in seen
            ),
            "x has the samples that are numbered": all(
                (rank["x"]["value"] == x).all() for rank, x in zip(seen, numbered)
            ),
            "another epoch has another order": (orders[0] != orders[1]).any(),
        }

    local, global_ = ("local", []), ("S(0)", ranks)
    return RandomCase(
        {"data": local, **dict.fromkeys(shapes, global_), "mine": local, "doubled": global_},
        {
            "data": data,
            **{name: Value.unknown(*shape) for name, shape in shapes.items()},
            "mine": Value.unknown(per_rank, 1),
            "doubled": Value.known(np.concatenate([one_reading] * n)),
        },
        moves=[(local, global_)] * (2 * (2 * batches + 1) + 1),
        true=claims,
    )


@case_of_recipe({"divisible": {"batch": 24, "seed": 1}})
def metrics(n, graph=False, seed=0, batch=25, features=5, classes=3, gain=1.0):
    ranks, rng = list(range(n)), np.random.default_rng(seed)
    x, w = Value.drawn(rng, batch, features), Value.drawn(rng, features, classes)
    y = Value.known(np.eye(classes)[rng.integers(classes, size=batch)])
    out = Value.known(gain) * (x @ w)
    errors = (out - y) * (out - y)
    error_sums = errors @ Value.known(np.ones((classes, 1)))
    hits = (decided(out) == y.exact.argmax(axis=1))[:, None]
    samples = Value(np.hstack([error_sums.exact, hits]), np.hstack([error_sums.bound, 0.0 * hits]))
    parts = [samples[split((batch, 2), 0, rank, n)] for rank in range(n)]
    own_means = [(row_sum(part) / Value.known(part.exact.shape[0])).rounded() for part in parts]
    of_means = row_sum(rows_together(own_means)) / Value.known(n)
    sums, all_samples = row_sum(samples), Value.known(batch)
    layout = {"x": "S(0)", "y": "S(0)", "w": "B", "out": "S(0)", "samples": "S(0)", "sums": "P", "means": "B"}
    layout = {name: (sbp, ranks) for name, sbp in {**layout, "built_in": "P"}.items()}
    means = sums / all_samples
    values = {"x": x, "y": y, "w": w, "out": out, "samples": samples, "sums": sums, "means": means}
    return Case(
        {**layout, "by_hand": ("local", []), "of_means": ("local", [])},
        {**values, "built_in": means.rounded(), "by_hand": means[0], "of_means": of_means[0]},
        [("x", "w", "out")],
        [(("P", ranks), ("B", ranks))],
        {
            "sums": [row_sum(part) for part in parts],
            "built_in": [(row_sum(part) / all_samples).rounded() for part in parts],
        },
        summed=("means", "built_in", "by_hand", "of_means"),
    )


UNEVEN_COLUMNS = {"batch": 9, "in_features": 3, "out_features": 5, "steps": 1, "seed": 1}


@case_of_recipe({"uneven": UNEVEN_COLUMNS})
def batch_norm(n, graph=False, seed=0, steps=3, batch=8, in_features=4, out_features=8, gain=1.0):
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
    values = {"x": x, "y": y, "w": w, "by_shard": rows_together([one[0].rounded() for one in by_shard])}
    values.update({"running_mean": means[0], "running_var": variances[0], "mean": mean_of_all, "var": var, "out": out})
    values.update({"w grad": gradient, "new w": new_w, "losses": reference.stacked(losses)})
    rows = ("S(0)", ranks)
    layout = {name: rows if name in ("x", "y", "by_shard", "out") else ("B", ranks) for name in values}
    if graph:
        layout["w grad"] = ("P", ranks)
    all_reduce, to_b = (("P", ranks), ("B", ranks)), (("local", []), ("B", ranks))
    return Case(
        layout,
        values,
        in_steps(graph, steps, [("x", "w", (*rows, (batch, out_features)))]),
        # first the buffers and weights of nn.BatchNorm1d, last the losses
        [to_b] * 5 + in_steps(graph, steps, [all_reduce] * 2) + [all_reduce] * steps,
        {"running_mean": means, "running_var": variances},
        graph_calls=steps,
        summed=tuple(values),
        sends=[reduced(n, w.exact.size + 4 * out_features)] * n,
    )


def averaged(old_mean, old_var, mean, var, rows):
    """The running statistics of nn.BatchNorm1d: a tenth of the new mean, and of the new variance by rows - 1."""
    unbiased = var * constant(rows / (rows - 1))
    return tuple(constant(0.9) * old + constant(0.1) * new[0] for old, new in ((old_mean, mean), (old_var, unbiased)))


UNEVEN_NUMBERS = {"batch": 17, "features": 11, "seed": 1}
COLUMNS = {"columns": {"dim": 1}, "uneven columns": {**UNEVEN_NUMBERS, "dim": 1}}


@case_of_recipe({"uneven": UNEVEN_NUMBERS, **COLUMNS})
def random_numbers(n, graph=False, seed=0, batch=16, features=8, dim=0):
    ranks, keep = list(range(n)), 0.5
    x = Value.drawn(np.random.default_rng(seed), batch, features)
    layout = dict.fromkeys(("x", "repeated", "again", "mask", "out"), (f"S({dim})", ranks))
    values = {**dict.fromkeys(layout, Value.unknown(batch, features)), "x": x}

    def applied(rank, out, mask):
        """Whether out is x, scaled, where the mask is not 0, and 0 elsewhere."""
        wanted = x.exact * mask / keep
        return (np.abs(rank[out]["value"] - wanted) <= 4 * UNIT_ROUNDOFF * np.abs(wanted)).all()

    def claims(seen):
        first, dropped = {name: tensor["value"] for name, tensor in seen[0].items()}, ("repeated", "again")
        return {
            "nn.Dropout drops the same places of every shard": all(
                alike([shard != 0 for shard in shards(seen, name)]) for name in dropped
            ),
            "each nn.Dropout drops the same places": (first["repeated"] == first["again"]).all(),
            "each shard of the mask is drawn by itself": all_differ(shards(seen, "mask")),
            "the mask has zeros and ones": set(first["mask"].ravel()) == {0, 1},
            "nn.Dropout scales what it keeps": all(
                applied(rank, name, first[name] != 0) for rank in seen for name in dropped
            ),
            "out is x by the mask": all(applied(rank, "out", first["mask"]) for rank in seen),
        }

    return RandomCase(
        {**layout, "weight": ("B", ranks)}, {**values, "weight": Value.unknown(features, features)}, true=claims
    )


def beginnings(blocks):
    """The first elements of each block, as many as the smallest has: blocks of an uneven split can be compared."""
    return [block.ravel()[: min(one.size for one in blocks)] for block in blocks]


def alike(blocks):
    first, *others = beginnings(blocks)
    return all((other == first).all() for other in others)


def all_differ(blocks):
    return all((one != other).any() for one, other in combinations(beginnings(blocks), 2))
