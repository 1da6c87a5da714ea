"""The chapter of memory: the same network, with less of it on each rank."""

import numpy as np

from tests import reference
from tests.case import Case
from tests.chapters.training import UNEVEN, trained_names, weights_of
from tests.reference import Value


def fully_sharded(n, steps=3, gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained("adam", steps=steps, gain=gain, **sizes)
    hidden = ("S(0)", ranks, (values["x"].exact.shape[0], values["w0"].exact.shape[1]))
    whole = {name: ("B", ranks, values[name].exact.shape) for name in ("w0", "w1")}
    return Case(
        {name: ("B" if name == "losses" else "S(0)", ranks) for name in values},
        values,
        [("x", whole["w0"], hidden), (hidden, whole["w1"], ("S(0)", ranks, values["y"].exact.shape))],
        moves=[(("S(0)", ranks), ("B", ranks), "S(0)")] * 2,
        steps=steps,
        moves_each_step=[(("P", ranks), ("B", ranks))],
        added=trained_names(values),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


def zero_optimizer(n, steps=3, shard_min_size=1, gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained("adam", steps=steps, gain=gain, **sizes)
    layout = {name: ("S(0)" if name in "xy" else "B", ranks) for name in values}
    layout.update({name: ("P", ranks) for name in ("w0 grad", "w1 grad")})
    for name in ("w0", "w1"):
        rows, columns = values[name].exact.shape
        if rows // n * columns >= shard_min_size and rows >= n:  # the smallest shard counts
            layout.update({key: ("S(0)", ranks) for key in (f"{name} exp_avg", f"{name} exp_avg_sq", f"new {name}")})
    hidden = ("S(0)", ranks, (values["x"].exact.shape[0], values["w0"].exact.shape[1]))
    return Case(
        layout,
        values,
        [("x", "w0", hidden), (hidden, "w1", ("S(0)", ranks, values["y"].exact.shape))],
        steps=steps,
        moves_each_step=[(("P", ranks), ("B", ranks))],
        drawn=("x", "y", "w0", "w1", "w0 exp_avg", "w1 exp_avg", "new w0", "new w1"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


def two_blocks(seed=0, steps=3, batch=8, in_features=4, hidden=8, out_features=4, gain=1.0):
    """Steps of SGD on loss = mean((block(block(x)) - y)^2), block(x) = relu(x @ w0) @ w1; each product times `gain`."""
    rng, gain = np.random.default_rng(seed), Value.known(gain)
    x, y = Value.drawn(rng, batch, in_features), Value.drawn(rng, batch, out_features)
    shapes = [(in_features, hidden), (hidden, in_features), (in_features, hidden), (hidden, out_features)]
    weights = {f"w{i}": Value.drawn(rng, *shape) * Value.known(1 / 4) for i, shape in enumerate(shapes)}
    weights = {name: Value.known(w.exact) for name, w in weights.items()}  # float32 divides by 4 without rounding
    values, losses, update = {"x": x, "y": y, **weights}, [], reference.Optimizer("sgd")
    for _ in range(steps):
        products, inputs, gradients = [], [x], {}
        for i in range(4):
            products.append(gain * (inputs[i] @ weights[f"w{i}"]))
            inputs.append(products[i] if i % 2 else reference.relu(products[i]))
        error = inputs[4] - y
        losses.append(reference.mean(error * error))
        error = reference.constant(2 / error.exact.size) * error
        for i in (3, 2, 1, 0):
            error = error if i % 2 else reference.gate(error, products[i])
            gradients[f"w{i}"] = gain * (inputs[i].T @ error)
            error = gain * (error @ weights[f"w{i}"].T)
        weights = update.step(weights, gradients)
    values.update({f"w{i} grad": gradients[f"w{i}"] for i in range(4)})
    values.update({f"new {name}": w for name, w in weights.items()})
    values["losses"] = reference.stacked(losses)
    return values


def activation_checkpointing(n, steps=3, checkpointing=True, **sizes):
    ranks = list(range(n))
    values = two_blocks(steps=steps, **sizes)
    rows, (_, hidden) = values["x"].exact.shape[0], values["w0"].exact.shape
    a0, a2 = [("S(0)", ranks, (rows, hidden))] * 2
    a1, out = [("S(0)", ranks, values[name].exact.shape) for name in ("x", "y")]
    first, second = [("x", "w0", a0), (a0, "w1", a1)], [(a1, "w2", a2), (a2, "w3", out)]
    return Case(
        {name: ("S(0)" if name in "xy" else "B", ranks) for name in values},
        values,
        first + second,
        matmuls_again=second + first if checkpointing else [],
        in_graph={f"w{i} grad": ("P", ranks) for i in range(4)},
        steps=steps,
        moves_each_step=[(("P", ranks), ("B", ranks))],
        added=tuple(name for name in values if name not in ("x", "y", "w0", "w1", "w2", "w3")),
        drawn=("x", "y", "w0", "w1", "w2", "w3"),
        sends=[2 * (n - 1) / n * sum(values[f"w{i}"].exact.size for i in range(4))] * n,
    )


def auto_parallel(n, steps=3, gain=1.0, batch=8, in_features=256, hidden=1024, out_features=256, seed=0):
    """What OneFlow chooses cannot be derived: these are the two layouts, and the sizes here are not near the border."""
    ranks, split_weights = list(range(n)), batch <= 512 and in_features > 100
    sizes = {"batch": batch, "in_features": in_features, "hidden": hidden, "out_features": out_features}
    values = reference.trained("sgd", seed=seed, steps=steps, gain=gain, shrink=16, **sizes)
    values = {name: value for name, value in values.items() if not name.endswith(" grad")}
    layout = {name: ("S(0)" if name in "xy" else "B", ranks) for name in values}
    if split_weights:
        layout.update({"new w0": ("S(1)", ranks), "new w1": ("S(0)", ranks)})
    hidden = ("S(0)", ranks, (batch, hidden))
    return Case(
        layout,
        values,
        [("x", "w0", hidden), (hidden, "w1", ("S(0)", ranks, (batch, out_features)))],  # as the script says, not as run
        steps=steps,
        moves_each_step=[(("P", ranks), ("B", ranks))],
        drawn=tuple(name for name in values if name != "losses"),
        sends=[(n - 1) / n * batch * (in_features + 3 * out_features)] * n,
    )


CASES = {
    "fully_sharded": fully_sharded,
    "zero_optimizer": zero_optimizer,
    "activation_checkpointing": activation_checkpointing,
    "auto_parallel": auto_parallel,
}
SIZES = {
    "fully_sharded": {"even": {}, "uneven": UNEVEN},
    "activation_checkpointing": {"even": {}, "uneven": UNEVEN, "off": {"checkpointing": False}},
    "auto_parallel": {
        "even": {"steps": 1},  # with more, sums of 1024 numbers would leave no bound that says something
        "uneven": {"batch": 7, "in_features": 250, "hidden": 1022, "out_features": 251, "steps": 1, "seed": 1},
        "large batch": {"batch": 1024, "steps": 1},
        "small weights": {"in_features": 4, "hidden": 8, "out_features": 4},
    },
    "zero_optimizer": {
        "even": {},
        "uneven": UNEVEN,
        "few rows": {"batch": 4, "in_features": 3, "hidden": 2, "seed": 2},  # fewer than ranks: such a weight stays B
        "small shards": {"in_features": 6, "hidden": 12, "out_features": 5, "shard_min_size": 20},
    },
}
GRAPH_ONLY = {"auto_parallel", "zero_optimizer"}
