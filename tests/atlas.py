"""What OneFlow 0.9.0 sends for each conversion between two SBPs and for each matmul, where formulas do not say it."""

import itertools

import numpy as np

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.sbp import NAMES, Layout
from tests.cases.measuring import MODES

PAIRS = list(itertools.product(NAMES, NAMES))
SHAPE = (480, 1080)  # 2.1 MB of float32; 2, 3 and 4 divide both sizes
WHOLE = 4 * SHAPE[0] * SHAPE[1]  # bytes
SAME = {n: (list(range(n)), list(range(n))) for n in (2, 3, 4)}
DISJOINT = {2: ([0], [1]), 3: ([0], [1, 2]), 4: ([0, 1], [2, 3])}
MATMULS = {  # shapes of x and w
    "equal": ((720, 720), (720, 720)),
    "large x": ((2160, 720), (720, 720)),
    "large w": ((720, 720), (720, 2160)),
}
ON_RANK = "oneflow_cookbook.explore.matmul_on_rank"
# Where OneFlow 0.9.0 does not follow the formula: (mode, placements, old SBP, new SBP) -> what all ranks send, in units
# of the tensor, and the same as text. p1 ranks hold the tensor before, p2 after. docs/sbp-atlas.md gives the reasons.
ALL_TO_ALL = lambda p, _: (p - 1) + (p - 1) / p, "(p-1) + (p-1)/p"
DEVIATIONS = {
    ("eager", "same", "S(1)", "B"): ALL_TO_ALL,
    ("eager", "same", "P", "S(1)"): ALL_TO_ALL,
    **{("graph", "same", split, "P"): (lambda p, _: p - 1, "p-1") for split in ("S(0)", "S(1)")},
    ("eager", "disjoint", "B", "B"): (lambda p1, p2: 1 + 2 * (p2 - 1), "1 + 2(p2-1)"),
    ("eager", "disjoint", "P", "B"): (lambda p1, p2: p1 * p2, "p1 p2"),
    ("eager", "disjoint", "P", "P"): (lambda p1, p2: 1 + 2 * (p1 - 1), "1 + 2(p1-1)"),
    **{
        ("graph", "disjoint", split, "P"): (lambda p1, p2: p2 if p1 > 1 else 1, "p2 (1 if p1 = 1)")
        for split in ("S(0)", "S(1)")
    },
}
# The paper's formulas as text, for all ranks together, from p1 ranks to p2 other ranks; for all other pairs 1.
OTHER_RANKS = {("S", "B"): "p2", ("B", "B"): "p2", ("P", "S"): "p1", ("P", "B"): "p1+p2-1", ("P", "P"): "p1"}


def kind(source, target):
    """Whether two lists of ranks are the "same", "disjoint" or "overlapping"."""
    if source == target:
        return "same"
    return "overlapping" if set(source) & set(target) else "disjoint"


def formula(source, target, old, new, shape=SHAPE):
    """The theory.Boxing of a conversion, in units of the tensor."""
    return theory.Boxing(shape, (old, source), (new, target), item=1 / np.prod(shape))


def expected(mode, shape, old, new):
    """Elements that all ranks send for a conversion between two (SBP, ranks) in OneFlow 0.9.0."""
    lines = theory.lines(shape, Layout(*old), Layout(*new))
    for _, before, after in lines[:1]:  # all lines have the same SBPs
        deviation = DEVIATIONS.get((mode, kind(before.ranks, after.ranks), before.sbp, after.sbp))
        if deviation:
            return sum(deviation[0](len(a.ranks), len(b.ranks)) * float(np.prod(part)) for part, a, b in lines)
    return theory.Boxing(shape, old, new).total


def measured_on(pool):
    """Measure all conversions and matmuls on the ranks of a Pool.

    Returns {("conversions", source, target, mode): {(old, new): [multiple of the tensor that each rank sent]},
    ("signatures", n, which of MATMULS, mode): {(x, w): (out, [bytes sent by each rank])}}.
    """
    n, tables = pool.world_size, {}
    for mode in MODES:
        graph = mode == "graph"
        for source, target in (SAME[n], DISJOINT[n]):
            ranks = {"source": source, "target": target}
            by_rank = pool.call(f"{ON_RANK}:conversions", shape=SHAPE, graph=graph, **ranks)
            table = {pair: [sent[pair] / WHOLE for sent in by_rank] for pair in PAIRS}
            tables["conversions", tuple(source), tuple(target), mode] = table
        if graph:
            pool.close()  # frees the memory of its graphs; the next call starts new ranks
        for which in {(2, "eager"): list(MATMULS), (2, "graph"): ["equal"]}.get((n, mode), []):
            ranks = list(range(n))
            by_rank = pool.call(f"{ON_RANK}:bytes_sent", pairs=PAIRS, ranks=ranks, shapes=MATMULS[which], graph=graph)
            table = {pair: (by_rank[0][pair][0], [sent[pair][1] for sent in by_rank]) for pair in PAIRS}
            tables["signatures", n, which, mode] = table
    pool.close()
    return tables
