"""The chapter of training: an MLP of two layers under each strategy."""

import numpy as np

from tests.cases import reference
from tests.cases.layouts import LOCAL
from tests.cases.recipe_case import (
    NOT_SQUARE,
    Case,
    Main,
    case_of_recipe,
    reduced,
    shares,
    weights_of,
)
from tests.cases.reference import Value

UNEVEN = {"batch": 7, "in_features": 6, "hidden_size": 10, "out_features": 5, "steps": 1}
MICRO = {**UNEVEN, "batch": 36, "micro_batches": 3}


def by_rows(values, n):
    """What each rank computes in data parallel: its rows of x, times all weights."""
    return shares(n, len(values["x"].exact), 2 * weights_of(values))


@case_of_recipe(
    {"uneven": UNEVEN, **{name: {"optimizer": name} for name in ("adamw", "momentum", "sgd")}},
)
def train_data_parallel(n, graph=False, steps=3, optimizer="adam", matmul_scale=1.0, **sizes):
    optimizer = reference.Optimizer(optimizer, graph=graph)
    values, parts = reference.train_mlp(reference.mlp_inputs(**sizes), optimizer, steps, matmul_scale, parts=n)
    return Case(
        values,
        by_rows(values, n),
        parts=parts if graph else {},
        sends=[reduced(n, weights_of(values))] * n,
    )


@case_of_recipe({"uneven": UNEVEN})
def train_tensor_parallel(n, graph=False, steps=3, matmul_scale=1.0, **sizes):
    values = reference.trained(steps=steps, matmul_scale=matmul_scale, **sizes)
    batch, (inputs, hidden), (_, outputs) = (len(values["x"].exact), *(values[w].exact.shape for w in ("w0", "w1")))
    return Case(
        values,
        shares(n, hidden, 2 * batch * (inputs + outputs)),  # by its columns of w0, which are its rows of w1
        sends=[reduced(n, batch * outputs)] * n,
    )


@case_of_recipe(
    {"other": MICRO},
    main=Main(
        prints={
            False: ["[0] all-reduces in a step: 4, of the gradients of 2 weights after each micro-batch"],
            True: ["[0] all-reduces in a step: 2, of the gradients of 2 weights after the last micro-batch"],
        },
        alone={"micro_batches": [1]},
        other_lines=["--graph --micro-batches 4"],
        refused_expressions=["train(flow.placement.all('cpu'), batch=6)"],
    ),
)
def gradient_accumulation(n, graph=False, steps=3, micro_batches=2, matmul_scale=1.0, **sizes):
    sizes = {"batch": 16, "matmul_scale": matmul_scale, **sizes}
    values, before = (reference.trained(steps=k, **sizes) for k in (steps, steps - 1))
    weights = {name: before[f"new {name}"] for name in ("w0", "w1")}
    micro_losses = []  # of the last step; the i-th micro-batch has the i-th part of the rows of each rank
    for rows in np.arange(sizes["batch"]).reshape(n, micro_batches, -1).swapaxes(0, 1).reshape(micro_batches, -1):
        out = reference.mlp(values["x"][rows], weights, matmul_scale)
        micro_losses.append(reference.mse(out, values["y"][rows]).exact.item())
    values.update({"micro_losses": Value(micro_losses, rounded=True), "losses": values.pop("losses")})
    return Case(
        values,
        by_rows(values, n),
        micro_batches=micro_batches,
        sends=[reduced(n, weights_of(values)) * (1 if graph else micro_batches)] * n,
    )


@case_of_recipe(
    {"other": {**UNEVEN, "batch": 16, "in_features": 12, "hidden_size": 20, "out_features": 8}},
    variants=[{"hidden_size": 8}],  # little weight: what is left runs along axis 1
    main=Main(
        refused_expressions=[
            f"train({mesh}, {size}=6)"
            for mesh in ("placements('cpu', 4)", *(f"flow.placement('cpu', {ranks})" for ranks in NOT_SQUARE))
            for size in ("batch", "in_features", "hidden_size", "out_features")
        ],
    ),
)
def train_data_tensor(n, graph=False, steps=3, matmul_scale=1.0, **sizes):
    momentum = reference.Optimizer("momentum")
    values, parts = reference.train_mlp(reference.mlp_inputs(**sizes), momentum, steps, matmul_scale, parts=2)
    return Case(
        values,
        [2 * len(values["y"].exact) * weights_of(values) / 4] * 4,  # half of the rows, times half of each weight
        ranks=[[0, 1], [2, 3]],
        parts=parts if graph else {},
        sends=[weights_of(values) / 2 + values["y"].exact.size / 2] * 4,
    )


@case_of_recipe(
    {"uneven": {**UNEVEN, "steps": 2, "seed": 1}},
    refused={"--batch 1": "2 or more, a row for each rank"},
    main=Main(
        prints=[
            "[0] w0 (4, 8), a local tensor, its sum after training -5.4149",
            "[0] w1 (8, 4), a local tensor, its sum after training -2.2187",
            "[1] w0 (4, 8), a local tensor, its sum after training -5.4149",
            "[1] w1 (8, 4), a local tensor, its sum after training -2.2187",
        ],
    ),
)
def ddp(n, graph=False, seed=0, steps=3, batch=8, matmul_scale=1.0, **sizes):
    """Each rank draws weights of its own; those of rank 0 are trained on the whole batch."""
    x, y, weights = reference.mlp_inputs(seed, batch, **sizes)
    rngs = [np.random.default_rng([seed, rank]) for rank in range(n)]
    own = [{name: reference.drawn(rng, *w.exact.shape) for name, w in weights.items()} for rng in rngs]
    trained, _ = reference.descend(
        own[0], lambda w, _: ({}, reference.mse(reference.mlp(x, w, matmul_scale), y)), steps
    )
    parts = {f"own_{name}": [weights[name] for weights in own] for name in own[0]}
    for name, batch_of_all in (("x", x), ("y", y)):
        parts[name] = [batch_of_all[rows] for rows in reference.rows_of(batch, n)]
    of_rank_0 = {name: by_rank[0] for name, by_rank in parts.items()}
    values = {"x": of_rank_0["x"], "y": of_rank_0["y"], **own[0], **trained, **of_rank_0}
    return Case(
        values,
        shares(n, batch, 2 * weights_of(values)),
        dict.fromkeys(("own_w0", "own_w1"), LOCAL),
        parts=parts,
        sends=[reduced(n, weights_of(values))] * n,
    )
