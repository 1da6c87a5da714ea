"""The chapter of training: a two-layer network under each strategy."""

from tests import reference
from tests.case import Case

UNEVEN = {"batch": 7, "in_features": 6, "hidden": 10, "out_features": 5, "steps": 1, "seed": 1}


def weights_of(values):
    """Elements of all weights."""
    return values["w0"].exact.size + values["w1"].exact.size


def train_data_parallel(n, steps=3, optimizer="adam", gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained(optimizer, steps=steps, gain=gain, **sizes)
    layout = {name: ("S(0)" if name in "xy" else "B", ranks) for name in values}
    hidden = (values["x"].exact.shape[0], values["w0"].exact.shape[1])
    return Case(
        layout,
        values,
        [
            ("x", "w0", ("S(0)", ranks, hidden)),
            (("S(0)", ranks, hidden), "w1", ("S(0)", ranks, values["y"].exact.shape)),
        ],
        parts={
            (name, True): parts for name, parts in reference.gradient_parts(n, steps, gain, optimizer, **sizes).items()
        },
        in_graph={name: ("P", ranks) for name in ("w0 grad", "w1 grad")},
        steps=steps,
        moves_after=[(("P", ranks), ("B", ranks))] * steps,
        added=trained_names(values),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


def train_model_parallel(n, steps=3, input_gradient=True, gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained(steps=steps, gain=gain, input_gradient=input_gradient, **sizes)
    split = {"w0": "S(1)", "w1": "S(0)"}
    layout = {name: (next((split[w] for w in split if w in name), "B"), ranks) for name in values}
    (batch, inputs), (_, outputs) = values["x"].exact.shape, values["y"].exact.shape
    hidden, out = ("S(1)", ranks, (batch, values["w0"].exact.shape[1])), ("P", ranks, (batch, outputs))
    summed = batch * (outputs + input_gradient * inputs)
    return Case(
        layout,
        values,
        [("x", "w0", hidden), (hidden, "w1", out)],
        moves=[(("P", ranks), ("B", ranks))],
        moves_in_graph=[(("P", ranks), ("B", ranks))] * (1 + input_gradient),
        steps=steps,
        added=trained_names(values),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad", "x grad"),
        sends=[2 * (n - 1) / n * summed] * n,
    )


def trained_names(values):
    """What depends on sums over ranks, whose order eager and graph mode do not share."""
    return tuple(name for name in values if name not in ("x", "y", "w0", "w1"))


def gradient_accumulation(n, steps=3, micro_batches=2, gain=1.0, **sizes):
    ranks = list(range(n))
    sizes.setdefault("batch", 4 * n)
    values = reference.trained(steps=steps, gain=gain, **sizes)
    layout = {name: ("S(0)" if name in "xy" else "B", ranks) for name in values}
    layout.update({"micro losses": ("B", ranks), "losses": layout.pop("losses")})
    (batch, _), (_, outputs) = values["x"].exact.shape, values["y"].exact.shape
    values["micro losses"] = reference.micro_losses(n, steps, micro_batches, gain, **sizes)
    hidden, out = (("S(0)", ranks, (batch // micro_batches, width)) for width in (values["w0"].exact.shape[1], outputs))
    once = 2 * (n - 1) / n * weights_of(values)
    x, y = (("S(0)", ranks, (batch // micro_batches, values[name].exact.shape[1])) for name in "xy")
    return Case(
        layout,
        values,
        [(x, "w0", hidden), (hidden, "w1", out)],
        in_graph={"w0 grad": None, "w1 grad": None},
        moves=[(("local", []), ("S(0)", ranks))] * 2,
        steps=steps,
        passes=micro_batches,
        moves_in_graph=[],
        moves_each_step=[(("P", ranks), ("B", ranks))],
        added=trained_names(values),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[micro_batches * once] * n,
        sends_in_graph=[once] * n,
    )


def train_pipeline(n, steps=3, micro_batches=2, gain=1.0, **sizes):
    values = reference.trained(steps=steps, gain=gain, layers=n, shrink=2, **sizes)
    last = n - 1
    ranks = {**{f"w{k}": [k] for k in range(n)}, "x": [0], "y": [last], "losses": [last]}
    layout = {name: ("B", next(ranks[part] for part in name.split() if part in ranks)) for name in values}
    batch, widths = values["x"].exact.shape[0] // micro_batches, [values[f"w{k}"].exact.shape for k in range(n)]
    inputs = [("B", [k], (batch, widths[k][0])) for k in range(n)]
    outputs = [("B", [k], (batch, widths[k][1])) for k in range(n)]
    boundary = values["x"].exact.shape[0] * widths[0][1]
    return Case(
        layout,
        values,
        [(inputs[k], f"w{k}", outputs[k]) for k in range(n)],
        in_graph={f"w{k} grad": None for k in range(n)},
        moves=[(("B", [max(k - 1, 0)]), ("B", [k])) for k in range(n)],
        stages=[(k, [k]) for k in range(n)],
        steps=steps,
        passes=micro_batches,
        added=trained_names(values),
        drawn=("x", "y", *(f"w{k}" for k in range(n)), *(f"w{k} grad" for k in range(n))),
        sends=[boundary * ((k < last) + (k > 0)) for k in range(n)],
    )


def train_data_tensor(n, steps=3, gain=1.0, **sizes):
    values = reference.trained(steps=steps, gain=gain, **sizes)
    batch, hidden = values["x"].exact.shape[0], values["w0"].exact.shape[1]
    mesh, shape = [[0, 1], [2, 3]], values["y"].exact.shape
    sbps = {"x": "S(0), B", "y": "S(0), B", "w0": "B, S(1)", "w1": "B, S(0)", "losses": "B, B"}
    layout = {name: (next(sbps[part] for part in name.split() if part in sbps), mesh) for name in values}
    between = ("S(0), S(1)", mesh, (batch, hidden))
    return Case(
        layout,
        values,
        [("x", "w0", between), (between, "w1", ("S(0), P", mesh, shape))],
        parts={(name, True): parts for name, parts in reference.gradient_parts(2, steps, gain, **sizes).items()},
        in_graph={"w0 grad": ("P, S(1)", mesh), "w1 grad": ("P, S(0)", mesh)},
        moves=[(("S(0), P", mesh), ("S(0), B", mesh))],
        moves_each_step=[(("P, B", mesh), ("B, B", mesh))],
        steps=steps,
        added=trained_names(values),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[weights_of(values) / 2 + values["y"].exact.size / 2] * 4,
    )


def train_data_pipeline(n, steps=3, gain=1.0, **sizes):
    values = reference.trained(steps=steps, gain=gain, **sizes)
    batch, hidden = values["x"].exact.shape[0], values["w0"].exact.shape[1]
    w0, w1 = values["w0"].exact.size, values["w1"].exact.size
    first, last = [0, 1], [2, 3]
    where = {"x": ("S(0)", first), "y": ("S(0)", last), "w0": ("B", first), "w1": ("B", last), "losses": ("B", last)}
    layout = {name: next(where[part] for part in name.split() if part in where) for name in values}
    inner = [("S(0)", ranks, (batch, hidden)) for ranks in (first, last)]
    return Case(
        layout,
        values,
        [("x", "w0", inner[0]), (inner[1], "w1", ("S(0)", last, values["y"].exact.shape))],
        parts={(name, True): parts for name, parts in reference.gradient_parts(2, steps, gain, **sizes).items()},
        in_graph={"w0 grad": ("P", first), "w1 grad": ("P", last)},
        moves=[(inner[0][:2], inner[1][:2])],
        moves_each_step=[(("P", last), ("B", last))],
        steps=steps,
        added=trained_names(values),
        drawn=("x", "y", "w0", "w1", "w0 grad", "w1 grad"),
        sends=[w0 + hidden * batch / 2] * 2 + [w1 + hidden * batch / 2] * 2,
    )


MICRO = {"even": {}, "other": {**UNEVEN, "batch": 36, "micro_batches": 3}}
CASES = {
    "train_data_tensor": train_data_tensor,
    "train_data_pipeline": train_data_pipeline,
    "gradient_accumulation": gradient_accumulation,
    "train_pipeline": train_pipeline,
    "train_model_parallel": train_model_parallel,
    "train_data_parallel": train_data_parallel,
}
SIZES = {
    "train_data_tensor": {
        "even": {},
        "other": {**UNEVEN, "batch": 16, "in_features": 12, "hidden": 20, "out_features": 8},
    },
    "train_data_pipeline": {"even": {}, "uneven": UNEVEN},
    "gradient_accumulation": MICRO,
    "train_pipeline": {**MICRO, "many": {"batch": 9, "micro_batches": 9}},
    "train_model_parallel": {"even": {}, "uneven": UNEVEN, "no input gradient": {"input_gradient": False}},
    "train_data_parallel": {
        "even": {},
        "uneven": UNEVEN,
        **{name: {"optimizer": name} for name in ("adamw", "momentum", "sgd")},
    },
}
GRAPH_ONLY = set()
