"""The chapter on your own model: a module that is not edited, under each strategy."""

import numpy as np

from tests.cases import reference_module
from tests.cases.recipe_case import Case, case_of_recipe, in_steps, reduced
from tests.cases.reference import unknown
from tests.cases.reference_module import NUM_CLASSES, SEQ_LEN

MEASURED_MODEL = {"batch": 96, "hidden_size": 384}  # whole models compute much more for what they send
REPLACED = {  # what `mutate` changes and has no effect
    r"^nn\.Linear\([\w *]+, [\w *]*hidden_size\) -> type\(": "the layout replaces the layer's class and its forward",
}
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buf",)}
LOCAL = ("local", [])
LAYERS = 2
FEW_STEPS = {"batch": 6, "hidden_size": 12, "steps": 3, "seed": 1}


def layouts(shapes, optimizer, where, rows, out, gradients=None):
    """{name: (SBP, ranks)} of all tensors. where: of a parameter by its name; rows: of ids; out: of the targets;
    gradients: where they are not laid out as the parameter."""
    found = {"ids": rows, "targets": out}
    for name in shapes:
        found.update({key: where(name) for key in (name, f"new {name}")})
        found.update({f"{name} {moment}": where(name) for moment in MOMENTS[optimizer]})
        found[f"{name} grad"] = (gradients or where)(name)
    return {**found, "losses": out}


def case_of(layout, shapes, optimizer, graph, seed, steps, batch, matmul_scale, parts=0, **facts):
    """The Case of a training whose initial weights OneFlow draws: its values are known when those are."""
    sizes = {"ids": (batch, SEQ_LEN), "targets": (batch,), "losses": (steps,), "logits": (batch, NUM_CLASSES)}

    def values_of(arrays):
        drawn = {name: arrays[name] for name in shapes}
        values, added = reference_module.trained(drawn, optimizer, graph, seed, steps, batch, matmul_scale, parts)
        return values, added if parts else {}

    values = {name: unknown(*(shapes.get(name.replace("new ", "").split(" ")[0]) or sizes[name])) for name in layout}
    return Case(layout, values, values_of=values_of, **facts)


def three_matmuls(batch, hidden_size, x, weights, inner, summed, out):
    """Of each block, and of the head. weights: the layouts of up, down and head."""
    tokens, wide = (batch, SEQ_LEN, hidden_size), (batch, SEQ_LEN, 4 * hidden_size)
    up, down, head = weights
    found = []
    for _ in range(LAYERS):
        found.append(((*x, tokens), (*up, (4 * hidden_size, hidden_size)), (*inner, wide)))
        found.append(((*inner, wide), (*down, (hidden_size, 4 * hidden_size)), (*summed, tokens)))
    return [*found, ((*x, (batch, hidden_size)), (*head, (NUM_CLASSES, hidden_size)), (*out, (batch, NUM_CLASSES)))]


def numbers_in(shapes, *ends):
    """How many numbers the parameters have whose names end so."""
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if not ends or name.endswith(ends))


def tensor_parallel_sizes(n):
    mesh = {"data": 2} if n > 2 and n % 2 == 0 else {}
    return {
        "other": {**FEW_STEPS, **mesh},
        "momentum": {"optimizer": "momentum", **mesh},
        "data": {"data": n, "steps": 2},
    }


@case_of_recipe(
    tensor_parallel_sizes,
    measured_at=MEASURED_MODEL,
    refused={"--data 0": "it must divide the 2 ranks", "--dropout 2": "from 0 to 1"},
    equivalent=REPLACED,
)
def tensor_parallel_module(
    n, graph=False, seed=0, steps=20, optimizer="adam", data=1, batch=8, hidden_size=8, matmul_scale=1.0
):
    tensor = n // data
    mesh = np.arange(n).reshape(data, tensor).tolist()
    shapes = reference_module.shapes(hidden_size, LAYERS)
    split = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}

    def sbp_of(name):
        return next((sbp for end, sbp in split.items() if name.endswith(end)), "B")

    x, summed, loss = ("S(0), B", mesh), ("S(0), P", mesh), ("P, B", mesh)
    over = "P" if graph else "B"
    layout = layouts(
        shapes,
        optimizer,
        lambda name: (f"B, {sbp_of(name)}", mesh),
        x,
        x,
        lambda name: (f"{over}, {sbp_of(name)}", mesh),
    )
    weights = [("B, S(0)", mesh), ("B, S(1)", mesh), ("B, B", mesh)]
    pinned, all_reduce = (x, x, "S(0), B"), (summed, x)
    splits = [(("B, B", mesh), (f"B, {sbp}", mesh)) for sbp in ("S(0)", "S(0)") * LAYERS + ("S(1)", "B") * LAYERS]
    split_numbers = numbers_in(shapes, *split)
    kept = numbers_in(shapes) - split_numbers + split_numbers / tensor
    return case_of(
        layout,
        shapes,
        optimizer,
        graph,
        seed,
        steps,
        batch,
        matmul_scale,
        parts=data if graph else 0,
        matmuls=in_steps(graph, steps, three_matmuls(batch, hidden_size, x, weights, ("S(0), S(2)", mesh), summed, x)),
        moves=[
            *[(LOCAL, ("B, B", mesh))] * len(shapes),
            *splits,
            *in_steps(graph, steps, [pinned, all_reduce] * LAYERS),
        ],
        reads=[loss if graph or data > 1 else ("B, B", mesh)] * steps,
        sends=[2 * LAYERS * reduced(tensor, batch / data * SEQ_LEN * hidden_size) + reduced(data, kept)] * n,
    )


@case_of_recipe({"other": {**FEW_STEPS, "micro_batches": 3}, "adam": {"optimizer": "adam"}}, measured_at=MEASURED_MODEL)
def pipeline_module(
    n, graph=False, seed=0, steps=20, optimizer="momentum", micro_batches=2, batch=8, hidden_size=8, matmul_scale=1.0
):
    shapes = reference_module.shapes(hidden_size, LAYERS)
    parts = ["embedding", *(f"blocks.{i}" for i in range(LAYERS)), "head"]
    stage_of = {part: k * n // len(parts) for k, part in enumerate(parts)}

    def where(name):
        return ("B", [next(stage for part, stage in stage_of.items() if name.startswith(f"{part}."))])

    layout = layouts(shapes, optimizer, where, ("B", [0]), ("B", [n - 1]))
    if graph:
        layout = {name: place for name, place in layout.items() if not name.endswith(" grad")}
    rows, matmuls = batch // micro_batches, []
    for i in range(LAYERS):
        own = where(f"blocks.{i}.")
        matmuls += three_matmuls(rows, hidden_size, own, [own] * 3, own, own, own)[:2]
    head = where("head.")
    matmuls += three_matmuls(rows, hidden_size, head, [head] * 3, head, head, head)[-1:]
    stages = list(stage_of.values())
    edges = list(zip([0, *stages], stages))  # the stages that the input of each part comes from, and goes to
    moves = [(("B", [before]), ("B", [after])) for before, after in edges]
    if graph:  # set_stage moves it, then the part's own to_global
        moves = [pair for old, new in moves for pair in ((old, new), (new, new))]
    boundary = {k: 0 for k in range(n)}
    for part, (before, after) in zip(parts[1:], edges[1:]):
        if before != after:
            numbers = batch * hidden_size * (1 if part == "head" else SEQ_LEN)
            boundary[before] += numbers
            boundary[after] += numbers
    return case_of(
        layout,
        shapes,
        optimizer,
        graph,
        seed,
        steps,
        batch,
        matmul_scale,
        matmuls=in_steps(graph, steps, matmuls, passes=micro_batches),
        moves=[
            *[(LOCAL, where(name)) for name in shapes],
            *in_steps(graph, steps, moves, passes=micro_batches),
        ],
        reads=[("B", [n - 1])] * steps,
        stages=[(k, [k]) for k in stages],
        sends=list(boundary.values()),
    )


def fully_sharded_sizes(n):
    sizes = {"other": {**FEW_STEPS, "batch": 7, "num_layers": 1}, "momentum": {"optimizer": "momentum"}}
    return {**sizes, "fewer rows than ranks": {**FEW_STEPS, "hidden_size": 3}} if n > 3 else sizes


@case_of_recipe(fully_sharded_sizes, measured_at=MEASURED_MODEL)
def fully_sharded_module(
    n, graph=False, seed=0, steps=20, optimizer="adam", batch=8, hidden_size=8, num_layers=2, matmul_scale=1.0
):
    ranks = list(range(n))
    shapes = reference_module.shapes(hidden_size, num_layers)
    rows, whole = ("S(0)", ranks), ("B", ranks)
    held = {name: rows if shape[0] >= n else whole for name, shape in shapes.items()}
    made = sorted(shapes, key=lambda name: name.startswith("blocks."))  # the blocks after all else
    layout = layouts(shapes, optimizer, held.get, rows, rows)
    matmuls = three_matmuls(batch, hidden_size, rows, [whole] * 3, rows, rows, rows)
    matmuls = [*matmuls[: 2 * num_layers], matmuls[-1]]
    return case_of(
        layout,
        shapes,
        optimizer,
        graph,
        seed,
        steps,
        batch,
        matmul_scale,
        matmuls=in_steps(graph, steps, matmuls),
        moves=[
            *[move for name in made for move in ((LOCAL, whole), (whole, held[name]))],
            *in_steps(graph, steps, [(own, whole, own[0]) for own in held.values()]),
        ],
        reads=[("P", ranks)] * steps,
        sends=[reduced(n, numbers_in(shapes))] * n,
    )


@case_of_recipe({"other": {"batch": 6, "steps": 2, "seed": 1}}, tests=["tests/test_your_model.py"], equivalent=REPLACED)
def pytorch_weights(n, graph=False, seed=0, steps=3, batch=8, matmul_scale=1.0):
    ranks, hidden_size = list(range(n)), 8
    shapes = reference_module.shapes(hidden_size, LAYERS)
    split = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}

    def where(name):
        return next((sbp for end, sbp in split.items() if name.endswith(end)), "B"), ranks

    whole, summed = ("B", ranks), ("P", ranks)
    layout = {**layouts(shapes, "momentum", where, whole, whole), "logits": LOCAL}
    matmuls = three_matmuls(
        batch, hidden_size, whole, [("S(0)", ranks), ("S(1)", ranks), whole], ("S(2)", ranks), summed, whole
    )
    in_block = [(whole, whole, "B"), (summed, whole)] * LAYERS
    return case_of(
        layout,
        shapes,
        "momentum",
        graph,
        seed,
        steps,
        batch,
        matmul_scale,
        matmuls=[*matmuls, *in_steps(graph, steps, matmuls)],
        lazy=[False] * len(matmuls) + [graph] * len(in_steps(graph, steps, matmuls)),
        moves=[*[(LOCAL, where(name)) for name in shapes], *in_block, *in_steps(graph, steps, in_block)],
        reads=[whole] * (steps + 1),
        numbers=("logits",),
        sends=[2 * LAYERS * reduced(n, batch * SEQ_LEN * hidden_size)] * n,
    )
