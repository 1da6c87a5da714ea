"""The chapter of starting: who is where, how ranks find each other, and how a job goes on after a death."""

import ipaddress

import numpy as np

from tests import reference
from tests.case import Case
from tests.reference import Value


def hello_ranks(n, nodes=1):
    """A row of (rank, local rank, address as a number) from each; each node has as many ranks."""
    ranks, each = list(range(n)), n // nodes
    first = ipaddress.ip_address("127.0.0.1" if nodes == 1 else "10.0.0.1")  # as tests/hosts.py gives them
    rows = Value.known([[rank, rank % each, int(first + rank // each)] for rank in ranks])
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


def elastic_training(n, seed=0, steps=4, every=2, batch=8, in_features=64, out_features=64, gain=1.0):
    """Data parallel on a batch of its own in each step, drawn from the seed and the step's number."""
    ranks = list(range(n))

    def drawn(step, *shapes):
        rng = np.random.default_rng([seed, step])
        return [Value.drawn(rng, *shape) for shape in shapes]

    [w] = drawn(0, (in_features, out_features))
    weights, losses, update = {"w": w}, [], reference.Optimizer("momentum", 0.01)
    for step in range(1, steps + 1):
        x, y = drawn(step, (batch, in_features), (batch, out_features))
        loss, gradients = reference.layered(x, y, weights, gain)
        weights = update.step(weights, gradients)
        losses.append(loss)
    values = {"x": x, "y": y, "w": w, "momentum": update.state["w", "momentum_buf"], "new w": weights["w"]}
    values["losses"] = reference.stacked(losses)
    same, moves = (("B", ranks), ("B", ranks)), []
    for step in range(1, steps + 1):  # numpy() takes weight and momentum, if they are saved, to B
        moves += [(("local", []), ("S(0)", ranks))] * 2 + [(("P", ranks), ("B", ranks))]
        moves += [same] * 4 * (step % every == 0)
    return Case(
        {name: ("S(0)" if name in "xy" else "B", ranks) for name in values},
        values,
        [("x", "w", ("S(0)", ranks, (batch, out_features)))],
        steps=steps,
        all_moves=([same] * 3 + moves, moves),  # in eager mode OneFlow takes the momentum to where its weight is
        added=("momentum", "new w", "losses"),
        drawn=("x", "w", "momentum", "new w"),
        sends=[2 * (n - 1) / n * w.exact.size] * n,
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
        "uneven": {"batch": 7, "in_features": 6, "out_features": 9, "seed": 1},
        "an odd end": {"steps": 3, "every": 2, "seed": 2},
    },
}
GRAPH_ONLY = set()
