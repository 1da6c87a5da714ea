"""The chapter of communication by hand: a ring, a parameter server, stale gradients."""

import numpy as np

from tests.cases import reference
from tests.cases.layouts import LOCAL
from tests.cases.recipe_case import Case, Main, case_of_recipe, weights_of
from tests.cases.reference import Value, mlp, mse, total
from tests.cases.train import UNEVEN


@case_of_recipe(
    {"uneven": {"in_features": 7, "out_features": 5, "seed": 1}},
    main=Main(
        comparisons=2,
        prints=[
            "[0] sends chunks 0 to add, then finished chunks 1",
            "[0] the ring's sum and P -> B equal the sum in numpy",
            "[1] sends chunks 1 to add, then finished chunks 0",
        ],
    ),
)
def ring_all_reduce(n, graph=False, seed=0, in_features=8, out_features=4):
    ranks = list(range(n))
    own = [reference.drawn(np.random.default_rng([seed, rank]), in_features, out_features) for rank in ranks]
    chunks = [in_features * (i + 1) // n - in_features * i // n for i in ranks]  # rows of each
    # in the first half of the ring a rank sends all chunks but one, in the second all but another
    not_sent = [chunks[(rank + 1) % n] + chunks[(rank + 2) % n] for rank in ranks]
    return Case(
        {"own": own[0], **dict.fromkeys(("summed", "partial", "reduced"), total(own))},
        parts={"partial": own, "own": own},
        sends=[(2 * in_features - rows) * out_features for rows in not_sent],
    )


def worker_rows(values, n):
    """x and y of a batch as n workers hold them: x0, y0, x1, y1, ..."""
    rows = reference.rows_of(len(values["x"].exact), n)
    return {f"{name}{k}": values[name][part] for k, part in enumerate(rows) for name in "xy"}


def of_workers(n):
    """The layout of xk and yk, which worker k has."""
    return {f"{name}{k}": ("B", [k]) for name in "xy" for k in range(n)}


def on_workers(values, n):
    """What each worker computes: its rows, times the weights that it has fetched."""
    return [2 * len(values[f"x{k}"].exact) * (values["w0"].exact.size + values["w1"].exact.size) for k in range(n)]


WEIGHTS = 4 * (4 * 8 + 8 * 4)  # bytes of w0 and w1 in float32


@case_of_recipe(
    {"uneven": UNEVEN},
    main=Main(
        prints=["[0] in each step rank 0 sends (n-1) x the weights = 256 bytes, and receives 256 bytes of gradients"],
        prints_empty=True,
    ),
)
def parameter_server(n, graph=False, steps=3, matmul_scale=1.0, **sizes):
    values = reference.trained("momentum", steps=steps, matmul_scale=matmul_scale, **sizes)
    values = {**worker_rows(values, n), **{name: value for name, value in values.items() if name not in "xy"}}
    weights = weights_of(values)
    return Case(
        values,
        on_workers(values, n),
        of_workers(n),
        sends=[(n - 1) * weights] + [weights] * (n - 1),
    )


def with_a_slow_worker(n, steps, sync_every, matmul_scale, **sizes):
    """x0, y0, ..., weights before and after, losses, and how old the weights of each worker were in each step."""
    x, y, weights = reference.mlp_inputs(**sizes)
    values, optimizer, losses = {**worker_rows({"x": x, "y": y}, n), **weights}, reference.Optimizer(), []
    for step in range(steps):
        if step % sync_every == 0:
            old = weights
        loss, fetched = 0, [weights] * (n - 1) + [old]
        for k in range(n):
            own_x, own_y = values[f"x{k}"], values[f"y{k}"]
            part = mse(mlp(own_x, fetched[k], matmul_scale), own_y) * (own_y.exact.size / y.exact.size)
            weights = optimizer.step(weights, reference.gradients(part, fetched[k]))
            loss += part.exact.item()
        losses.append(loss)
    values.update({f"new {name}": w for name, w in weights.items()})
    staleness = [[0] * (n - 1) + [step % sync_every] for step in range(steps)]
    return {**values, "losses": Value(losses, rounded=True), "staleness": Value(staleness, dtype="int64")}


@case_of_recipe(
    {"uneven": {**UNEVEN, "steps": 4, "sync_every": 3}, "always synchronised": {"sync_every": 1}},
    refused={"--sync-every 0": "1 or more"},
    main=Main(
        prints=[
            "[0] step 0: the gradients are 0 0 steps old, loss 15.8732, without a slow worker 15.8732",
            "[0] step 1: the gradients are 0 1 steps old, loss 8.3499, without a slow worker 3.0886",
            "[0] step 2: the gradients are 0 0 steps old, loss 1.4050, without a slow worker 1.9346",
            "[0] step 3: the gradients are 0 1 steps old, loss 1.2775, without a slow worker 1.4858",
            "[0] losses equal those on a single device",
        ],
        alone={"sync_every": [1]},
        prints_empty=True,
    ),
)
def async_update(n, graph=False, steps=4, sync_every=2, matmul_scale=1.0, **sizes):
    values = with_a_slow_worker(n, steps, sync_every, matmul_scale, **sizes)
    weights = values["w0"].exact.size + values["w1"].exact.size
    return Case(
        values,
        on_workers(values, n),
        {**of_workers(n), "staleness": LOCAL},
        sends=[(n - 2 + 1 / sync_every) * weights] + [weights] * (n - 1),
    )
