"""The chapter of training: a two-layer network under each strategy."""

from tests.cases import reference
from tests.cases.case import Case, case_of_recipe, in_steps, layout_by_word, through_stages

UNEVEN = {"batch": 7, "in_features": 6, "hidden": 10, "out_features": 5, "steps": 1, "seed": 1}
MICRO = {**UNEVEN, "batch": 36, "micro_batches": 3}


def weights_of(values):
    """Elements of all weights."""
    return values["w0"].exact.size + values["w1"].exact.size


def reduced(n, elements):
    """What each of n ranks sends in an all-reduce."""
    return 2 * (n - 1) / n * elements


def two_matmuls(values, ranks, first="w0", second="w1", x="x"):
    """Those of data parallel: x is split by rows, the weights are whole."""
    shapes = [(values["x"].exact.shape[0], values[w].exact.shape[1]) for w in ("w0", "w1")]
    hidden, out = (("S(0)", ranks, shape) for shape in shapes)
    return [(x, first, hidden), (hidden, second, out)]


@case_of_recipe({"uneven": UNEVEN, **{name: {"optimizer": name} for name in ("adamw", "momentum", "sgd")}})
def train_data_parallel(n, graph=False, steps=3, optimizer="adam", gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained(optimizer, steps=steps, gain=gain, **sizes)
    layout = layout_by_word(values, dict.fromkeys("xy", ("S(0)", ranks)), ("B", ranks))
    parts = {}
    if graph:
        layout.update({"w0 grad": ("P", ranks), "w1 grad": ("P", ranks)})
        parts = reference.gradient_parts(n, steps, gain, optimizer, **sizes)
    return Case(
        layout,
        values,
        in_steps(graph, steps, two_matmuls(values, ranks)),
        [(("P", ranks), ("B", ranks))] * steps,
        parts,
        graph_calls=steps,
        summed=tuple(values),
        sends=[reduced(n, weights_of(values))] * n,
    )


@case_of_recipe({"uneven": UNEVEN, "no input gradient": {"input_gradient": False}})
def train_model_parallel(n, graph=False, steps=3, input_gradient=True, gain=1.0, **sizes):
    ranks = list(range(n))
    values = reference.trained(steps=steps, gain=gain, input_gradient=input_gradient, **sizes)
    layout = layout_by_word(values, {"w0": ("S(1)", ranks), "w1": ("S(0)", ranks)}, ("B", ranks))
    (batch, inputs), (_, outputs) = values["x"].exact.shape, values["y"].exact.shape
    hidden, out = ("S(1)", ranks, (batch, values["w0"].exact.shape[1])), ("P", ranks, (batch, outputs))
    all_reduce = [(("P", ranks), ("B", ranks))]
    return Case(
        layout,
        values,
        in_steps(graph, steps, [("x", "w0", hidden), (hidden, "w1", out)]),
        in_steps(graph, steps, all_reduce * (1 + (graph and input_gradient))),
        graph_calls=steps,
        summed=tuple(values),
        sends=[reduced(n, batch * (outputs + input_gradient * inputs))] * n,
    )


@case_of_recipe({"other": MICRO})
def gradient_accumulation(n, graph=False, steps=3, micro_batches=2, gain=1.0, **sizes):
    ranks = list(range(n))
    sizes.setdefault("batch", 4 * n)
    values = reference.trained(steps=steps, gain=gain, **sizes)
    layout = layout_by_word(values, dict.fromkeys("xy", ("S(0)", ranks)), ("B", ranks))
    layout.update({"micro losses": ("B", ranks), "losses": layout.pop("losses")})
    if graph:
        del layout["w0 grad"], layout["w1 grad"]
    values["micro losses"] = reference.micro_losses(n, steps, micro_batches, gain, **sizes)
    rows = sizes["batch"] // micro_batches
    widths = (*values["w0"].exact.shape, values["y"].exact.shape[1])
    x, hidden, out = (("S(0)", ranks, (rows, width)) for width in widths)
    parts = [(("local", []), ("S(0)", ranks))] * 2
    return Case(
        layout,
        values,
        in_steps(graph, steps, [(x, "w0", hidden), (hidden, "w1", out)], passes=micro_batches),
        in_steps(graph, steps, [] if graph else parts, [(("P", ranks), ("B", ranks))], micro_batches),
        graph_calls=steps,
        summed=tuple(values),
        sends=[reduced(n, weights_of(values)) * (1 if graph else micro_batches)] * n,
    )


@case_of_recipe({"other": MICRO, "many": {"batch": 9, "micro_batches": 9}})
def train_pipeline(n, graph=False, steps=3, micro_batches=2, gain=1.0, **sizes):
    values = reference.trained(steps=steps, gain=gain, layers=n, shrink=2, **sizes)
    where = {**{f"w{k}": ("B", [k]) for k in range(n)}, "x": ("B", [0])}
    layout = layout_by_word(values, where, ("B", [n - 1]))
    if graph:
        layout = {name: place for name, place in layout.items() if not name.endswith(" grad")}
    rows, widths = values["x"].exact.shape[0] // micro_batches, [values[f"w{k}"].exact.shape for k in range(n)]
    inputs, outputs = ([("B", [k], (rows, widths[k][side])) for k in range(n)] for side in (0, 1))
    moves = [(("B", [max(k - 1, 0)]), ("B", [k])) for k in range(n)]
    boundary = values["x"].exact.shape[0] * widths[0][1]
    return Case(
        layout,
        values,
        in_steps(graph, steps, [(inputs[k], f"w{k}", outputs[k]) for k in range(n)], passes=micro_batches),
        in_steps(graph, steps, through_stages(graph, moves), passes=micro_batches),
        stages=[(k, [k]) for k in range(n)],
        graph_calls=steps,
        summed=tuple(values),
        sends=[boundary * ((k < n - 1) + (k > 0)) for k in range(n)],
    )


@case_of_recipe({"other": {**UNEVEN, "batch": 16, "in_features": 12, "hidden": 20, "out_features": 8}})
def train_data_tensor(n, graph=False, steps=3, gain=1.0, **sizes):
    values = reference.trained(steps=steps, gain=gain, **sizes)
    batch, hidden = values["x"].exact.shape[0], values["w0"].exact.shape[1]
    mesh, shape = [[0, 1], [2, 3]], values["y"].exact.shape
    rows = ("S(0), B", mesh)
    layout = layout_by_word(
        values, {"x": rows, "y": rows, "w0": ("B, S(1)", mesh), "w1": ("B, S(0)", mesh)}, ("B, B", mesh)
    )
    parts = {}
    if graph:
        layout.update({"w0 grad": ("P, S(1)", mesh), "w1 grad": ("P, S(0)", mesh)})
        parts = reference.gradient_parts(2, steps, gain, **sizes)
    between = ("S(0), S(1)", mesh, (batch, hidden))
    activations, losses = (("S(0), P", mesh), rows), (("P, B", mesh), ("B, B", mesh))
    return Case(
        layout,
        values,
        in_steps(graph, steps, [("x", "w0", between), (between, "w1", ("S(0), P", mesh, shape))]),
        in_steps(graph, steps, [activations], [losses]),
        parts,
        graph_calls=steps,
        summed=tuple(values),
        sends=[weights_of(values) / 2 + values["y"].exact.size / 2] * 4,
    )


@case_of_recipe({"uneven": UNEVEN})
def train_data_pipeline(n, graph=False, steps=3, gain=1.0, **sizes):
    values = reference.trained(steps=steps, gain=gain, **sizes)
    batch, hidden = values["x"].exact.shape[0], values["w0"].exact.shape[1]
    first, last = [0, 1], [2, 3]
    where = {"x": ("S(0)", first), "y": ("S(0)", last), "w0": ("B", first)}
    layout, parts = layout_by_word(values, where, ("B", last)), {}
    if graph:
        layout.update({"w0 grad": ("P", first), "w1 grad": ("P", last)})
        parts = reference.gradient_parts(2, steps, gain, **sizes)
    inner = [("S(0)", ranks, (batch, hidden)) for ranks in (first, last)]
    weights = [values[w].exact.size for w in ("w0", "w1")]
    return Case(
        layout,
        values,
        in_steps(graph, steps, [("x", "w0", inner[0]), (inner[1], "w1", ("S(0)", last, values["y"].exact.shape))]),
        in_steps(graph, steps, [(inner[0][:2], inner[1][:2])], [(("P", last), ("B", last))]),
        parts,
        graph_calls=steps,
        summed=tuple(values),
        sends=[size + hidden * batch / 2 for size in weights for _ in range(2)],
    )
