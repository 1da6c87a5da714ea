"""The case of recipes/training/training_run.py: what is asserted of a run on any mesh, in either mode."""

from functools import lru_cache

import numpy as np

from tests.cases import ROOT, reference_run
from tests.cases.ladder import check_operations, check_tensors
from tests.cases.layouts import LOCAL
from tests.cases.recipe_case import PROOFS, Case, Main, Proof
from tests.cases.reference import Value
from tests.cases.reference_run import SMALL

TRAINED = f"{ROOT / 'tests' / 'on_rank_run.py'}:trained"
RUNS = [  # number of ranks, ranks along tensor, graph, and what else differs from SMALL; the first two are quick
    (2, 1, False, {"micro_batches": 3}),
    (2, 2, True, {"micro_batches": 2, "num_layers": 2}),
    (1, 1, False, {"micro_batches": 1}),
    (3, 1, True, {"micro_batches": 2}),
    (4, 2, False, {"micro_batches": 2}),
    (4, 2, True, {"micro_batches": 3, "clip_grad": 100.0}),  # of gradients that are shorter than that
]
STEPS = 6  # into the third epoch, and beyond the last step of the schedule
known = lru_cache(maxsize=None)(reference_run.trained)


PROOFS["training_run"] = Proof(
    refused={
        **{f"--{option} 0": "1 or more" for option in ("tensor", "micro-batches", "steps", "save-every")},
        "--keep -1": "0 or more",
    },
    tests=["tests/test_training_run.py", "tests/test_checkpoints.py", "tests/test_recipe_files.py"],
    equivalent={
        r"grad_sbp=BATCH\) -> x.to_global\(grad_sbp=BATCH\)$": "what a norm returns is in BATCH already",
        r"padded\[:, i\]\[::-1\]": "a rank's rows in another order add up to the same",
        r"^optimizer\.zero_grad\(set_to_none=True\) -> pass$": "the next step replaces the gradients",
    },
    main=Main(
        comparisons=4,
        prints=[
            "[0] valid tokens in this rank's rows of the micro-batches of step 1: 36 43",
            "[0] step 4  loss 3.3440  held-out 3.2195",
            "[0] step 8  loss 3.0441  held-out 2.9440",
            "[0] stopped after step 4 and resumed, it has the same losses, bit by bit",
            "[1] valid tokens in this rank's rows of the micro-batches of step 1: 55 44",
        ],
        further={2: {"steps": 4}},  # the job that is stopped
        alone={"micro_batches": [1], "steps": [3], "tensor": [1]},
        other_lines=["--graph --tensor 2 --micro-batches 4 --steps 6 --save-every 3 --keep 2"],
        elsewhere=("checkpoint_dir",),
        refused=["--tensor 3", "--micro-batches 5", "--checkpoint-dir="],
        refused_expressions=[
            "Config(batch_size=6, micro_batches=2).check(placements('cpu', 2))",
            "Config(num_heads=3).check(placements('cpu', 2, 2))",
            "Config(train_samples=20).check(placements('cpu', 2))",
            "Config(test_samples=0).check(placements('cpu', 2))",
            "Config(decay_steps=4).check(placements('cpu', 2))",
        ],
        refused_elsewhere=(
            *("raise CheckpointError(", "# on all ranks"),  # tests/test_checkpoints.py
            *("has no gradient", "nothing was updated", "vocab_size is"),
        ),
    ),
)

KINDS = {"qkv": "B, S(1)", "up": "B, S(1)", "project": "B, S(0)", "down": "B, S(0)"}
BATCH, HEADS, COLUMNS, PARTS = "S(0), B", "S(0), S(1)", "S(0), S(2)", "S(0), P"  # of activations


def mesh_of(n, tensor):
    return np.arange(n).reshape(-1, tensor).tolist()


def prove(pool, path, tensor, graph, steps=STEPS, **more):
    """Train the recipe, or a changed copy, and check it; returns what each rank recorded."""
    arguments = {**SMALL, "graph": graph, "steps": steps, **more}
    seen = pool.call(TRAINED, path=str(path), tensor=tensor, **arguments)
    case = case_of(mesh_of(pool.world_size, tensor), graph, steps, more)
    check_tensors(case, seen)
    check_operations(case, graph, seen)
    return seen


def case_of(mesh, graph, steps, more):
    """The Case of a run: weights before and after, Adam's first moment, both curves, and all that it does."""
    sizes = {**SMALL, **more}
    exact = known(steps, **{name: size for name, size in more.items() if name != "micro_batches"})
    values, layout = {}, {}
    for name in sorted(exact["initial"], key=place_in_model):
        new, moment = exact["new"][name], exact["moments"][f"{name} exp_avg"]
        new.bound = 1e-5  # at most 2.5e-6 was seen, where Adam normalizes a tiny gradient
        moment.bound = moment_bound(name, moment.exact, sizes["num_heads"])
        tensors = {name: exact["initial"][name], f"new {name}": new, f"{name} exp_avg": moment}
        values.update(tensors)
        layout.update(dict.fromkeys(tensors, (KINDS.get(name.split(".")[-1], "B, B"), mesh)))
    for name in ("losses", "held_out"):
        values[name], layout[name] = Value(exact[name]), LOCAL
        values[name].bound = 5e-6
    passes = [sizes["micro_batches"], -(-sizes["test_samples"] // rows_of(sizes))]  # in a step, in an evaluation
    evaluations = steps // sizes["eval_every"]
    return Case(
        values,
        work_of(mesh, sizes),
        layout,
        passes=1 + (evaluations > 0) if graph else steps * passes[0] + evaluations * passes[1],
        moves=layouts_of_parameters(exact["initial"], mesh)
        + operations(graph, steps, sizes, passes, forward_moves(mesh, sizes), loading(mesh), reducing(layout, mesh)),
    )


def moment_bound(name, exact, num_heads):
    """At most 2e-6 of the largest number was seen, of norms 8e-6. Queries, keys and values have different sizes."""
    if not name.endswith("qkv"):
        return (5e-6 if exact.ndim > 1 else 4e-5) * np.abs(exact).max()
    parts = exact.reshape(len(exact), num_heads, 3, -1)
    return np.broadcast_to(5e-6 * np.abs(parts).max((0, 1, 3), keepdims=True), parts.shape).reshape(exact.shape)


def place_in_model(name):
    """Where `parameters()` has it: a module's own parameters come before those of its parts."""
    part, *rest = name.split(".")
    if part == "blocks":
        return (1, int(rest[0]), len(rest))
    return (2,) if rest else (0,)


def rows_of(sizes):
    return sizes["batch_size"] // sizes["micro_batches"]


def operations(graph, steps, sizes, passes, forward, before, after, after_evaluation=()):
    """What happens in all steps and evaluations: `before` for each micro-batch, its `forward`, and `after` the step.

    A graph is built once. An evaluation loads each of its batches right before it.
    """
    found, (micro_batches, test_batches), built = [], passes, set()
    for step in range(1, steps + 1):
        found += before * micro_batches
        found += [] if graph and "training" in built else forward * (1 if graph else micro_batches)
        found += after
        built.add("training")
        if step % sizes["eval_every"] == 0:
            for _ in range(test_batches):
                found += before + ([] if graph and "evaluation" in built else forward) + list(after_evaluation)
                built.add("evaluation")
    return found


def layouts_of_parameters(weights, mesh):
    """The norms are made local, and go to the mesh."""
    return [(("local", []), ("B, B", mesh)) for name in weights if name.endswith((".weight", ".bias"))]


def loading(mesh):
    """The ids and the targets of a micro-batch."""
    return [(("local", []), (BATCH, mesh))] * 2


def forward_moves(mesh, sizes):
    """In each block, before the columns and behind the rows, of attention and of the MLP."""
    return [((BATCH, mesh), (BATCH, mesh), BATCH), ((PARTS, mesh), (BATCH, mesh))] * 2 * sizes["num_layers"]


def reducing(layout, mesh):
    """The number of valid tokens, the gradients, and their squares."""
    gradients = [where for name, where in layout.items() if name.endswith(" exp_avg")]
    moves = [(("P, B", mesh), ("B, B", mesh))]
    moves += [((sbp.replace("B", "P", 1), mesh), (sbp, mesh)) for sbp, _ in gradients]
    return moves + [(("B, P" if "S" in sbp else "B, B", mesh), ("B, B", mesh)) for sbp, _ in gradients]


def work_of(mesh, sizes):
    """The floating-point operations of each rank in a forward pass over a micro-batch; the head is on all ranks."""
    data, tensor = np.shape(mesh)
    length, hidden = sizes["seq_len"], sizes["hidden_size"]
    tokens = rows_of(sizes) * length / data
    block = 2 * tokens * (12 * hidden**2 + 2 * length * hidden) / tensor
    return [sizes["num_layers"] * block + 2 * tokens * hidden * sizes["vocab_size"]] * data * tensor
