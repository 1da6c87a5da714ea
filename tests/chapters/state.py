"""The chapter of state: checkpoints, and where loss, outputs and weights are while they pass from rank to rank."""

import numpy as np

from tests import reference
from tests.case import Case
from tests.chapters.training import UNEVEN, weights_of

WEIGHTS = {"whole": "B", "rows": "S(0)", "columns": "S(1)"}


def checkpoint(n, steps=2, weights="rows", batch=64, in_features=64, out_features=64, gain=1.0, seed=0):
    """Saved after `steps` steps with a whole weight on half of the ranks, loaded on all in another SBP, trained on."""
    ranks, half, sbp = list(range(n)), list(range(max(1, n // 2))), WEIGHTS[weights]
    sizes = {"batch": batch, "in_features": in_features, "out_features": out_features, "seed": seed, "gain": gain}
    saved, end = (reference.trained("momentum", steps=k * steps, layers=1, **sizes) for k in (1, 2))
    values = {"x": end["x"], "y": end["y"], "w": end["w0"]}
    layout = {"x": ("S(0)", ranks), "y": ("S(0)", ranks), "w": ("B", ranks)}
    for name, run, of, where in (
        ("saved w", saved, "new w0", ("B", half)),
        ("saved momentum", saved, "w0 momentum_buf", ("B", half)),
        ("loaded w", saved, "new w0", ("B", [0])),
        ("new w", end, "new w0", (sbp, ranks)),
        ("new momentum", end, "w0 momentum_buf", (sbp, ranks)),
        ("losses", end, "losses", ("B", ranks)),
    ):
        values[name], layout[name] = run[of], where
    shapes = {"S(0)": (batch, in_features), "B": (in_features, out_features)}
    products = [
        [(*((held, here, shape) for held, shape in shapes.items()), ("S(0)", here, (batch, out_features)))]
        for here in (half, ranks)
    ]
    reduced = [2 * (len(here) - 1) / len(here) * in_features * out_features for here in (half, ranks)]
    return Case(
        layout,
        values,
        products,
        steps=steps,
        models=2,
        all_moves=tuple(moves_of_checkpoint(ranks, half, sbp, steps, graph) for graph in (False, True)),
        added=tuple(name for name in values if name not in ("x", "y", "w")),
        drawn=tuple(name for name in layout if name not in ("x", "y", "losses")),
        sends=[reduced[0] * (rank in half) + reduced[1] for rank in ranks],  # a step of each of the two models
    )


def moves_of_checkpoint(ranks, half, sbp, steps, graph):
    """All moves of two models, first on half of the ranks, as OneFlow's own save and load make them too."""

    def training(held, here):
        return [((held, here), ("B", here))] * (1 if graph else steps)

    def saving(held, here):
        tensors = [(held, here)] * 2 + [("B", [0])] * graph  # a graph also keeps the number of the step, on rank 0
        return [move for one in tensors for move in ((one, one), (one, ("B", [0])))]

    here, there = ("B", [0]), (sbp, ranks)
    loading = [(("local", []), here)] * (3 if graph else 2)
    loading += [(here, here), (here, there)] * (here != there)  # copy_ has nothing to move where both are the same
    loading += [] if graph else [(here, here), (here, there), (there, there)]
    first = [(("S(0)", ranks), ("S(0)", half))] * 2 + [(("B", ranks), ("B", half))]
    first += training("B", half) + saving("B", half)
    return first + [(("B", ranks), there)] + loading + training(sbp, ranks) + saving(sbp, ranks)


def loss_placement(n, steps=3, loss="first", gain=1.0, **sizes):
    """The loss on all ranks, on rank 0, or on the last rank, which then is no worker."""
    ranks = list(range(n - (loss == "other")))
    there = {"each": ("S(0)", ranks), "first": ("B", [0]), "other": ("B", [n - 1])}[loss]
    values = reference.trained("sgd", steps=steps, gain=gain, **sizes)
    before = {w: values[w] for w in ("w0", "w1")}  # of the last step
    if steps > 1:
        earlier = reference.trained("sgd", steps=steps - 1, gain=gain, **sizes)
        before = {w: earlier[f"new {w}"] for w in before}
    scale = reference.Value.known(gain)
    out = scale * (reference.relu(scale * (values["x"] @ before["w0"])) @ before["w1"])
    whole = ("B", ranks)
    layout = {"x": ("S(0)", ranks), "y": there, "w0": whole, "w1": whole, "out": ("S(0)", ranks)}
    layout.update({"out at the loss": there, "w0 grad": whole, "w1 grad": whole, "new w0": whole, "new w1": whole})
    layout["losses"] = ("B", there[1])
    hidden = (values["x"].exact.shape[0], values["w0"].exact.shape[1])
    share, gathered = out.exact.size / len(ranks), (n - 1) / n * out.exact.size
    by_loss = {  # outputs and their gradients that each rank sends, eager and in a graph
        "each": ([0] * n, [0] * n),
        "first": ([2 * gathered] * n, [gathered] + [share] * (n - 1)),
        "other": ([share] * (n - 1) + [out.exact.size],) * 2,
    }[loss]
    reduced = [2 * (len(ranks) - 1) / len(ranks) * weights_of(values) * (rank in ranks) for rank in range(n)]
    return Case(
        layout,
        {**values, "out": out, "out at the loss": out},
        [
            ("x", "w0", ("S(0)", ranks, hidden)),
            (("S(0)", ranks, hidden), "w1", ("S(0)", ranks, values["y"].exact.shape)),
        ],
        moves=[(("S(0)", ranks), there, "S(0)")],
        in_graph={name: ("P", ranks) for name in ("w0 grad", "w1 grad")},
        steps=steps,
        moves_each_step=[(("P", ranks) if loss == "each" else there, ("B", there[1]))],
        added=tuple(name for name in layout if name not in ("x", "y", "w0", "w1")),
        drawn=("x", "y", "out", "out at the loss", "w0 grad", "w1 grad"),
        sends=[sent + weights for sent, weights in zip(by_loss[0], reduced)],
        sends_in_graph=[sent + weights for sent, weights in zip(by_loss[1], reduced)],
    )


def letters_of_a_text(batch):
    """Numbers of letters (0: blank) of a pangram that is repeated, and of those that follow."""
    text = "the quick brown fox jumps over the lazy dog "
    text = [ord(letter) - ord("a") + 1 if letter != " " else 0 for letter in text]
    return np.array([[text[(k + after) % len(text)] for k in range(batch)] for after in (0, 1)])


def guessed_letters(steps, seed, batch, hidden, gain):
    """out = table[x] @ w against one-hot y, trained with SGD on one device; the weights in use in the last step too."""
    rng, known = np.random.default_rng(seed), reference.Value.known
    x, following = letters_of_a_text(batch)
    weights = {"table": reference.Value.drawn(rng, 27, hidden), "w": reference.Value.drawn(rng, hidden, 27)}
    values, losses, update = (
        {"x": known(x), "y": known(np.eye(27)[following]), **weights},
        [],
        reference.Optimizer("sgd"),
    )
    rows = known(np.eye(27)[x])  # table[x] is rows @ table, and what comes back to the table is rows.T @ gradient
    for _ in range(steps):
        values.update({"replicated table": weights["table"], "replicated w": weights["w"]})
        embedded = weights["table"][x]
        out = known(gain) * (embedded @ weights["w"])
        error = out - values["y"]
        losses.append(reference.mean(error * error))
        error = reference.constant(2 / error.exact.size) * error
        table_grad = rows.T @ (known(gain) * (error @ weights["w"].T))
        gradients = {"table": table_grad, "w": known(gain) * (embedded.T @ error)}
        weights = update.step(weights, gradients)
    values.update({"scattered x": values["x"], "out": out, "gathered out": out})
    values.update({f"{name} grad": gradient for name, gradient in gradients.items()})
    values.update({f"new {name}": weight for name, weight in weights.items()})
    values["losses"] = reference.stacked(losses)
    return values


def replicate_scatter_gather(n, steps=3, way="steps", seed=0, batch=8, hidden=4, gain=1.0):
    """Everything at home on rank 0 and moved in each step, or at home where it is used."""
    ranks, values = list(range(n)), guessed_letters(steps, seed, batch, hidden, gain)
    split, whole, first = ("S(0)", ranks), ("B", ranks), ("B", [0])
    inputs, home = (split, whole) if way == "sbp" else (first, first)
    layout = {"x": inputs, "y": inputs, "table": home, "w": home}
    between = {"scattered x": split, "replicated table": whole, "replicated w": whole, "out": split}
    moves = [(first, split), (first, whole, "P"), (first, whole, "P"), (split, first, "S(0)")]
    if way == "steps":
        layout.update({**between, "gathered out": first})
    layout.update(dict.fromkeys(("table grad", "w grad", "new table", "new w", "losses"), home))
    weights = values["table"].exact.size + values["w"].exact.size
    reduced, moved = 2 * (n - 1) / n * weights, (n - 1) / n * (batch + values["y"].exact.size)
    children = [sum(child < n for child in (2 * rank + 1, 2 * rank + 2)) for rank in ranks]
    eager = [reduced + moved + (n - 1) / n * values["y"].exact.size + k * weights for k in children]
    graph = [(n - 1) * weights + moved] + [weights + values["y"].exact.size / n] * (n - 1)
    return Case(
        layout,
        {name: values[name] for name in layout},
        [(("S(0)", ranks, (batch, hidden)), ("B", ranks, (hidden, 27)), ("S(0)", ranks, (batch, 27)))],
        moves=moves if way == "steps" else [],
        in_graph={name: ("P", home[1]) for name in ("table grad", "w grad")},
        steps=steps,
        moves_each_step=[(first if way == "steps" else ("P", ranks), home)],
        added=tuple(name for name in layout if name not in ("x", "y", "table", "w", "scattered x")),
        drawn=("x", "table", "scattered x", "replicated table", "out", "gathered out"),
        dtypes={"x": "int32", "scattered x": "int32"},
        sends=[reduced] * n if way == "sbp" else eager,
        sends_in_graph=[reduced] * n if way == "sbp" else graph,
    )


CASES = {
    "replicate_scatter_gather": replicate_scatter_gather,
    "checkpoint": checkpoint,
    "loss_placement": loss_placement,
}
SIZES = {
    "checkpoint": {
        "even": {},
        "uneven": {"batch": 7, "in_features": 6, "out_features": 5, "steps": 1, "seed": 1},
        "columns": {"weights": "columns"},
        "whole": {"weights": "whole"},
    },
    "replicate_scatter_gather": {
        "even": {},
        "uneven": {"batch": 7, "hidden": 5, "steps": 1, "seed": 1},
        "sbp": {"way": "sbp"},
        "uneven sbp": {"way": "sbp", "batch": 7, "hidden": 5, "steps": 2, "seed": 1},
    },
    "loss_placement": {
        "even": {},
        "uneven": UNEVEN,
        "each": {"loss": "each"},
        "uneven each": {"loss": "each", **UNEVEN},
        "other": {"loss": "other"},
        "uneven other": {"loss": "other", **UNEVEN},
    },
}
GRAPH_ONLY = set()
