"""The chapter of starting: who is where, how ranks find each other, and how a job goes on after a death."""

import ipaddress

import numpy as np

from tests.cases import reference
from tests.cases.case import UNEVEN, Case, all_reduce, case_of_recipe, placed, reduced
from tests.cases.reference import Value


@case_of_recipe({})
def hello_ranks(n, graph=False, nodes=1):
    """A row of (rank, local rank, address as a number) from each; each node has as many ranks."""
    ranks, each = list(range(n)), n // nodes
    first = ipaddress.ip_address("127.0.0.1" if nodes == 1 else "10.0.0.1")  # as tests/hosts.py gives them
    rows = Value([[rank, rank % each, int(first + rank // each)] for rank in ranks], dtype="int64")
    return Case(
        {"mine": ("S(0)", ranks), "everyone": ("B", ranks)},
        {"mine": rows, "everyone": rows},
        moves=[(("local", []), ("S(0)", ranks)), (("S(0)", ranks), ("B", ranks))],
        reads=[],
    )


@case_of_recipe({})
def rendezvous(n, graph=False):
    ranks = list(range(n))
    numbers, total = Value([[rank] for rank in ranks]), Value([[sum(ranks)]])
    return Case(
        {"number": ("S(0)", ranks), "partial": ("P", ranks), "total": ("B", ranks)},
        {"number": numbers, "partial": total, "total": total},
        moves=[(("local", []), ("S(0)", ranks)), all_reduce(ranks)],
        parts={"partial": [Value([[rank]]) for rank in ranks]},
        reads=[],
    )


@case_of_recipe({"uneven": UNEVEN, "three ranks": {**UNEVEN, "ranks": 3}})
def spawn(n, graph=False, ranks=2, **sizes):
    """All in the program that starts the ranks, as arrays; tests/test_spawn.py has what the ranks do."""
    values = reference.one_layer(**sizes)
    return Case(placed(values, [], "local"), values, reads=[], graph_calls=0)


@case_of_recipe({"uneven": UNEVEN, "an odd end": {"steps": 3, "every": 2, "seed": 2}})
def elastic_training(n, graph=False, seed=0, steps=4, every=2, batch=8, in_features=64, out_features=64, matmul_scale=1.0):
    """Data parallel on a batch of its own in each step, drawn from the seed and the step's number."""
    ranks = list(range(n))

    def drawn(step, *shapes):
        rng = np.random.default_rng([seed, step])
        return [reference.drawn(rng, *shape) for shape in shapes]

    [w] = drawn(0, (in_features, out_features))
    weights, losses, update = {"w": w}, [], reference.Optimizer("momentum", 0.01)
    for step in range(1, steps + 1):
        x, y = drawn(step, (batch, in_features), (batch, out_features))
        loss = reference.mse(reference.mlp(x, weights, matmul_scale), y)
        weights = update.step(weights, reference.gradients(loss, weights))
        losses.append(loss.exact.item())
    values = {"x": x, "y": y, "w": w, "momentum": update.state["w momentum_buf"], "new w": weights["w"]}
    values["losses"] = Value(losses, rounded=True)
    same = (("B", ranks), ("B", ranks))
    moves = [] if graph else [same] * 3  # in eager mode OneFlow takes the momentum to where its weight is
    for step in range(1, steps + 1):  # numpy() takes weight and momentum, if they are saved, to B
        moves += [(("local", []), ("S(0)", ranks))] * 2 + [all_reduce(ranks)]
        moves += [same] * 4 * (step % every == 0)
    product = ("x", "w", ("S(0)", ranks, (batch, out_features)))
    return Case(
        placed(values, ranks, x="S(0)", y="S(0)"),
        values,
        [product] * (1 if graph else steps),
        moves,
        sends=[reduced(n, w.exact.size)] * n,
    )
