"""The chapter of state: checkpoints, and where loss, outputs and weights are while they pass from rank to rank."""

from pydoc_data.topics import topics

import numpy as np

from tests import reference
from tests.case import Case
from tests.chapters.training import UNEVEN, weights_of

WEIGHTS = {"whole": "B", "rows": "S(0)", "columns": "S(1)"}


def checkpoint(n, steps=2, weights="rows", gain=1.0, **sizes):
    """Saved after `steps` steps with whole weights, loaded into weights of another SBP, as many steps again."""
    ranks, sbp = list(range(n)), WEIGHTS[weights]
    saved, end = (reference.trained("momentum", steps=k * steps, gain=gain, **sizes) for k in (1, 2))
    values = {name: end[name] for name in ("x", "y", "w0", "w1")}
    layout = {"x": ("S(0)", ranks), "y": ("S(0)", ranks), "w0": ("B", ranks), "w1": ("B", ranks)}
    for stage, run, where in (
        ("saved", saved, ("B", ranks)),
        ("loaded", saved, ("B", [0])),
        ("new", end, (sbp, ranks)),
    ):
        for kind, name in (("", "new {}"), (" momentum", "{} momentum_buf")):
            for w in ("w0", "w1"):
                values[f"{stage} {w}{kind}"] = run[name.format(w)]
                layout[f"{stage} {w}{kind}"] = where
    for w in ("w0", "w1"):
        values[f"{w} grad"], layout[f"{w} grad"] = end[f"{w} grad"], (sbp, ranks)
    values["losses"], layout["losses"] = end["losses"], ("B", ranks)
    inputs = ("x", "y", "w0", "w1")
    hidden = (values["x"].exact.shape[0], values["w0"].exact.shape[1])
    whole = [("B", ranks, values[w].exact.shape) for w in ("w0", "w1")]
    return Case(
        layout,
        values,
        [
            ("x", whole[0], ("S(0)", ranks, hidden)),
            (("S(0)", ranks, hidden), whole[1], ("S(0)", ranks, values["y"].exact.shape)),
        ],
        in_graph={name: ("P", ranks) for name in ("w0 grad", "w1 grad")},
        steps=steps,
        models=2,
        all_moves=tuple(moves_of_checkpoint(ranks, sbp, steps, graph) for graph in (False, True)),
        added=tuple(name for name in values if name not in inputs),
        drawn=tuple(name for name in layout if name not in ("x", "y", "losses") and "w1" not in name),
        sends=[4 * (n - 1) / n * weights_of(values)] * n,  # a step of each of the two models
    )


def moves_of_checkpoint(ranks, sbp, steps, graph):
    """All moves of two models, the second with weights in `sbp`, as OneFlow's own save and load make them too."""

    def training(held):
        return [((held, ranks), ("B", ranks))] * 2 * (1 if graph else steps)

    def saving(held):
        tensors = [(held, ranks)] * 4 + [("B", [0])] * graph  # a graph also keeps the number of the step, on rank 0
        return [move for one in tensors for move in ((one, one), (one, ("B", [0])))]

    here, there = ("B", [0]), (sbp, ranks)
    loading = [(("local", []), here)] * (5 if graph else 4)
    loading += [(here, here), (here, there)] * 2 * (here != there)  # copy_ has nothing to move where both are the same
    loading += [] if graph else [(here, here), (here, there), (there, there)] * 2
    losses = [(("P", ranks), ("B", ranks))] * 2 * steps
    return training("B") + saving("B") + loading + training(sbp) + saving(sbp) + losses


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
        moves_after=[(("P", ranks) if loss == "each" else there, ("B", there[1]))] * steps,
        added=tuple(name for name in layout if name not in ("x", "y", "w0", "w1")),
        drawn=("x", "y", "out", "out at the loss", "w0 grad", "w1 grad"),
        sends=[sent + weights for sent, weights in zip(by_loss[0], reduced)],
        sends_in_graph=[sent + weights for sent, weights in zip(by_loss[1], reduced)],
    )


def letters_of_a_text(batch):
    """Numbers of letters (0: blank) of a text that each Python has, and of those that follow."""
    text = [ord(letter) - ord("a") + 1 if letter != " " else 0 for letter in topics["assignment"].lower()]
    text = [number for number in text if 0 <= number <= 26]
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
        moves_after=[(first if way == "steps" else ("P", ranks), home)] * steps,
        added=tuple(name for name in layout if name not in ("x", "y", "table", "w", "scattered x")),
        drawn=tuple(name for name in layout if name not in ("new table", "new w", "losses")),
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
        "uneven": UNEVEN,
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
