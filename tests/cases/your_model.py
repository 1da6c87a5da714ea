"""The chapter on your own model: a module that is not edited, under each strategy."""

from pathlib import Path

import numpy as np

from oneflow_cookbook.start.recipe import ROOT
from tests.cases import reference_module
from tests.cases.layouts import LOCAL
from tests.cases.recipe_case import Case, Main, case_of_recipe, reduced, shares
from tests.cases.reference import unknown
from tests.cases.reference_module import NUM_CLASSES, SEQ_LEN

MEASURED_MODEL = {"batch": 384, "hidden_size": 96}  # whole models compute much more for what they send
REPLACED = {  # mutations without effect
    r"^nn\.Linear\([\w *]+, [\w *]*hidden_size\) -> type\(": "the layout replaces the layer's class and its forward",
}
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buf",)}
TENSOR_PARALLEL = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}  # the other parameters are B
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


def tensor_parallel_sbp(name):
    return next((sbp for end, sbp in TENSOR_PARALLEL.items() if name.endswith(end)), "B")


def case_of(shapes, training, layout, parts=0, **facts):
    """The Case of a training whose initial weights OneFlow draws: its values are known when those are.

    training: arguments of `reference_module.trained`; layout: of each parameter, too; parts: how many parts of the rows
    have gradients that are added.
    """
    batch = training["batch"]
    sizes = {"ids": (batch, SEQ_LEN), "targets": (batch,), "losses": (training["steps"],)}
    if "logits" in layout:
        sizes["logits"] = (batch, NUM_CLASSES)
    for name, shape in shapes.items():
        further = (f"{name} {kind}" for kind in (*MOMENTS[training["optimizer"]], "grad"))
        sizes.update(dict.fromkeys((name, f"new {name}", *further), shape))

    def values_of(arrays):
        drawn = {name: arrays[name] for name in shapes}
        values, added = reference_module.trained(drawn, parts=parts, **training)
        return values, added if parts else {}

    values = {name: unknown(*shape) for name, shape in sizes.items()}
    return Case(values, layout=layout, values_of=values_of, **facts)


def work_of(rows, hidden_size, columns=None, layers=LAYERS):
    """What a rank computes with its rows: in each block two matmuls, of these columns of up, and the head."""
    columns = 4 * hidden_size if columns is None else columns
    return rows * (layers * 4 * SEQ_LEN * hidden_size * columns + 2 * hidden_size * NUM_CLASSES)


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
        alone={"data": [1]},
        refused_expressions=[
            "lay_out(Classifier(), placements('cpu', 2), {**PLAN, 'blocks.*middle': Row})",
            "lay_out(Classifier(), placements('cpu', 2), {'embedding': Row})",
            "lay_out(Classifier(), placements('cpu', 2), {'head': Row, 'hea.': Column})",
            trained("weight_norm", "tensor", "tensor_parallel_module"),
            trained("parameter_whose_data_a_hook_sets", "tensor", "tensor_parallel_module", graph=False),
        ],
    ),
)
def tensor_parallel_module(
    n, graph=False, seed=0, steps=20, optimizer="adam", data=1, batch=8, hidden_size=8, matmul_scale=1.0
):
    tensor = n // data
    mesh = np.arange(n).reshape(data, tensor).tolist()
    shapes = reference_module.shapes(hidden_size, LAYERS)
    split_elements = elements_of(shapes, *TENSOR_PARALLEL)
    per_rank = elements_of(shapes) - split_elements + split_elements / tensor
    return case_of(
        shapes,
        dict(optimizer=optimizer, graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        {"targets": "S(0), B", **{name: f"B, {tensor_parallel_sbp(name)}" for name in shapes}},
        ranks=mesh,
        parts=data if graph else 0,
        work=[
            work_of(rows, hidden_size, columns)
            for rows in shares(data, batch)
            for columns in shares(tensor, 4 * hidden_size)
        ],
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

    layout = {"ids": ("B", [0]), "targets": ("B", [n - 1])}
    for name, stage in stage_of.items():
        layout.update({parameter: ("B", [stage]) for parameter in shapes if parameter.startswith(f"{name}.")})
    work = [0] * n
    for name in names[1:]:
        block, head = work_of(batch, hidden_size, layers=1), work_of(batch, hidden_size, layers=0)
        work[stage_of[name]] += head if name == "head" else block - head
    edges = list(zip([0, *stages], stages))  # the stages that the input of each part comes from, and goes to
    sends = [0] * n
    for name, (before, after) in zip(names[1:], edges[1:]):
        if before != after:  # activations go forward, gradients of the same size come back
            elements = batch * hidden_size * (1 if name == "head" else SEQ_LEN)
            sends[before] += elements
            sends[after] += elements
    return case_of(
        shapes,
        dict(optimizer=optimizer, graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        layout,
        work=work,
        micro_batches=micro_batches,
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
    shapes = reference_module.shapes(hidden_size, num_layers)
    layout = {"targets": "S(0)"}
    for name, shape in shapes.items():  # a gradient that is not split is summed in the graph, as others are
        layout.update(dict.fromkeys((name, f"{name} grad"), "S(0)" if shape[0] >= n else "B"))
    return case_of(
        shapes,
        dict(optimizer=optimizer, graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        layout,
        work=[work_of(own, hidden_size, layers=num_layers) for own in shares(n, batch)],
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
    hidden_size = 8
    shapes = reference_module.shapes(hidden_size, LAYERS)
    return case_of(
        shapes,
        dict(optimizer="momentum", graph=graph, seed=seed, steps=steps, batch=batch, matmul_scale=matmul_scale),
        {"ids": "B", "targets": "B", "logits": LOCAL, **{name: tensor_parallel_sbp(name) for name in shapes}},
        work=[work_of(batch, hidden_size, columns) for columns in shares(n, 4 * hidden_size)],
        passes=1 + (1 if graph else steps),  # first that of the logits, in eager mode
        sends=[2 * LAYERS * reduced(n, batch * SEQ_LEN * hidden_size)] * n,
    )
