"""The chapter of data: loading, metrics, batch norm and random numbers on tensors that are split over ranks."""

from itertools import combinations

import numpy as np

from tests.cases import reference
from tests.cases.layouts import LOCAL
from tests.cases.recipe_case import Case, Main, case_of_recipe, reduced, shares
from tests.cases.reference import Value, drawn, mse, rows_of, unknown

UNEVEN_SAMPLES = {"samples": 25, "features": 9, "seed": 1}


@case_of_recipe(
    {"uneven": UNEVEN_SAMPLES, "few": {"samples": 5, "batch": 3, "seed": 4}},
    tests=["tests/slow/test_data.py", "tests/slow/test_choices.py"],
    equivalent={
        r"flow\.tensor\(own, .*::-1\]\.copy\(\)": "the numbers of the samples are sorted afterwards",
        r"^of_all_ranks = .*: flow\.sbp\.split\(0\) -> flow\.sbp\.split\(1\)$": "they are sorted afterwards",
    },
    main=Main(
        comparisons=2,
        prints=[
            "[0] epoch 0: samples 0 1 9 4 22 3 21 7 19 15 23 6",
            "[0] epoch 1: samples 9 23 18 6 17 0 5 14 2 11 21 19",
            "[0] each sample is loaded once in an epoch; x of the last batch has samples 2 11 21 19 1 8 10 16",
            "[1] epoch 0: samples 13 17 11 16 10 18 20 8 5 12 14 2",
            "[1] epoch 1: samples 20 12 4 3 22 7 13 15 1 8 10 16",
        ],
    ),
)
def data_loading(n, graph=False, seed=0, samples=24, batch=4, features=5):
    per_rank = -(-samples // n)
    batches = -(-per_rank // batch)
    begin = (batches - 1) * batch  # of the last batch, among those that a rank loads
    rows = n * (per_rank - begin)
    data = drawn(np.random.default_rng(seed), samples, features)

    def covers_all_samples(order):
        """Every sample once, then the first ones again."""
        first = order[:samples]
        return sorted(first) == list(range(samples)) and (order == np.resize(first, order.size)).all()

    def claims(seen):
        loaded = [rank["loaded"][:, :, 0] for rank in seen]  # numbers of samples, a row for each epoch
        # the order of the sampler, which gives one sample to each rank in turn
        orders = [np.stack([own[epoch] for own in loaded], axis=1).ravel() for epoch in (0, 1)]
        last = [(rank["numbers"]["shard"][:, 0], own[1][begin:]) for rank, own in zip(seen, loaded)]
        numbered = [data.exact[rank["numbers"]["value"][:, 0].astype(int)] for rank in seen]
        return {
            "an epoch loads every sample": all(map(covers_all_samples, orders)),
            "a rank's shard is what it loaded": all(np.array_equal(shard, own) for shard, own in last),
            "x has the samples": all((rank["x"]["value"] == x).all() for rank, x in zip(seen, numbered)),
            "another epoch has another order": (orders[0] != orders[1]).any(),
        }

    values = {"data": data, "numbers": unknown(rows, 1), "x": unknown(rows, features)}
    return Case(values, layout={"data": LOCAL}, claims=claims)


@case_of_recipe(
    {"divisible": {"batch": 24, "seed": 1}},
    main=Main(
        comparisons=3,
        prints=[
            "[0] 13 of 25 rows: loss 18.1754, accuracy 0.3077",
            "[0] mean of the ranks' means: loss 23.0503, accuracy 0.2372",
            "[0] all rows: loss 22.8553, accuracy 0.2400, as on a single device",
            "[1] 12 of 25 rows: loss 27.9251, accuracy 0.1667",
        ],
    ),
)
def metrics(n, graph=False, seed=0, batch=25, in_features=5, classes=3, matmul_scale=1.0):
    rng = np.random.default_rng(seed)
    x, w = drawn(rng, batch, in_features), drawn(rng, in_features, classes)
    y = Value(np.eye(classes)[rng.integers(classes, size=batch)])
    out = matmul_scale * (x @ w)
    best = np.sort(out.exact, axis=1)
    assert (best[:, -1] - best[:, -2] > 1e-4).all(), "rounding must not choose the class"
    correct = out.exact.argmax(axis=1) == y.exact.argmax(axis=1)
    samples = Value(np.column_stack([((out - y).exact ** 2).sum(axis=1), correct]), rounded=True)
    sums, means = samples.sum(0), samples.mean(0)
    return Case(
        {"x": x, "y": y, "w": w, "out": out, "samples": samples, "sums": sums, "means": means, "by_hand": means[0]},
        shares(n, batch, 2 * w.exact.size),
        {"by_hand": LOCAL},
        parts={"sums": [samples[rows].sum(0) for rows in rows_of(batch, n)]},
    )


UNEVEN_COLUMNS = {"batch": 9, "in_features": 3, "out_features": 5, "steps": 1, "seed": 1}


@case_of_recipe(
    {"uneven": UNEVEN_COLUMNS},
    variants=[{"batch": 8, "in_features": 1, "out_features": 50_000}],  # little weight: the four rows show
    equivalent={
        r"^x = flow\.randn.*: flow\.sbp\.split\(0\) -> flow\.sbp\.split\(1\)$": "OneFlow splits it by rows first"
    },
    main=Main(
        comparisons=2,
        prints=[
            "[0] column 0 of out, 4 of 8 rows: mean -0.59, variance 0.59",
            "[0] column 0 of out, all rows: mean 0.00, variance 1.00",
            "[1] column 0 of out, 4 of 8 rows: mean 0.59, variance 0.72",
        ],
    ),
)
def batch_norm(n, graph=False, seed=0, steps=3, batch=8, in_features=4, out_features=8, matmul_scale=1.0):
    rng = np.random.default_rng(seed)
    x, y, w = drawn(rng, batch, in_features), drawn(rng, batch, out_features), drawn(rng, in_features, out_features)

    def forward(weights, _):
        out, mean, var = normalised(matmul_scale * (x @ weights["w"]))
        return {"mean": mean, "var": var, "out": out}, mse(out, y)

    trained, _ = reference.descend({"w": w}, forward, steps)
    values = {"x": x, "y": y, "w": w, **trained}
    return Case(
        values,
        shares(n, batch, 2 * w.exact.size),
        sends=[reduced(n, w.exact.size + 4 * out_features)] * n,
    )


def normalised(h):
    """(Each column of h minus its mean, divided by its standard deviation; the mean; the variance)."""
    mean = h.mean(0)
    var = ((h - mean) ** 2).mean(0)
    return (h - mean) / (var + 1e-5) ** 0.5, mean, var


UNEVEN_NUMBERS = {"batch": 17, "features": 11, "seed": 1}
COLUMNS = {"columns": {"dim": 1}, "uneven columns": {**UNEVEN_NUMBERS, "dim": 1}}


@case_of_recipe(
    {"uneven": UNEVEN_NUMBERS, **COLUMNS},
    whole_job=True,
    tests=["tests/slow/test_data.py"],
    main=Main(
        comparisons=2,
        prints=[
            "[0] nn.Dropout keeps [1 0 1 1 1 1 1 0], a global mask keeps [0 1 1 1 1 1 1 0]",
            "[0] nn.Dropout keeps the same places of every shard; out is x * mask / 0.5, as on a single device",
            "[1] nn.Dropout keeps [1 0 1 1 1 1 1 0], a global mask keeps [1 0 1 0 1 1 1 0]",
        ],
    ),
)
def random_numbers(n, graph=False, seed=0, batch=16, features=8, dim=0):
    keep, x = 0.5, drawn(np.random.default_rng(seed), batch, features)
    values = {"x": x, "weight": unknown(features, features)}
    values.update(dict.fromkeys(("repeated", "mask", "out"), unknown(batch, features)))

    def is_scaled_x(tensor):
        """Where it is not 0."""
        expected = x.exact * (tensor["value"] != 0) / keep
        return (np.abs(tensor["value"] - expected) <= reference.ROUNDING * np.abs(expected)).all()

    def masks_of_shards(seen, name):
        return [rank[name]["shard"] != 0 for rank in seen]

    def claims(seen):
        masks = [rank["mask"]["value"] for rank in seen if "mask" in rank]  # in a graph it has no value
        return {
            "nn.Dropout drops the same places of every shard": all_equal(masks_of_shards(seen, "repeated")),
            "each shard of the mask is drawn by itself": all_differ(masks_of_shards(seen, "out")),
            "nn.Dropout scales what it keeps": all(is_scaled_x(rank["repeated"]) for rank in seen),
            "out is x by the mask": all(is_scaled_x(rank["out"]) for rank in seen),
            "the mask is 1 where out is kept": all((mask == (seen[0]["out"]["value"] != 0)).all() for mask in masks),
        }

    layout = dict.fromkeys(("x", "repeated", "mask", "out"), f"S({dim})")
    return Case(values, layout=layout, claims=claims, sends=[0] * n)


def beginnings(blocks):
    """The first elements of each block, truncated to the smallest: blocks of an uneven split can be compared."""
    smallest = min(block.size for block in blocks)
    return [block.ravel()[:smallest] for block in blocks]


def all_equal(blocks):
    first, *others = beginnings(blocks)
    return all((other == first).all() for other in others)


def all_differ(blocks):
    return all((block != other).any() for block, other in combinations(beginnings(blocks), 2))
