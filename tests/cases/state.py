"""The chapter of state: checkpoints, and the ranks on which weights, outputs and the loss are."""

import numpy as np

from tests.cases import reference
from tests.cases.recipe_case import Case, Main, case_of_recipe, reduced, shares, weights_of
from tests.cases.reference import Value, drawn, mse
from tests.cases.train import UNEVEN, by_rows

WEIGHTS = {"whole": "B", "rows": "S(0)", "columns": "S(1)"}


def resumed(n):
    """Trained with a replicated weight on half of the ranks, then on all ranks with a weight in each layout."""
    before = {"ranks": list(range(max(1, n // 2))), "weights": "whole", "steps": 2}
    return {
        "uneven": {"size": 7, "seed": 1, "steps": 3, "save_every": 4, "before": before},
        **{weights: {"weights": weights, "before": before} for weights in WEIGHTS},
    }


@case_of_recipe(
    resumed,
    refused={
        "--steps 0": "1 or more",
        "--save-every 0": "1 or more",
        "--keep -1": "0 or more",
    },
    tests=[
        *("tests/test_checkpoints.py", "tests/test_rare_failures.py"),
        *("tests/slow/test_state.py", "tests/slow/test_choices.py"),
    ],
    equivalent={
        r"flow.placement\(args.device, list\(range\(max.*\[(:1|-1:)\]\)$": "main has two ranks, and their half is one",
    },
    main=Main(
        prints=["[0] saved w (64, 64) of (64, 64)", "[1] saved w (0, 0) of (64, 64)"],
        further={0: {"weights": "whole"}},
        alone={"checkpoint_dir": [None], "save_every": [2], "keep": [0], "steps": [2, 4], "weights": ["rows", "whole"]},
        prints_empty=True,
        refused=["--checkpoint-dir="],
        refused_elsewhere=("raise CheckpointError(", "# on all ranks"),
    ),
)
def checkpoint(
    n, graph=False, steps=4, weights="rows", save_every=2, size=64, seed=0, matmul_scale=1.0, ranks=None,
    checkpoint_dir=None, before=None,
):  # fmt: skip
    """Trained up to `steps`; `before` has the arguments of the run from which this one resumes."""
    ranks, sbp, done = ranks or list(range(n)), WEIGHTS[weights], before["steps"] if before else 0
    sizes = {"batch": size, "in_features": size, "out_features": size, "seed": seed, "matmul_scale": matmul_scale}
    start, end = (reference.trained("momentum", steps=k, layers=1, **sizes) for k in (done, steps))
    values = {
        **{"x": end["x"], "y": end["y"], "w": start["new w0"], "w grad": end["w0 grad"]},
        **{"w momentum_buf": end["w0 momentum_buf"], "new w": end["new w0"], "losses": end["losses"]},
    }
    if not before:
        values["w"] = end["w0"]  # as drawn, which float32 holds exactly
    return Case(
        values,
        [*shares(len(ranks), size, 2 * size**2), *[0] * (n - len(ranks))],
        {"w": sbp, "w grad": "P" if graph else sbp},
        ranks,
        passes=1 if graph else steps - done,
        sends=[reduced(n, size * size)] * n,
    )


def losses_of(n):
    """On 2 ranks each place of the loss, on more the one that leaves several workers without it."""
    if n > 2:
        return {"uneven": {**UNEVEN, "loss": "other"}}
    places = {loss: {"loss": loss} for loss in ("each", "other")}
    return {"uneven": UNEVEN, **places, **{f"uneven {loss}": {**UNEVEN, "loss": loss} for loss in places}}


@case_of_recipe(
    losses_of,
    variants=[{"loss": "each"}, {"loss": "first"}, {"loss": "other"}],
    main=Main(
        prints=["[0] the model is on ranks 0 1 and the loss on 0"],
    ),
)
def loss_placement(n, graph=False, steps=3, loss="first", matmul_scale=1.0, **sizes):
    """The loss on all ranks, on rank 0, or on the last rank, which then is no worker."""
    ranks = list(range(n - (loss == "other")))
    of_loss = {"each": ("S(0)", ranks), "first": ("B", [0]), "other": ("B", [n - 1])}[loss]
    values, before_last = (
        reference.trained("sgd", steps=k, matmul_scale=matmul_scale, **sizes) for k in (steps, steps - 1)
    )
    last_weights = {name: before_last[f"new {name}"] for name in ("w0", "w1")}
    out = values["out"] = values["moved"] = reference.mlp(values["x"], last_weights, matmul_scale)
    share, gathered = out.exact.size / len(ranks), (n - 1) / n * out.exact.size
    outputs = {  # outputs and their gradients that each rank sends
        "each": [0] * n,
        "first": [gathered] + [share] * (n - 1) if graph else [2 * gathered] * n,
        "other": [share] * (n - 1) + [out.exact.size],
    }[loss]
    weights = reduced(len(ranks), weights_of(values))
    return Case(
        values,
        [*by_rows(values, len(ranks)), *[0] * (n - len(ranks))],
        {**dict.fromkeys(("w0", "w1"), "B"), **dict.fromkeys(("y", "moved"), of_loss)},
        ranks,
        sends=[sent + weights * (rank in ranks) for rank, sent in enumerate(outputs)],
    )


def characters_of_a_text(batch):
    """Numbers of characters (0: blank) of a pangram that is repeated, and of the character behind each."""
    text = "the quick brown fox jumps over the lazy dog "
    numbers = np.array([0 if character == " " else ord(character) - ord("a") + 1 for character in text])
    return np.resize(numbers, batch), np.resize(np.roll(numbers, -1), batch)


def next_characters(steps, seed, batch, hidden_size, matmul_scale):
    """out = embedding[x] @ head against one-hot y, trained by SGD; what is sent to and from rank 0 in the last step."""
    rng, (x, next_x) = np.random.default_rng(seed), characters_of_a_text(batch)
    inputs = {"x": Value(x, dtype="int32"), "y": Value(np.eye(27)[next_x])}
    weights = {"embedding": drawn(rng, 27, hidden_size), "head": drawn(rng, hidden_size, 27)}

    def forward(w, _):
        out = matmul_scale * (w["embedding"][x] @ w["head"])
        return {"scattered": inputs["x"], "table": w["embedding"], "out": out, "gathered": out}, mse(out, inputs["y"])

    return {**inputs, **weights, **reference.descend(weights, forward, steps)[0]}


UNEVEN_TEXT = {"batch": 7, "hidden_size": 5, "steps": 1, "seed": 1}


@case_of_recipe(
    {"uneven": UNEVEN_TEXT, "all": {"home": "all"}, "uneven all": {**UNEVEN_TEXT, "home": "all", "steps": 2}},
    variants=[{"batch": 8192, "hidden_size": 8}, {"home": "all"}],  # large outputs, little weight
    main=Main(
        prints=["[0] text and weights are kept on ranks 0 and used on 0 1"],
        prints_empty=True,
    ),
)
def replicate_scatter_gather(n, graph=False, steps=3, home="first", seed=0, batch=8, hidden_size=4, matmul_scale=1.0):
    """Weights, inputs and loss on rank 0, from where each step sends them; or where they are used (home="all")."""
    values = next_characters(steps, seed, batch, hidden_size, matmul_scale)
    inputs, weights = (("B", [0]), ("B", [0])) if home == "first" else ("S(0)", "B")
    layout = {**dict.fromkeys(("x", "y", "gathered"), inputs), **dict.fromkeys(("embedding", "head"), weights)}
    if graph:
        layout.update({f"{name} grad": ("P", [0]) if home == "first" else "P" for name in ("embedding", "head")})
    size, outputs = weights_of(values), values["y"].exact.size
    sends = sends_with_rank_0(n, graph, batch, size, outputs) if home == "first" else [reduced(n, size)] * n
    return Case(
        values,
        shares(n, batch, 2 * hidden_size * 27),
        {**layout, "scattered": "S(0)"},
        sends=sends,
    )


def sends_with_rank_0(n, graph, inputs, weights, outputs):
    """What each rank sends in a step with weights, inputs and loss on rank 0; all three are numbers of elements.

    Rank 0 broadcasts the weights and scatters the inputs; the ranks send it their outputs, it returns their gradients;
    the gradients of the weights are reduced to rank 0.
    """
    others = (n - 1) / n  # the share of the rows that are not those of rank 0
    if graph:  # point to point: a rank other than 0 sends only its gradients and its outputs
        first = (n - 1) * weights + others * (inputs + outputs)
        return [first] + [weights + outputs / n] * (n - 1)
    # Eager mode broadcasts along a binary tree: rank k sends the weights to ranks 2 k + 1 and 2 k + 2. It reduces with
    # an all-reduce, and all ranks send as much to scatter and to gather.
    children = [sum(child < n for child in (2 * rank + 1, 2 * rank + 2)) for rank in range(n)]
    return [count * weights + reduced(n, weights) + others * (inputs + 2 * outputs) for count in children]
