"""The chapter of state: checkpoints, and where loss, outputs and weights are while they pass from rank to rank."""

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


CASES = {
    "checkpoint": checkpoint,
}
SIZES = {
    "checkpoint": {
        "even": {},
        "uneven": UNEVEN,
        "columns": {"weights": "columns"},
        "whole": {"weights": "whole"},
    },
}
GRAPH_ONLY = set()
