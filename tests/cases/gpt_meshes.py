"""The case of recipes/transformer/gpt.py: what is asserted of a run on any mesh, and the runs of docs/gpt.md."""

import dataclasses
import math
from functools import lru_cache

import numpy as np

from oneflow_cookbook.measure.sent import between_ranks
from oneflow_cookbook.plan import formulas as plan
from oneflow_cookbook.plan.model import Model
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT, reference_gpt
from tests.cases.ladder import Checks, check_operations, check_tensors, shard_of
from tests.cases.layouts import LOCAL
from tests.cases.recipe_case import PROOFS, Case, Main, Proof
from tests.cases.reference import Value

TRAINED = f"{ROOT / 'tests' / 'on_rank_gpt.py'}:trained"
FOUND = ROOT / "docs" / "gpt.json"  # the figures of the runs of `./launch.sh meshes`
MESHES = [
    (data, tensor, pipeline)
    for data in (1, 2, 4)
    for tensor in (1, 2, 4)
    for pipeline in (1, 2, 4)
    if data * tensor * pipeline <= 4
]
# large enough for the formulas of bytes
SIZES = {"batch_size": 16, "seq_len": 32, "num_layers": 4, "hidden_size": 128, "num_heads": 4}
LAYOUTS = {  # options and steps, by their names in docs/gpt.md
    "plain": {"steps": 50, "sums": 40},
    "sequence parallel": {"steps": 4, "sequence_parallel": True},
    "sharded weights": {"steps": 4, "shard_weights": True},
}
ROWS = [  # of the page's table: each layout on the meshes where it differs from the plain one
    (mesh, layout)
    for mesh in MESHES
    for layout in LAYOUTS
    if layout == "plain" or mesh[1 if layout == "sequence parallel" else 0] > 1
]
SMALL = {"batch_size": 8, "seq_len": 8, "num_layers": 2, "hidden_size": 16, "num_heads": 4}
RUNS = [  # data, tensor, pipeline, and what else; the last one takes long
    ((2, 1, 1), {"shard_weights": True, "micro_batches": 2, "clip_grad": 0.5}),
    ((1, 2, 1), {"graph": True, "sequence_parallel": True, "micro_batches": 2, "recompute": "full"}),
    ((1, 1, 3), {"graph": True, "micro_batches": 4, "num_layers": 4}),  # stages of 2, 1 and 1 layers
]
EXPERT_RUNS = [  # the same with experts, of which some drop tokens; only the first one is in the default suite
    ((2, 1, 1), {"experts": 4}),
    ((2, 1, 1), {"experts": 4, "graph": True, "micro_batches": 2}),
    ((2, 2, 1), {"experts": 4, "graph": True, "micro_batches": 2}),
    ((1, 2, 1), {"experts": 3, "sequence_parallel": True}),
    ((2, 2, 1), {"experts": 4, "clip_grad": 0.5}),
    ((2, 1, 2), {"experts": 4, "graph": True}),
]
CONTEXT_RUNS = [  # the same with the sequence split along data; only the first one is in the default suite
    (mesh, {"context_parallel": True, **more})
    for mesh, more in [
        ((2, 1, 1), {}),
        ((2, 1, 1), {"graph": True, "micro_batches": 2, "recompute": "full"}),
        ((2, 2, 1), {}),
        ((2, 2, 1), {"graph": True, "sequence_parallel": True, "shard_weights": True, "micro_batches": 2}),
        ((2, 2, 1), {"sequence_parallel": True, "shard_weights": True, "micro_batches": 2, "clip_grad": 0.5}),
        ((2, 1, 2), {}),
        ((2, 1, 2), {"graph": True, "micro_batches": 2}),
        ((4, 1, 1), {"graph": True}),
    ]
]
SMALL_ARGUMENTS = ["--batch-size", "8", "--hidden-size", "16", "--num-heads", "2", "--num-layers", "2"]
SIZES_TO_REFUSE = ("num-layers", "hidden-size", "num-heads", "seq-len", "batch-size")
PROOFS["gpt"] = Proof(
    refused={
        **{f"--{option} 0": "1 or more" for option in ("tensor", "pipeline", "save-every", *SIZES_TO_REFUSE)},
        **{"--micro-batches -1": "1 or more", "--keep -1": "0 or more"},
    },
    tests=[
        *("tests/test_gpt.py", "tests/slow/test_gpt_page.py", "tests/slow/test_choices.py"),
        *("tests/test_checkpoints.py", "tests/test_recipe_files.py"),
        *("-k", "gpt and not of_the_page and not with_all and not trains_as and not learns"),
    ],
    equivalent={
        r"state\[.step.\].*: B -> S\(0\)$": "on one rank any SBP holds the number",
        r"^flow\.placement\(\"cpu\", \[0\]\) -> ": "a graph puts the number of its steps where it needs it",
        r"^flow\.tensor\(ids.*\[::-1\]\.copy\(\)": "the loss is the mean of the rows, in any order",
    },
    main=Main(
        arguments=[*SMALL_ARGUMENTS, "--steps", "3", "--check"],
        prints={
            False: [
                "[0] step 3  loss 2.618  1659 tokens/s",
                "[0] 6,576 of 6,576 weights",
                "[0] 93+94==== 08+98==== 23+98==== 59+06==== 23+43==== 82+25==== 55+06==== 64+51====",
                "[0] 0 of 8 sums that it was not trained on are right",
                "[0] the losses of steps 1 to 3 are those of a single rank",
                "[1] 6,576 of 6,576 weights",
            ],
            True: [
                "[0] step 3  loss 2.618  176 tokens/s",
                "[0] 6,576 of 6,576 weights",
                "[0] 93+94==== 08+98==== 23+98==== 59+06==== 23+43==== 82+25==== 55+06==== 64+51====",
                "[0] 0 of 8 sums that it was not trained on are right",
                "[0] the losses of steps 1 to 3 are those of a single rank",
                "[1] 6,576 of 6,576 weights",
            ],
        },
        alone={
            **dict(data=[0], tensor=[1], pipeline=[1]),
            "checkpoint_dir": [None],
            "save_every": [100],
            "keep": [0],
            "steps": [3],
        },
        other_lines=[
            "--tensor 2 --sequence-parallel --hidden-size 18 --num-heads 6 --seq-len 10 --batch-size 6 --clip-grad 0.5",
            "--graph --data 1 --pipeline 2 --num-layers 4 --micro-batches 2 --recompute full",
            "--shard-weights --experts 2 --steps 4 --checkpoint-dir FOLDER --save-every 7 --keep 2",
            "--context-parallel",
        ],
        elsewhere=("check",),
        defaults={"steps": (400, 3)},
        refused=[
            "--checkpoint-dir=",
            *("--pipeline 2 --num-layers 1", "--seq-len 7", "--batch-size 7", "--data 3", "--recompute full"),
            *("--experts 1", "--experts 2 --context-parallel"),
            # each size by its axis of the mesh, 2 x 1 or 1 x 2
            *("--tensor 2 --num-heads 1", "--tensor 2 --sequence-parallel --seq-len 31", "--experts 3"),
            *("--context-parallel --seq-len 31", "--shard-weights --num-heads 3 --hidden-size 9"),
        ],
        refused_expressions=["placements('cpu', 2, data=1)"],
        refused_elsewhere=("raise CheckpointError(", "# on all ranks"),
    ),
)
known = lru_cache(maxsize=None)(reference_gpt.trained)

KINDS = {"tokens": "vocabulary", "qkv": "column", "project": "row", "up": "column", "down": "row"}
SBPS = {"vocabulary": "B, S(0)", "column": "B, S(1)", "row": "B, S(0)", "replicated": "B, B"}
SHARDED = {**SBPS, "vocabulary": "S(1), S(0)", "column": "S(0), S(1)", "row": "S(1), S(0)"}
EXPERT_SBPS = {"up": "S(0), S(2)", "down": "S(0), S(1)"}
LOGITS = "S(0), S(1)"  # in the loss, (token, vocabulary)


def activations(options):
    """The SBP of each kind of activation: along data the batch is split, in context parallel the sequence."""
    split = "S(0)" if options["context_parallel"] else "S(1)"
    by_head = "S(2), S(1)" if options["context_parallel"] else "S(0), S(1)"  # (batch, heads, seq_len, head_size)
    return {
        "residual": f"{split}, S(0)" if options["sequence_parallel"] else f"{split}, B",
        "whole": f"{split}, B",
        "parts": f"{split}, P",
        "by column": f"{split}, S(2)",
        "by head": by_head,
        "key": "B, S(1)" if options["context_parallel"] else by_head,
    }


def mesh_of(mesh):
    """The arguments of `placements` for (data, tensor, pipeline)."""
    return dict(zip(("data", "tensor", "pipeline"), mesh))


def stages_of(mesh):
    """The ranks of each stage, as a mesh of data x tensor."""
    data, tensor, pipeline = mesh
    return np.arange(data * tensor * pipeline).reshape(pipeline, data, tensor).tolist()


def prove(pool, path, mesh, num_layers=SMALL["num_layers"], **more):
    """Train the recipe, or a changed copy, for two small steps on a mesh, and check it."""
    prove_run(pool, path, mesh, {"steps": 2, "sums": 9, **more}, {**SMALL, "num_layers": num_layers})


def prove_run(pool, path, mesh, options, sizes, *what):
    """Train on a mesh and check it; returns what each rank recorded, and the values of numpy."""
    seen = pool.call(TRAINED, path=str(path), **mesh_of(mesh), **options, **sizes)
    exact = known(
        **{name: options[name] for name in ("steps", "sums", "clip_grad", "experts") if name in options}, **sizes
    )
    check(seen, exact, mesh, options, sizes, *what)
    return seen, exact


def row_run(pool, mesh, layout, graph, **shorter):
    """Train a row of the page on a pool and check it; returns its figures. shorter: other steps and sums."""
    options = {**LAYOUTS[layout], **shorter, "graph": graph}
    seen, exact = prove_run(pool, path_of("gpt"), mesh, options, SIZES, mesh, layout)
    return {"mesh": mesh, "layout": layout, "graph": graph, **facts(seen, exact, mesh)}


def by_row(figures):
    """{(mesh, layout): [figures of eager mode, of a graph]}."""
    rows = {}
    for run in figures["runs"]:
        rows.setdefault((tuple(run["mesh"]), run["layout"]), []).append(run)
    return rows


def facts(seen, exact, mesh):
    """The figures of a run: its errors, the bytes along each axis in a step, what the fullest rank keeps."""
    first = seen[0]
    gradients = []
    for name, gradient in exact["first"].items():
        actual = first["tensors"][f"{name} exp_avg in step 1"]["value"] / 0.1
        gradients.append(np.abs(actual - gradient.exact).max() / np.abs(gradient.exact).max())
    sent = dict.fromkeys((*plan.AXES, "others"), 0)
    for ranks, count in sent_in_a_step(seen).items():
        sent[axis_of(mesh, *ranks)] += count
    fullest = max((result["state_bytes"] for result in seen), key=lambda state: sum(state.values()))
    off = first["arrays"]["losses"].astype(np.float64) - exact["losses"]
    sent = {axis: round(count) for axis, count in sent.items()}
    return {"loss_errors": off.tolist(), "gradient_error": max(gradients), "sent": sent, "held": fullest}


def sent_in_a_step(seen):
    """The bytes between two ranks, by (from, to)."""
    before, after = ([result["sent"][step] for result in seen] for step in sorted(seen[0]["sent"]))
    return between_ranks(before, after)


def axis_of(mesh, *ranks):
    """The axis along which two ranks differ: "pipeline" between stages, "others" along data and tensor at once."""
    data, tensor, pipeline = mesh
    here, there = (np.unravel_index(rank, (pipeline, data, tensor)) for rank in ranks)
    if here[0] != there[0]:
        return "pipeline"
    axes = [axis for axis, i, j in zip(("data", "tensor"), here[1:], there[1:]) if i != j]
    return axes[0] if len(axes) == 1 else "others"


MODEL = Model(
    vocab_size=reference_gpt.vocab_size_of(SIZES["num_heads"]),
    **{name: size for name, size in SIZES.items() if name != "batch_size"},
)


def formulas(mesh, layout, num_layers=MODEL.num_layers):
    """(bytes by axis, bytes that the fullest rank keeps) of a row, by the formulas of `plan`."""
    model = dataclasses.replace(MODEL, num_layers=num_layers)
    options = [name for name in LAYOUTS[layout] if name not in ("steps", "sums")]
    data, tensor, pipeline = mesh
    sharded_by = data if "shard_weights" in options else 1
    held = max(plan.elements_on_a_rank(stage, tensor, sharded_by) for stage in plan.stages(model, pipeline))
    return plan.moved(model, mesh, SIZES["batch_size"], options), sum(plan.PRECISIONS["fp32"][:3]) * held


def context_formulas(mesh, num_layers):
    """{axis: bytes that all ranks send along it in a step} in context parallel, for one stage.

    A layer adds an all-gather of its keys and of its values, and a reduce-scatter of each gradient, along data: of K
    bytes they send (n-1) K, and each rank along tensor has its own.
    """
    plain = formulas(mesh, "plain", num_layers)[0]
    activation = 4 * SIZES["batch_size"] * SIZES["seq_len"] * SIZES["hidden_size"]
    return {**plain, "data": plain["data"] + num_layers * 4 * (mesh[0] - 1) * activation}


def expert_formulas(mesh, num_layers, experts):
    """{axis: bytes that all ranks send along it in a step}, with experts in place of the MLPs; for one stage.

    Along data the MLPs' gradients are replaced by the router's, and by 4 all-to-alls of the slots in each layer: of K
    bytes they send (n-1)/n K, and each rank along tensor takes part in its own. Along tensor each layer also has an
    all-reduce of the gradients of the gates.
    """
    data, tensor, _ = mesh
    hidden, tokens = SIZES["hidden_size"], SIZES["batch_size"] * SIZES["seq_len"]
    slots = SIZES["batch_size"] * experts * math.ceil(1.25 * 2 * SIZES["seq_len"] / experts)
    plain = formulas(mesh, "plain", num_layers)[0]
    gradients = 2 * (data - 1) * 4 * num_layers * (tensor * hidden * experts - 8 * hidden**2)
    all_to_alls = 4 * num_layers * tensor * (data - 1) / data * 4 * slots * hidden
    gates = 2 * (tensor - 1) * num_layers * 4 * tokens * experts
    return {"data": plain["data"] + gradients + all_to_alls, "tensor": plain["tensor"] + gates, "pipeline": 0}


def layout_of(name, mesh, num_layers, shard_weights):
    """(SBP, ranks) of a weight: that of its kind, on its stage."""
    stages = stages_of(mesh)
    part, *number, weight = name.split(".")
    stage = {"embedding": 0, "head": -1}.get(part, number and int(number[0]) * len(stages) // num_layers)
    if "experts" in number and weight != "router":
        return EXPERT_SBPS[weight], stages[stage]
    return (SHARDED if shard_weights else SBPS)[KINDS.get(weight, "replicated")], stages[stage]


def check(seen, exact, mesh, options, sizes, *what):
    """Check a run on the ladder, its answers, and the SBP of the logits in the loss: any gives the right values."""
    case = case_of(mesh, exact, sizes, options)
    check_tensors(case, seen)
    check_operations(case, options.get("graph", False), [with_plain_sbps(result, mesh) for result in seen])
    for rank, result in enumerate(seen):
        Checks.equal(result["lines"], exact["lines"].tolist(), *what, "rank", rank, "answers")
        logits = {plain(sbp, mesh) for (sbp,) in result["logits"]}
        Checks.equal(logits, {plain(LOGITS, mesh)}, *what, "rank", rank, "SBP of the logits in the loss")


def plain(sbp, mesh):
    """An SBP with B along an axis of one rank: there OneFlow may call a split B, or a B split."""
    return ", ".join("B" if n == 1 else axis_sbp for axis_sbp, n in zip(sbp.split(", "), mesh))


def with_plain_sbps(result, mesh):
    """What a rank recorded, with plain SBPs."""
    matmuls = [plain_layouts(operands, mesh) for operands in result["matmuls"]]
    moves = [plain_layouts(move, mesh) for move in result["moves"]]
    return {**result, "matmuls": matmuls, "moves": moves, "reads": plain_layouts(result["reads"], mesh)}


def plain_layouts(layouts, mesh):
    """(SBP, ranks, ...) of each, or its SBP alone, with a plain SBP."""
    return [
        plain(layout, mesh) if isinstance(layout, str) else (plain(layout[0], mesh), *layout[1:]) for layout in layouts
    ]


def case_of(mesh, exact, sizes, options):
    """The Case of a run: its weights before and after, the first gradients, the losses, and all that it does."""
    switches = ("graph", "context_parallel", "sequence_parallel", "shard_weights")
    options = {**dict.fromkeys(switches, False), "micro_batches": 1, "experts": 0, **options}
    graph, steps, num_layers = options["graph"], options["steps"], sizes["num_layers"]
    weights = {name: layout_of(name, mesh, num_layers, options["shard_weights"]) for name in exact["initial"]}
    values, layout = {}, {}
    for name, where in weights.items():
        new, moment = Value(exact["new"][name].exact), Value(0.1 * exact["first"][name].exact)  # of AdamW
        new.bound = 2e-3 * steps  # AdamW normalizes tiny gradients, so rounding can shift a weight by lr
        moment.bound = gradient_bound(name, moment.exact, sizes["num_heads"])
        tensors = {name: exact["initial"][name], f"new {name}": new, f"{name} exp_avg in step 1": moment}
        values.update(tensors)
        layout.update(dict.fromkeys(tensors, where))
    losses = Value(exact["losses"])
    losses.bound = 1e-4
    clipping = clip_moves(weights.values()) if options.get("clip_grad") and not graph else []
    forward = forward_moves(mesh, num_layers, options)
    moves = [*forward, *clipping * steps] if graph else [*forward * options["micro_batches"], *clipping] * steps
    return Case(
        {**values, "losses": losses},
        work_of(mesh, sizes, options),
        {**layout, "losses": LOCAL},
        passes=1 / options["micro_batches"] if graph else steps,
        moves=[plain_layouts(move, mesh) for move in moves],
        stages=graph_stages(mesh, num_layers),
        recomputed=recomputed(num_layers, options),
        claims=lambda ranks: mean_differences(ranks, values, layout, steps),
    )


def mean_differences(ranks, values, layout, steps):
    """The claims that on average each rank's shard and value of each new weight are right."""
    claims = {}
    for rank, tensors in enumerate(ranks):
        for name in (name for name in values if name.startswith("new ")):
            value, actual = values[name], tensors[name]
            shard = shard_of(value, *layout[name], rank, None)
            off = np.abs(actual["value"] - value.exact).mean()
            if shard is not None:
                off = max(off, np.abs(actual["shard"] - shard.exact).mean())
            claims[f"rank {rank}: {name} is off by {off} on the average"] = off <= 1e-7 * steps
    return claims


def gradient_bound(name, exact, num_heads):
    """4e-6 of the largest number; at most 1e-6 was seen. Queries, keys and values have gradients of different sizes."""
    if not name.endswith("qkv"):
        return 4e-6 * np.abs(exact).max()
    parts = np.split(exact.reshape(len(exact), num_heads, -1), 3, axis=-1)
    bounds = [np.full(part.shape, 4e-6 * np.abs(part).max()) for part in parts]
    return np.concatenate(bounds, -1).reshape(exact.shape)


def stage_of_each(mesh, num_layers):
    """The number of the stage of the embedding, of each block and of the head."""
    pipeline = mesh[2]
    return [0, *(i * pipeline // num_layers for i in range(num_layers)), pipeline - 1]


RECOMPUTED = {  # type of op -> how many of them `--recompute full` computes again in each block
    **dict.fromkeys(("relu", "square", "softmax", "constant", "triu", "broadcast_add"), 1),
    **dict.fromkeys(("batch_matmul", "l2_normalize", "broadcast_mul", "add_n", "reshape"), 2),
    **dict.fromkeys(("narrow", "scalar_mul"), 3),
    **{"broadcast_matmul": 4, "transpose": 4, "identity": 6},
}


def recomputed(num_layers, options):
    """The ops that are computed again; sequence parallelism and sharded weights add casts between SBPs.

    In context parallel OneFlow drops the casts of keys and values, and gathers them between the ops around.
    """
    if options.get("recompute") != "full":
        return {}
    casts = 2 * options["sequence_parallel"] + 4 * options["shard_weights"]
    per_block = {**RECOMPUTED, **({"hierarchical_parallel_cast": casts} if casts else {})}
    return {kind: num_layers * count for kind, count in per_block.items()}


def graph_stages(mesh, num_layers):
    return [(stage, stages_of(mesh)[stage]) for stage in stage_of_each(mesh, num_layers)]


def work_of(mesh, sizes, options):
    """The floating-point operations of each rank in a forward pass over the whole batch."""
    length, hidden, heads = sizes["seq_len"], sizes["hidden_size"], sizes["num_heads"]
    data, tensor, pipeline = mesh
    tokens = sizes["batch_size"] * length / data  # of a rank, along data; the sequence or the batch is split
    attention = 2 * tokens * (4 * hidden**2 + 2 * length * hidden) / tensor
    mlp = 2 * tokens * 8 * hidden**2 / tensor
    if options["experts"]:
        experts = options["experts"]
        slots = experts * math.ceil(1.25 * 2 * length / experts)  # of a sequence
        of_router = tensor if options["sequence_parallel"] else 1  # how many ranks share the residual's tokens
        mlp = 2 * tokens * hidden * (experts / of_router + 2 * slots)  # router, into slots and out of them
        mlp += 2 * tokens / length * slots * 8 * hidden**2 / tensor
    stages = stage_of_each(mesh, sizes["num_layers"])[1:-1]
    head = 2 * tokens * hidden * reference_gpt.vocab_size_of(heads) / tensor
    of_stage = [
        stages.count(stage) * (attention + mlp) + (head if stage == pipeline - 1 else 0) for stage in range(pipeline)
    ]
    return [work for work in of_stage for _ in range(data * tensor)]


def clip_moves(weights):
    """How OneFlow clips gradients of these layouts in eager mode: norms go to the first stage, a scale goes back."""
    first = next(iter(weights))[1]
    norms = [[((sbp, ranks), ("B, B", ranks)), (("B, B", ranks), ("B, B", first))] for sbp, ranks in weights]
    return [move for pair in norms for move in pair] + [(("B, B", first), ("B, B", ranks)) for _, ranks in weights]


def forward_moves(mesh, num_layers, options):
    """(SBP, ranks) before and after each to_global of a forward pass, and the SBP of its gradient, in order.

    In a graph set_stage moves what comes into each part to its ranks first.
    """
    sbps, table = activations(options), SBPS["vocabulary"]
    whole, parts, residual = sbps["whole"], sbps["parts"], sbps["residual"]
    stages, moves, graph = stages_of(mesh), [], options["graph"]

    def move(old, new, ranks, *gradient):
        moves.append(((old, ranks), (new, ranks), *gradient))

    def move_in(sbp, before, here):
        if graph:
            moves.append(((sbp, before), (sbp, here)))
            before = here
        moves.append(((sbp, before), (sbp, here)))

    def weight(kind, ranks):
        if options["shard_weights"]:
            move(SHARDED[kind], SBPS[kind], ranks, SHARDED[kind])

    here, ids = stages[0], "S(1), B" if options["context_parallel"] else "S(0), B"
    if graph:
        move(ids, ids, here)
    weight("vocabulary", here)
    move(parts, residual, here, whole)
    for stage in stage_of_each(mesh, num_layers)[1:-1]:
        before, here = here, stages[stage]
        move_in(residual, before, here)
        for part in ("attention", "experts" if options["experts"] else "mlp"):
            move(residual, whole, here, residual)
            if part == "experts":
                move(residual, whole, here, residual)  # the probabilities of the router
                move("S(0), B", "S(1), B", here, "S(0), P")
                move("S(1), P", "S(0), P", here, "S(1), B")
            else:
                weight("column", here)
                if part == "attention" and options["context_parallel"]:
                    for _ in ("key", "value"):
                        move(sbps["by column"], "B, S(2)", here, sbps["by column"])
                    move("B, B", "S(0), B", here)  # the mask
                weight("row", here)
            move(parts, residual, here, whole)
    if graph:
        moves.append(((residual, here), (residual, stages[-1])))
    move_in(table, stages[0], stages[-1])
    move(residual, whole, stages[-1], residual)
    for stage in stage_of_each(mesh, num_layers)[1:-1] if options["experts"] else ():
        balance_loss = "P, P" if options["sequence_parallel"] else "P, B"
        moves.append(((balance_loss, stages[stage]), (balance_loss, stages[-1])))
    return moves
