"""The chapter of state: checkpoints, and where loss, outputs and weights are while they pass from rank to rank."""

import numpy as np

from tests.cases import reference
from tests.cases.recipe_case import Case, case_of_recipe, in_steps, placed, reduced, weights_of
from tests.cases.reference import Value, drawn, mse
from tests.cases.train import UNEVEN, two_matmuls

WEIGHTS = {"whole": "B", "rows": "S(0)", "columns": "S(1)"}


def half_of(n):
    return list(range(max(1, n // 2)))


def resumed(n):
    """Trained with a whole weight on half of the ranks, then on all with a weight in each layout."""
    before = {"ranks": half_of(n), "weights": "whole", "steps": 2}
    return {
        "uneven": {"size": 7, "seed": 1, "steps": 3, "save_every": 4, "before": before},
        **{weights: {"weights": weights, "before": before} for weights in WEIGHTS},
    }


@case_of_recipe(
    resumed,
    refused={"--steps 0": "1 or more", "--save-every 0": "1 or more"},
    tests=["tests/test_cures.py", "tests/slow/test_state.py", "-k", "checkpoint or resumes"],
    equivalent={
        r"flow.placement\(args.device, list\(range\(max.*\[(:1|-1:)\]\)$": "main has two ranks, and their half is one",
    },
)
def checkpoint(
    n, graph=False, steps=4, weights="rows", save_every=2, size=64, seed=0, matmul_scale=1.0, ranks=None,
    checkpoint_dir=None, before=None,
):  # fmt: skip
    """Trained up to `steps`; "w" is the weight before the first of these steps."""
    ranks, sbp, done = ranks or list(range(n)), WEIGHTS[weights], before["steps"] if before else 0
    sizes = {"batch": size, "in_features": size, "out_features": size, "seed": seed, "matmul_scale": matmul_scale}
    drawn_w, saved, end = (reference.trained("momentum", steps=k, layers=1, **sizes) for k in (1, done, steps))
    values = {"x": end["x"], "y": end["y"], "w": saved["new w0"] if before else drawn_w["w0"]}
    values.update({"w grad": end["w0 grad"], "w momentum_buf": end["w0 momentum_buf"], "new w": end["new w0"]})
    values["losses"] = end["losses"]
    layout = placed(values, ranks, sbp, x="S(0)", y="S(0)", losses=("local", []), grad="P" if graph else sbp)
    moves = moves_of_loading(layout["w"], graph) if before else []
    for step in range(done + 1, steps + 1):
        if step == done + 1 or not graph:
            moves.append((layout["w"], ("B", ranks)))
        if checkpoint_dir and (step % save_every == 0 or step == steps):
            moves += moves_of_saving(layout["w"], graph)
    shape, rows = (size, size), ("S(0)", ranks)
    return Case(
        layout,
        values,
        in_steps(graph, steps - done, [((*rows, shape), ("B", ranks, shape), (*rows, shape))]),
        moves,
        reads=[("P", ranks)] * (steps - done),
        graph_calls=steps - done,
        sends=[reduced(n, size * size)] * n,
    )


def moves_of_saving(w, graph):
    """Those of OneFlow's own save: w, its momentum, and in a graph the number of the step, each to rank 0."""
    tensors = [w, w] + [("B", [0])] * graph
    return [move for one in tensors for move in ((one, one), (one, ("B", [0])))]


def moves_of_loading(w, graph):
    """Those of OneFlow's own load, and then of the model, which takes what was loaded to its layout."""
    first = ("B", [0])
    moves = [(("local", []), first)] * (3 if graph else 2)
    moves += [(first, first), (first, w)] * (first != w)  # copy_ has nothing to move where both are the same
    return moves + ([] if graph else [(first, first), (first, w), (w, w)])


LOSSES = {"each": {"loss": "each"}, "uneven each": {"loss": "each", **UNEVEN}}
LOSSES.update({"other": {"loss": "other"}, "uneven other": {"loss": "other", **UNEVEN}})


@case_of_recipe(
    {"uneven": UNEVEN, **LOSSES},
    every_size=True,
    variants=[{"loss": "each"}, {"loss": "first"}, {"loss": "other"}],
)
def loss_placement(n, graph=False, steps=3, loss="first", matmul_scale=1.0, **sizes):
    """The loss on all ranks, on rank 0, or on the last rank, which then is no worker."""
    ranks = list(range(n - (loss == "other")))
    rows, there = ("S(0)", ranks), {"each": ("S(0)", ranks), "first": ("B", [0]), "other": ("B", [n - 1])}[loss]
    runs = [reference.trained("sgd", steps=k, matmul_scale=matmul_scale, **sizes) for k in (steps, steps - 1)]
    values, before_last = runs
    last_weights = {name: before_last[f"new {name}"] for name in ("w0", "w1")}
    out = values["out"] = reference.mlp(values["x"], last_weights, matmul_scale)
    names = ("x", "y", "w0", "w1", "out", "moved", "w0 grad", "w1 grad", "new w0", "new w1", "losses")
    layout = placed(names, ranks, x=rows, y=there, out=rows, moved=there, grad="P" if graph else "B")
    share, gathered = out.exact.size / len(ranks), (n - 1) / n * out.exact.size
    outputs = {  # outputs and their gradients that each rank sends
        "each": [0] * n,
        "first": [gathered] + [share] * (n - 1) if graph else [2 * gathered] * n,
        "other": [share] * (n - 1) + [out.exact.size],
    }[loss]
    weights = reduced(len(ranks), weights_of(values))
    return Case(
        layout,
        {**values, "moved": out},
        in_steps(graph, steps, two_matmuls(values, ranks)),
        in_steps(graph, steps, [(rows, there, "S(0)")]),
        reads=[("P" if loss == "each" else "B", there[1])] * steps,
        sends=[sent + weights * (rank in ranks) for rank, sent in enumerate(outputs)],
    )


def characters_of_a_text(batch):
    """Numbers of characters (0: blank) of a pangram that is repeated, and of those that follow."""
    text = "the quick brown fox jumps over the lazy dog "
    text = [ord(character) - ord("a") + 1 if character != " " else 0 for character in text]
    return np.array([[text[(k + after) % len(text)] for k in range(batch)] for after in (0, 1)])


def next_characters(steps, seed, batch, hidden_size, matmul_scale):
    """out = embedding[x] @ head against one-hot y, trained by SGD on one device; the last replica and outputs."""
    rng, (x, following) = np.random.default_rng(seed), characters_of_a_text(batch)
    inputs = {"x": Value(x, dtype="int32"), "y": Value(np.eye(27)[following])}
    weights = {"embedding": drawn(rng, 27, hidden_size), "head": drawn(rng, hidden_size, 27)}

    def forward(w, _):
        out = matmul_scale * (w["embedding"][x] @ w["head"])
        return {"scattered": inputs["x"], "table": w["embedding"], "out": out, "gathered": out}, mse(out, inputs["y"])

    return {**inputs, **weights, **reference.descend(weights, forward, steps)[0]}


UNEVEN_TEXT = {"batch": 7, "hidden_size": 5, "steps": 1, "seed": 1}
TEXTS = {"uneven": UNEVEN_TEXT, "all": {"home": "all"}, "uneven all": {**UNEVEN_TEXT, "home": "all", "steps": 2}}


@case_of_recipe(
    TEXTS,
    variants=[{"batch": 8192, "hidden_size": 8}, {"home": "all"}],  # large outputs, little weight
)
def replicate_scatter_gather(n, graph=False, steps=3, home="first", seed=0, batch=8, hidden_size=4, matmul_scale=1.0):
    """Everything at home on rank 0 and moved in each step, or at home where it is used.

    Rank 0 broadcasts the weights. In eager mode OneFlow does that along a binary tree: rank k sends them to the ranks
    2k + 1 and 2k + 2. In a graph rank 0 sends them to every other rank itself.
    """
    ranks, values = list(range(n)), next_characters(steps, seed, batch, hidden_size, matmul_scale)
    split, whole, on_all = ("S(0)", ranks), ("B", ranks), home == "all"
    inputs, weights = (split, whole) if on_all else (("B", [0]), ("B", [0]))
    gradient = ("P", weights[1]) if graph else weights
    layout = {
        **{"x": inputs, "y": inputs, "embedding": weights, "head": weights},
        **{"scattered": split, "table": whole, "out": split, "gathered": inputs},
        **{"embedding grad": gradient, "head grad": gradient, "new embedding": weights, "new head": weights},
        "losses": weights,
    }
    moves = [(inputs, split), (weights, whole, "P"), (weights, whole, "P"), (split, inputs, "S(0)")]
    size, outputs = weights_of(values), values["y"].exact.size
    to_others = (n - 1) / n  # the share of the rows that are not those of rank 0
    sends = [reduced(n, size)] * n  # an all-reduce of the gradients
    if not on_all and graph:
        scattered = to_others * (batch + outputs)  # x, and the gradient of the gathered outputs
        sends = [(n - 1) * size + scattered] + [size + outputs / n] * (n - 1)
    elif not on_all:
        tree_children = [sum(child < n for child in (2 * rank + 1, 2 * rank + 2)) for rank in ranks]
        scattered_and_gathered = to_others * (batch + 2 * outputs)  # eager mode has each rank send as much
        sends = [sends[k] + scattered_and_gathered + tree_children[k] * size for k in ranks]
    product = (("S(0)", ranks, (batch, hidden_size)), ("B", ranks, (hidden_size, 27)), ("S(0)", ranks, (batch, 27)))
    return Case(
        layout,
        {name: values[name] for name in layout},
        in_steps(graph, steps, [product]),
        in_steps(graph, steps, moves),
        reads=[("P", ranks) if on_all else ("B", [0])] * steps,
        sends=sends,
    )
