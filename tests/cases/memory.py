"""The chapter of memory: the MLP of training, with less of it on each rank."""

from tests.cases import reference
from tests.cases.recipe_case import Case, Main, case_of_recipe, reduced, weights_of
from tests.cases.train import UNEVEN, by_rows


@case_of_recipe({"uneven": UNEVEN})
def fully_sharded(n, graph=False, steps=3, matmul_scale=1.0, **sizes):
    adam = reference.Optimizer("adam", graph=graph)
    values, _ = reference.train_mlp(reference.mlp_inputs(**sizes), adam, steps, matmul_scale)
    return Case(
        values,
        by_rows(values, n),  # the weights are gathered first
        sends=[reduced(n, weights_of(values))] * n,
    )


FEW_ROWS = {"batch": 4, "in_features": 3, "hidden_size": 2}  # fewer than ranks: such a weight stays B
SMALL_SHARDS = {"in_features": 6, "hidden_size": 12, "out_features": 5, "shard_min_size": 20}


@case_of_recipe(
    {"uneven": UNEVEN, "few rows": FEW_ROWS, "small shards": SMALL_SHARDS},
    graph_only=True,
    refused={"--shard-min-size 0": "1 or more"},
    main=Main(
        alone={"shard_min_size": [1]},
    ),
)
def zero_optimizer(n, graph=True, steps=3, shard_min_size=1, matmul_scale=1.0, **sizes):
    adam = reference.Optimizer("adam", graph=graph)
    values, _ = reference.train_mlp(reference.mlp_inputs(**sizes), adam, steps, matmul_scale)
    layout = {}
    for name in ("w0", "w1"):
        rows, columns = values[name].exact.shape
        is_split = rows // n * columns >= shard_min_size and rows >= n  # the smallest shard counts
        tensors = (f"{name} exp_avg", f"{name} exp_avg_sq", f"new {name}")
        layout.update(dict.fromkeys(tensors, "S(0)" if is_split else "B"))
    return Case(
        values,
        by_rows(values, n),
        layout,
        sends=[reduced(n, weights_of(values))] * n,
    )


@case_of_recipe(
    {"uneven": UNEVEN, "off": {"checkpointing": False}},
    main=Main(
        comparisons=2,
        prints={
            False: [
                "[0] a step saves 2 tensors for backward, 11 without checkpointing",
                "[1] a step saves 2 tensors for backward, 11 without checkpointing",
            ],
            True: [],
        },
        further={1: {"checkpointing": False}},
    ),
)
def activation_checkpointing(
    n, graph=False, steps=3, checkpointing=True, batch=8, in_features=4, hidden_size=8, out_features=4, seed=0,
    matmul_scale=1.0,
):  # fmt: skip
    """block(block(x)), block(x) = relu(x @ w_up) @ w_down: an MLP of four layers, without relu after the second."""
    widths = [in_features, hidden_size, in_features, hidden_size, out_features]
    x, y, weights = reference.inputs_of_widths(widths, seed, batch, weights_divided_by=4)
    weights = dict(zip(("w_up0", "w_down0", "w_up1", "w_down1"), weights.values()))
    values, _ = reference.train_mlp((x, y, weights), reference.Optimizer("sgd"), steps, matmul_scale, linear=(1,))
    return Case(
        values,
        by_rows(values, n),
        passes=1 if graph else steps * (2 if checkpointing else 1),  # in a graph OneFlow's compiler adds the second
        recomputed={"matmul": 4, "relu": 2} if checkpointing else {},
        sends=[reduced(n, weights_of(values))] * n,
    )


AUTO_PARALLEL = {
    "even": {"steps": 1},
    "uneven": {"batch": 7, "in_features": 250, "hidden_size": 1022, "out_features": 251, "steps": 1},
    "large batch": {"batch": 1024, "steps": 1},
    "small weights": {"in_features": 4, "hidden_size": 8, "out_features": 4},
}


@case_of_recipe(
    AUTO_PARALLEL,
    graph_only=True,
    measured_at={"batch": 96},  # at more it chooses otherwise
    refused={"--batch 1": "2 or more, a row for each rank"},
)
def auto_parallel(
    n, graph=True, steps=3, matmul_scale=1.0, batch=8, in_features=256, hidden_size=1024, out_features=256
):
    """What OneFlow chooses cannot be derived: these are the two layouts, and the sizes here are not near the border."""
    sizes = {"batch": batch, "in_features": in_features, "hidden_size": hidden_size, "out_features": out_features}
    values = reference.trained("sgd", steps=steps, matmul_scale=matmul_scale, weights_divided_by=16, **sizes)
    values = {name: value for name, value in values.items() if not name.endswith(" grad")}
    columns, rows = ("S(1)", "S(0)") if batch <= 512 and in_features > 100 else ("B", "B")
    return Case(
        values,
        by_rows(values, n),  # as the script says, not as run
        {"new w0": columns, "new w1": rows},
        sends=[(n - 1) / n * batch * (in_features + 3 * out_features)] * n,
    )
