"""Bytes sent and memory kept by a step of each recipe that trains two layers, against theory. Not times."""

import numpy as np

from harness.measure.sbp import Layout
from harness.pool import Pool
from harness.report import runs
from tests.cases import CASES, GRAPH_ONLY


def costs(_, say):
    """[{"recipe", "ranks", "mode", "sent", "kept": bytes of the rank with most, measured, "sent_theory", "kept_theory":
    the same by the formula; kept are weights, gradients and optimizer state}]"""
    rows = []
    for n in runs.TRAINED_ON:
        with Pool(n, repeat=True) as pool:
            for name, _, mode in (run for run in runs.training_runs() if run[1] == n and run[0] not in runs.SAVING):
                found = runs.training_run(pool, name, n, mode)
                graph = mode == "graph" or name in GRAPH_ONLY
                case = CASES[name](n, graph, **{**runs.training_sizes(name), "steps": 1})
                row = {"recipe": f"{name}.py", "ranks": n, "mode": "graph" if graph else "eager"}
                row.update(sent=max(one["sent"] for one in found), sent_theory=4 * max(case.sends))
                row.update(kept=max(sum(one["kept"].values()) for one in found), kept_theory=max(kept(case, n)))
                rows.append(row)
        say(f"{n} ranks")
    return rows


def kept(case, n):
    """The bytes of weights, gradients and optimizer state on each rank, from the layout of a Case."""
    layout, sizes = case.layout, dict.fromkeys(range(n), 0)
    weights = {name[len("new ") :] for name in layout if name.startswith("new ")}
    for name, (sbp, ranks) in layout.items():
        if name.startswith("new ") or (" " in name and name.split(" ")[0] in weights):
            shape = case.values[name].exact.shape
            for rank in range(n) if sbp == "local" else np.ravel(ranks).tolist():
                block = Layout(sbp, ranks).block(shape, rank)
                sizes[rank] += 4 * int(np.prod([stop - start for start, stop in block]))
    return list(sizes.values())
