"""The chapter on your own model: a module that is not edited, under each strategy."""

from pathlib import Path

import numpy as np

from oneflow_cookbook.start.recipe import ROOT
from tests.cases import reference_module
from tests.cases.recipe_case import Case, Main, case_of_recipe, in_steps, reduced
from tests.cases.reference import unknown
from tests.cases.reference_module import NUM_CLASSES, SEQ_LEN

MEASURED_MODEL = {"batch": 384, "hidden_size": 96}  # whole models compute much more for what they send
REPLACED = {  # mutations without effect
    r"^nn\.Linear\([\w *]+, [\w *]*hidden_size\) -> type\(": "the layout replaces the layer's class and its forward",
}
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buf",)}
TENSOR_PARALLEL = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}  # the other parameters are B
LOCAL = ("local", [])
LAYERS = 2
PYTORCH = str(ROOT / "tests" / "data" / "pytorch_float32.safetensors")  # weights
RESHARD = {"reshard_after_forward": True}
FEW_STEPS = {"batch": 6, "hidden_size": 12, "steps": 3, "seed": 1}


def trained(trait, layout, recipe, graph=True):
    """The expression that trains a model of tests/on_rank_traits.py, laid out by the recipe."""
    module = "__import__('tests.on_rank_traits', fromlist=['on_rank_traits'])"
    return f"{module}.losses_and_weights({trait!r}, {layout!r}, {graph}, {{{recipe!r}: __file__}})"


def with_traits(layout):
    """Those of models with an unusual trait, or global already, under a layout; of dropout and a subclass's tensors."""
    words = f"buffer or subclass or global_already or refused_in_a_line or (trait or dropout) and {layout}"
    files = ("test_your_model.py", "slow/test_traits.py", "slow/test_your_model_bytes.py")
    return [*(f"tests/{file}" for file in files), "-k", words]


def lost_in_a_graph(layout, recipe):
    """Models that a graph would train differently from eager mode."""
    traits = ("forward_hook", "value_kept_in_self", "buffer_changed_in_place")
    return [trained(trait, layout, recipe) for trait in traits]


def damaged(folder):
    """Files for pytorch_weights.py, each wrong in another way."""
    content = Path(PYTORCH).read_bytes()
    length = int.from_bytes(content[:8], "little")
    files = {
        "short": b"",
        "zip": content[:8] + b"x" + content[9:],
        "int16": content.replace(b'"F32"', b'"I16"'),
        "size": content.replace(b'"F32"', b'"F64"'),
        "cut": content[:-1],
        "other": content.replace(b'"head.bias"', b'"tail.bias"'),
        "wrapped": (length + 7).to_bytes(8, "little") + content[8:].replace(b'"head.bias"', b'"module.head.bias"'),
    }
    assert length and len(set(files.values())) == len(files)
    for name, data in files.items():
        (Path(folder) / name).write_bytes(data)
    (Path(folder) / "link").symlink_to("nowhere")


def layouts(shapes, optimizer, of_parameter, ids, targets, of_gradient=None):
    """{name: (SBP, ranks)} of all tensors. of_parameter, of_gradient: functions of the name of a parameter."""
    layout = {"ids": ids, "targets": targets}
    for name in shapes:
        layout.update({name: of_parameter(name), f"new {name}": of_parameter(name)})
        layout.update({f"{name} {moment}": of_parameter(name) for moment in MOMENTS[optimizer]})
        layout[f"{name} grad"] = (of_gradient or of_parameter)(name)
    return {**layout, "losses": targets}


def tensor_parallel_sbp(name):
    return next((sbp for end, sbp in TENSOR_PARALLEL.items() if name.endswith(end)), "B")


def case_of(layout, shapes, training, parts=0, **facts):
    """The Case of a training whose initial weights OneFlow draws: its values are known when those are.

    training: arguments of `reference_module.trained`; parts: how many parts of the rows have gradients that are added.
    """
    batch, steps = training["batch"], training["steps"]
    sizes = {"ids": (batch, SEQ_LEN), "targets": (batch,), "losses": (steps,), "logits": (batch, NUM_CLASSES)}

    def values_of(arrays):
        drawn = {name: arrays[name] for name in shapes}
        values, added = reference_module.trained(drawn, parts=parts, **training)
        return values, added if parts else {}

    def shape_of(name):
        return shapes.get(name.replace("new ", "").split(" ")[0]) or sizes[name]

    values = {name: unknown(*shape_of(name)) for name in layout}
    return Case(layout, values, values_of=values_of, **facts)


def matmuls_of(batch, hidden_size, x, weights, inner, summed, out, layers=LAYERS):
    """The matmuls of a forward pass: two in each block, one in the head.

    Layouts: of x, of the weights of up, down and head, between up and down, of down's product, of the head's.
    """
    tokens, wide = (batch, SEQ_LEN, hidden_size), (batch, SEQ_LEN, 4 * hidden_size)
    w_up, w_down, w_head = weights
    up = ((*x, tokens), (*w_up, (4 * hidden_size, hidden_size)), (*inner, wide))
    down = ((*inner, wide), (*w_down, (hidden_size, 4 * hidden_size)), (*summed, tokens))
    head = ((*x, (batch, hidden_size)), (*w_head, (NUM_CLASSES, hidden_size)), (*out, (batch, NUM_CLASSES)))
    return [*[up, down] * layers, head]


def elements_of(shapes, *ends):
    """How many elements the parameters have whose names end so."""
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if not ends or name.endswith(ends))


def tensor_parallel_sizes(n):
    mesh = {"data": 2} if n > 2 and n % 2 == 0 else {}
    return {
        "other": {**FEW_STEPS, **mesh},
        "momentum": {**FEW_STEPS, "optimizer": "momentum", **mesh},
        "data": {"data": n, "steps": 2},
    }


@case_of_recipe(
    tensor_parallel_sizes,
    measured_at=MEASURED_MODEL,
    tests=with_traits("tensor"),
    refused={"--data 0": "it must divide the 2 ranks", "--dropout 2": "from 0 to 1"},
    equivalent=REPLACED,
    main=Main(
        refused_expressions=[
            "lay_out(Classifier(), placements('cpu', 2), {**PLAN, 'blocks.*middle': Row})",
            "lay_out(Classifier(), placements('cpu', 2), {'embedding': Row})",
            "lay_out(Classifier(), placements('cpu', 2), {'head': Row, 'hea.': Column})",
            trained("weight_norm", "tensor", "tensor_parallel_module"),
            trained("parameter_whose_data_a_hook_sets", "tensor", "tensor_parallel_module", graph=False),
            *lost_in_a_graph("tensor", "tensor_parallel_module"),
        ],
    ),
)
def tensor_parallel_module(
    n, graph=False, seed=0, steps=20, optimizer="adam", data=1, batch=8, hidden_size=8, matmul_scale=1.0
):
    tensor = n // data
    mesh = np.arange(n).reshape(data, tensor).tolist()
    shapes = reference_module.shapes(hidden_size, LAYERS)
    x, summed, loss = ("S(0), B", mesh), ("S(0), P", mesh), ("P, B", mesh)
    along_data = "P" if graph else "B"  # of gradients
    layout = layouts(
        shapes,
        optimizer,
        of_parameter=lambda name: (f"B, {tensor_parallel_sbp(name)}", mesh),
        of_gradient=lambda name: (f"{along_data}, {tensor_parallel_sbp(name)}", mesh),
        ids=x,
        targets=x,
    )
    weights = [("B, S(0)", mesh), ("B, S(1)", mesh), ("B, B", mesh)]
    pinned, all_reduce = (x, x, "S(0), B"), (summed, x)
    splits = [(("B, B", mesh), (f"B, {sbp}", mesh)) for sbp in ("S(0)", "S(0)") * LAYERS + ("S(1)", "B") * LAYERS]
    split_elements = elements_of(shapes, *TENSOR_PARALLEL)
    per_rank = elements_of(shapes) - split_elements + split_elements / tensor
    return case_of(
        layout,
        shapes,
        dict(optimizer=optimizer, graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        parts=data if graph else 0,
        matmuls=in_steps(graph, steps, matmuls_of(batch, hidden_size, x, weights, ("S(0), S(2)", mesh), summed, x)),
        moves=[
            *[(LOCAL, ("B, B", mesh))] * len(shapes),
            *splits,
            *in_steps(graph, steps, [pinned, all_reduce] * LAYERS),
        ],
        reads=[loss if graph or data > 1 else ("B, B", mesh)] * steps,
        sends=[2 * LAYERS * reduced(tensor, batch / data * SEQ_LEN * hidden_size) + reduced(data, per_rank)] * n,
    )


@case_of_recipe(
    {"other": {**FEW_STEPS, "micro_batches": 3}, "adam": {**FEW_STEPS, "optimizer": "adam"}},
    measured_at=MEASURED_MODEL,
    tests=with_traits("pipeline"),
    equivalent={r"\[0\]\)\] \* n -> \[flow.placement\(args.device, \[0\]\)\]$": "one stage on rank 0, or n there"},
    main=Main(
        prints=[
            "[0] 7 of 15 parameters: embedding.weight to blocks.0.down.bias",
            "[1] 8 of 15 parameters: blocks.1.norm.weight to head.bias",
        ],
        refused_expressions=[
            "train(placements('cpu', 2), batch=7)",
            "(lambda model: assign_stages(model, [model], placements('cpu', 2)))(Classifier())",
            "assign_stages(Classifier(), [Classifier(), Classifier()], placements('cpu', 2))",
            *(
                trained(trait, "pipeline", "pipeline_module")
                for trait in ("tied_on_two_stages", "collections_that_parts_change")
            ),
            *lost_in_a_graph("pipeline", "pipeline_module"),
        ],
    ),
)
def pipeline_module(
    n, graph=False, seed=0, steps=20, optimizer="momentum", micro_batches=2, batch=8, hidden_size=8, matmul_scale=1.0
):
    shapes = reference_module.shapes(hidden_size, LAYERS)
    names = ["embedding", *(f"blocks.{i}" for i in range(LAYERS)), "head"]  # of the parts of the model
    stage_of = {name: k * n // len(names) for k, name in enumerate(names)}
    stages = list(stage_of.values())

    def layout_of(parameter):
        return ("B", [next(stage for name, stage in stage_of.items() if parameter.startswith(f"{name}."))])

    layout = layouts(shapes, optimizer, layout_of, ids=("B", [0]), targets=("B", [n - 1]))
    if graph:
        layout = {name: where for name, where in layout.items() if not name.endswith(" grad")}
    matmuls, rows = [], batch // micro_batches
    for i in range(LAYERS):
        own = layout_of(f"blocks.{i}.")
        matmuls += matmuls_of(rows, hidden_size, own, [own] * 3, own, own, own, layers=1)[:-1]
    own = layout_of("head.")
    matmuls += matmuls_of(rows, hidden_size, own, [own] * 3, own, own, own, layers=0)
    edges = list(zip([0, *stages], stages))  # the stages that the input of each part comes from, and goes to
    moves = [(("B", [before]), ("B", [after])) for before, after in edges]
    if graph:  # set_stage moves it, then the part's own to_global
        moves = [move for old, new in moves for move in ((old, new), (new, new))]
    sends = [0] * n
    for name, (before, after) in zip(names[1:], edges[1:]):
        if before != after:  # activations go forward, gradients of the same size come back
            elements = batch * hidden_size * (1 if name == "head" else SEQ_LEN)
            sends[before] += elements
            sends[after] += elements
    return case_of(
        layout,
        shapes,
        dict(optimizer=optimizer, graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        matmuls=in_steps(graph, steps, matmuls, passes=micro_batches),
        moves=[
            *[(LOCAL, layout_of(name)) for name in shapes],
            *in_steps(graph, steps, moves, passes=micro_batches),
        ],
        reads=[("B", [n - 1])] * steps,
        stages=[(k, [k]) for k in stages],
        sends=sends,
    )


def fully_sharded_sizes(n):
    sizes = {"other": {**FEW_STEPS, "batch": 7, "num_layers": 1}, "momentum": {**FEW_STEPS, "optimizer": "momentum"}}
    sizes["reshard"] = {**FEW_STEPS, **RESHARD}
    return {**sizes, "fewer rows than ranks": {**FEW_STEPS, "hidden_size": 3}} if n > 3 else sizes


@case_of_recipe(
    fully_sharded_sizes,
    measured_at={"batch": 24, "hidden_size": 256},
    tests=with_traits("fully"),
    variants=[RESHARD],
    eager_only="reshard_after_forward",
    main=Main(
        prints=["[0] 643 of 1,277 numbers of the parameters", "[1] 634 of 1,277 numbers of the parameters"],
        other_lines=["--graph --optimizer momentum", "--reshard-after-forward"],
        refused=["--graph --reshard-after-forward"],
        refused_expressions=[
            "train(flow.placement.all('cpu'), graph=True, reshard_after_forward=True)",
            "shard(nn.Embedding(4, 4, max_norm=1.0), flow.placement.all('cpu'))",
            trained("weight_norm", "fully sharded", "fully_sharded_module"),
            *lost_in_a_graph("fully sharded", "fully_sharded_module"),
        ],
    ),
)
def fully_sharded_module(
    n,
    graph=False,
    seed=0,
    steps=20,
    optimizer="adam",
    reshard_after_forward=False,
    batch=8,
    hidden_size=8,
    num_layers=2,
    matmul_scale=1.0,
):
    ranks = list(range(n))
    shapes = reference_module.shapes(hidden_size, num_layers)
    rows, replicated = ("S(0)", ranks), ("B", ranks)
    sharded = {name: rows if shape[0] >= n else replicated for name, shape in shapes.items()}
    in_order = sorted(shapes, key=lambda name: name.startswith("blocks."))  # blocks are made after all else
    layout = layouts(shapes, optimizer, sharded.get, ids=rows, targets=rows)
    matmuls = matmuls_of(batch, hidden_size, rows, [replicated] * 3, rows, rows, rows, num_layers)
    in_forward = [(own, replicated, own[0]) for own in sharded.values()]
    in_backward = in_forward[::-1] if reshard_after_forward else []
    return case_of(
        layout,
        shapes,
        dict(optimizer=optimizer, graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        matmuls=in_steps(graph, steps, matmuls),
        moves=[
            *[move for name in in_order for move in ((LOCAL, replicated), (replicated, sharded[name]))],
            *in_steps(graph, steps, [*in_forward, *in_backward]),
        ],
        reads=[("P", ranks)] * steps,
        sends=[reduced(n, elements_of(shapes)) * (1.5 if reshard_after_forward else 1)] * n,
    )


@case_of_recipe(
    {"other": {"batch": 6, "steps": 2, "seed": 1}},
    tests=["tests/test_your_model.py", "tests/test_rare_failures.py", "-k", "your_model or pytorch_weights"],
    equivalent={
        r"^nn\.Linear\(4 \* hidden_size, hidden_size\) -> type\(": "the block reads its weight, and does not call it",
        r"h\.to_global\(grad_sbp=B\)$": "it is B either way",
        r"\(mesh\.tolist\(\)\)\[(:1|-1:)\]\)$": "the mesh has one row",
        r"-> w\.to_global\(placement=.*mesh\.tolist\(\)\)\)$": "on one rank each SBP is the whole tensor",
    },
    main=Main(
        comparisons=2,
        prints=["[0] saved 15 tensors, 6,412 bytes"],
        other_lines=[f"--graph --weights {PYTORCH}"],
        make_files=damaged,
        refused=[
            f"--weights FOLDER/{what}"
            for what in ("no_file", "short", "zip", "int16", "cut", "size", "other", "wrapped", "link")
        ],
    ),
)
def pytorch_weights(n, graph=False, seed=0, steps=3, batch=8, matmul_scale=1.0):
    ranks, hidden_size = list(range(n)), 8
    shapes = reference_module.shapes(hidden_size, LAYERS)

    def layout_of(parameter):
        return tensor_parallel_sbp(parameter), ranks

    replicated, summed = ("B", ranks), ("P", ranks)
    weights, inner = [("S(0)", ranks), ("S(1)", ranks), replicated], ("S(2)", ranks)
    layout = {**layouts(shapes, "momentum", layout_of, ids=replicated, targets=replicated), "logits": LOCAL}
    matmuls = matmuls_of(batch, hidden_size, replicated, weights, inner, summed, replicated)
    in_training = in_steps(graph, steps, matmuls)
    in_forward = [(replicated, replicated, "B"), (summed, replicated)] * LAYERS
    splits = [(replicated, (sbp, ranks)) for sbp in ("S(0)", "S(0)", "S(1)") * LAYERS]
    return case_of(
        layout,
        shapes,
        dict(optimizer="momentum", graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        matmuls=[*matmuls, *in_training],  # first those of the logits, in eager mode
        lazy=[False] * len(matmuls) + [graph] * len(in_training),
        moves=[*[(LOCAL, replicated)] * len(shapes), *splits, *in_forward, *in_steps(graph, steps, in_forward)],
        reads=[replicated] * (steps + 1),
        numbers=("logits",),
        sends=[2 * LAYERS * reduced(n, batch * SEQ_LEN * hidden_size)] * n,
    )
