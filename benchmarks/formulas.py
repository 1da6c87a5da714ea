"""The time of a training step by formula, and where two strategies cross. Imports nothing, so plots.py can use it."""

BATCH, FEATURES, MICRO_BATCHES = 1024, 1024, 8  # of steps.sizes
HIDDEN = (256, 512, 1024, 2048, 4096)


def sent(strategy, ranks, hidden):
    """Bytes that each rank sends in a step of x (BATCH, FEATURES) @ (FEATURES, hidden), relu, @ (hidden, FEATURES).

    The pipeline's is that of one boundary between two stages, one way.
    """
    weights, activations = 4 * 2 * FEATURES * hidden, 4 * BATCH * FEATURES
    ring = 2 * (ranks - 1) / ranks
    return {
        "data parallel": ring * weights,
        "column, then row": ring * activations,
        "pipeline": 4 * BATCH * hidden,
        "data x tensor": weights / 2
        + activations / 2,  # pairs: half of the weights one way, half of the batch the other
    }[strategy]


def step_time(strategy, ranks, hidden, rates, cores):
    """Seconds: matmuls, then the update of the weights that a rank has, then bytes; nothing overlaps.

    rates: {"flops" and "bytes" in a second, "update" seconds for a parameter}, of a rank that has a core of its own.
    Ranks that share a core share its rates. In a pipeline the last of two stages has 3 of the 5 matmuls, and each waits
    for the other's first and last micro-batch: (m + n - 1) / m (arXiv:1811.06965).
    """
    parameters, flops = 2 * FEATURES * hidden, 5 * 2 * BATCH * FEATURES * hidden
    work, held = flops / ranks, parameters / ranks
    if strategy == "data parallel":
        held = parameters
    if strategy == "data x tensor":
        held = parameters / 2
    if strategy == "pipeline":
        work = 3 / 5 * flops * (MICRO_BATCHES + ranks - 1) / MICRO_BATCHES
    seconds = work / rates["flops"] + held * rates["update"] + sent(strategy, ranks, hidden) / rates["bytes"]
    return seconds * max(1, ranks / cores)


def crossing(xs, ones, others):
    """Where two curves cross first, linear between the points on a log scale of x; None if they do not."""
    apart = [one - other for one, other in zip(ones, others)]
    for x0, x1, before, behind in zip(xs, xs[1:], apart, apart[1:]):
        if before == 0 or before * behind < 0:
            return x0 * (x1 / x0) ** (before / (before - behind))
    return None


def fine():
    """Hidden sizes close to each other, over the range of HIDDEN."""
    steps = 400
    return [HIDDEN[0] * (HIDDEN[-1] / HIDDEN[0]) ** (k / steps) for k in range(steps + 1)]


def crossings(data, cores):
    """[(one strategy, another, {"bytes", "formula", "eager", "PyTorch": hidden size or None})] on 2 ranks."""
    names = ("data parallel", "column, then row", "pipeline")
    curves = {}
    for name in names:
        rows = [row for row in data["steps"] if row["strategy"] == name]
        curves[name] = {
            "bytes": [sent(name, 2, hidden) for hidden in fine()],
            "formula": [step_time(name, 2, hidden, data["per_rank"], cores) for hidden in fine()],
            **{side: [row["seconds"][side] for row in rows] for side in ("eager", "PyTorch")},
        }
    found = []
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            grids = {"bytes": fine(), "formula": fine(), "eager": HIDDEN, "PyTorch": HIDDEN}
            where = {kind: crossing(xs, curves[one][kind], curves[other][kind]) for kind, xs in grids.items()}
            found.append((one, other, where))
    return found
