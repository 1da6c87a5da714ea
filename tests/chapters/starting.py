"""The chapter of starting: who is where, how ranks find each other, and how a job goes on after a death."""

import numpy as np

from tests import reference
from tests.case import Case
from tests.chapters.training import UNEVEN, weights_of
from tests.reference import Value


def hello_ranks(n, nodes=1):
    """A row of (rank, local rank, node) from each; each node has as many ranks."""
    ranks, each = list(range(n)), n // nodes
    rows = Value.known([[rank, rank % each, rank // each] for rank in ranks])
    return Case(
        {"mine": ("S(0)", ranks), "all": ("B", ranks)},
        {"mine": rows, "all": rows},
        moves=[(("S(0)", ranks), ("B", ranks))],
        moves_before=[(("local", []), ("S(0)", ranks))],
        dtypes={"mine": "int64", "all": "int64"},
        moved={"all": "mine"},
    )


def rendezvous(n):
    ranks = list(range(n))
    numbers = Value.known([[float(rank)] for rank in ranks])
    total = Value.known([[n * (n - 1) / 2]])
    return Case(
        {"number": ("S(0)", ranks), "partial": ("P", ranks), "sum": ("B", ranks)},
        {"number": numbers, "partial": total, "sum": total},
        parts={"partial": [Value.known([[float(rank)]]) for rank in ranks]},
        moves=[(("P", ranks), ("B", ranks))],
        moves_before=[(("local", []), ("S(0)", ranks))],
    )


def spawn(n, seed=0, ranks=2, batch=4, in_features=5, out_features=8):
    """All in the program that starts the ranks; what each of them held of x, w and out, and whether in a graph."""
    rng = np.random.default_rng(seed)
    x, w = Value.drawn(rng, batch, in_features), Value.drawn(rng, in_features, out_features)
    rows = [reference.split((batch,), 0, rank, ranks)[0] for rank in range(ranks)]
    counts = [part.stop - part.start for part in rows]
    shards = {
        graph: [[k, in_features, in_features, out_features, k, out_features, int(graph)] for k in counts]
        for graph in (False, True)
    }
    values = {"x": x, "w": w, "out": x @ w, "shards": Value.known(shards[False])}
    return Case(
        {name: ("local", []) for name in values},
        values,
        models=0,
        dtypes={"shards": "int64"},
        parts={("shards", graph): [Value.known(shards[graph])] for graph in (False, True)},
    )


def elastic_training(n, seed=0, steps=4, every=2, batch=8, in_features=4, hidden=8, out_features=4, gain=1.0):
    """Data parallel on a batch of its own in each step, drawn from the seed and the step's number."""
    ranks = list(range(n))

    def drawn(step, *shapes):
        rng = np.random.default_rng([seed, step])
        return [Value.drawn(rng, *shape) for shape in shapes]

    across, w1 = drawn(0, (hidden, in_features), (hidden, out_features))
    weights, losses, update = {"w0": across.T, "w1": w1}, [], reference.Optimizer("momentum", 0.01)
    values = dict(weights)
    for step in range(1, steps + 1):
        x, y = drawn(step, (batch, in_features), (batch, out_features))
        before = weights
        loss, gradients = reference.layered(x, y, weights, gain)
        weights = update.step(weights, gradients)
        losses.append(loss)
    parts = {f"{w} grad": [] for w in weights}
    for rank in ranks:
        rows = reference.split((batch, in_features), 0, rank, n)[0]
        share = reference.constant((rows.stop - rows.start) / batch)
        own = reference.layered(x[rows], y[rows], before, gain)[1]
        for w in weights:
            parts[f"{w} grad"].append(share * own[w])
    values = {"x": x, "y": y, **values}
    values.update({f"{w} grad": gradients[w] for w in weights})
    values.update({f"{w} momentum": update.state[w, "momentum_buf"] for w in weights})
    values.update({f"new {w}": weights[w] for w in weights})
    values["losses"] = reference.stacked(losses)
    middle = ("S(0)", ranks, (batch, hidden))

    def moves(graph):
        whole, first, split = ("B", ranks), ("B", [0]), ("S(0)", ranks)
        saving = [move for one in [whole] * 4 + [first] * graph for move in ((one, one), (one, first))]
        found = []
        for step in range(1, steps + 1):
            found += [(("local", []), split)] * 2 + saving * (step % every == 0 or step == steps)
        return found + [(("P", ranks), whole)] * steps

    return Case(
        {name: ("S(0)" if name in "xy" else "B", ranks) for name in values},
        values,
        [("x", "w0", middle), (middle, "w1", ("S(0)", ranks, (batch, out_features)))],
        parts={(name, True): own for name, own in parts.items()},
        in_graph={name: ("P", ranks) for name in ("w0 grad", "w1 grad")},
        steps=steps,
        all_moves=tuple(moves(graph) for graph in (False, True)),
        added=tuple(name for name in values if name not in ("x", "y", "w0", "w1")),
        drawn=("x", "y", "w0", "w0 grad", "w0 momentum", "new w0"),
        sends=[2 * (n - 1) / n * weights_of(values)] * n,
    )


CASES = {
    "hello_ranks": hello_ranks,
    "spawn": spawn,
    "rendezvous": rendezvous,
    "elastic_training": elastic_training,
}
SIZES = {
    "hello_ranks": {"even": {}},
    "rendezvous": {"even": {}},
    "spawn": {"even": {}, "uneven": {"ranks": 3, "batch": 7, "in_features": 6, "out_features": 9, "seed": 1}},
    "elastic_training": {
        "even": {},
        "uneven": UNEVEN,
        "an odd end": {"steps": 3, "every": 2, "seed": 2},
    },
}
GRAPH_ONLY = set()
