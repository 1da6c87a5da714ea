"""The time of a training step by formula, and where two strategies cross. Imports nothing, so plots.py can use it."""

import itertools

BATCH, FEATURES, MICRO_BATCHES = 1024, 1024, 8  # of steps.sizes
HIDDEN = (256, 512, 1024, 2048, 4096)


def sent(strategy, ranks, hidden_size):
    """Bytes that each rank sends in a step of relu(x @ w0) @ w1.

    x is (BATCH, FEATURES), w0 (FEATURES, hidden_size) and w1 (hidden_size, FEATURES). The pipeline's is that of one
    boundary between two stages, one way.
    """
    weights, activations = 4 * 2 * FEATURES * hidden_size, 4 * BATCH * FEATURES
    ring = 2 * (ranks - 1) / ranks
    return {
        "data parallel": ring * weights,
        "column-row": ring * activations,
        "pipeline": 4 * BATCH * hidden_size,
        "data x tensor": (weights + activations) / 2,  # pairs: half of the weights one way, half of the batch the other
    }[strategy]


def step_time(strategy, ranks, hidden_size, rates, cores):
    """Seconds: matmuls, then the update of the weights that a rank has, then bytes; nothing overlaps.

    rates: {"flops" and "bytes" in a second, "update" seconds for a parameter}, of a rank that has a core of its own.
    Ranks that share a core share its rates. In a pipeline the last of two stages has 3 of the 5 matmuls, and each waits
    for the other's first and last micro-batch: (m + n - 1) / m (arXiv:1811.06965).
    """
    parameters, flops = 2 * FEATURES * hidden_size, 5 * 2 * BATCH * FEATURES * hidden_size
    work, held = flops / ranks, parameters / {"data parallel": 1, "data x tensor": 2}.get(strategy, ranks)
    if strategy == "pipeline":
        work = 3 / 5 * flops * (MICRO_BATCHES + ranks - 1) / MICRO_BATCHES
    seconds = work / rates["flops"] + held * rates["update"] + sent(strategy, ranks, hidden_size) / rates["bytes"]
    return seconds * max(1, ranks / cores)


def gpipe(micro_batches):
    """[[(begin, end) of what each stage does]] in a step of GPipe (arXiv:1811.06965) with two stages, in matmuls.

    A stage takes its micro-batches forward, one matmul each, and then backward: the last stage two matmuls each, the
    first one, as it needs no gradient of its input. Nothing else takes time.
    """
    first = [(k, k + 1) for k in range(micro_batches)]
    last, free = [], 0
    for _, arrives in first:
        begin = max(free, arrives)
        last.append((begin, begin + 1))
        free = begin + 1
    backward = [(free + 2 * k, free + 2 * k + 2) for k in range(micro_batches)]
    last += backward
    first += [(arrives, arrives + 1) for _, arrives in backward]
    return [first, last]


def crossing(xs, ones, others):
    """Where two curves cross first, linear between the points on a log scale of x; None if they do not."""
    apart = [one - other for one, other in zip(ones, others)]
    for x0, x1, before, behind in zip(xs, xs[1:], apart, apart[1:]):
        if before == 0 or before * behind < 0:
            return x0 * (x1 / x0) ** (before / (before - behind))
    return None


# Hidden sizes close to each other, over the range of HIDDEN.
FINE = [HIDDEN[0] * (HIDDEN[-1] / HIDDEN[0]) ** (k / 400) for k in range(401)]


def grouped(rows, *names):
    """Rows by their values of these names, in the order in which they come first."""
    found = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def crossings(data, cores):
    """[(one strategy, another, {"bytes", "formula", "eager", "PyTorch": hidden size or None})] on 2 ranks."""
    curves = {}
    for name in ("data parallel", "column-row", "pipeline"):
        rows = [row for row in data["steps"] if row["strategy"] == name]
        curves[name] = {
            "bytes": (FINE, [sent(name, 2, hidden_size) for hidden_size in FINE]),
            "formula": (FINE, [step_time(name, 2, hidden_size, data["per_rank"], cores) for hidden_size in FINE]),
            **{side: (HIDDEN, [row["seconds"][side] for row in rows]) for side in ("eager", "PyTorch")},
        }
    return [
        (one, other, {kind: crossing(xs, ys, curves[other][kind][1]) for kind, (xs, ys) in curves[one].items()})
        for one, other in itertools.combinations(curves, 2)
    ]
