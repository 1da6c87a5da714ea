"""Measure every conversion between two SBPs and every matmul signature, with the bytes by the formulas."""

import itertools

import numpy as np

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.sbp import NAMES, Layout

PAIRS = list(itertools.product(NAMES, NAMES))
MODES = ("eager", "graph")
SHAPE = (480, 1080)  # 2.1 MB of float32; 2, 3 and 4 divide both sizes
SAME = {n: (list(range(n)), list(range(n))) for n in (2, 3, 4)}
DISJOINT = {2: ([0], [1]), 3: ([0], [1, 2]), 4: ([0, 1], [2, 3])}
MATMULS = {  # shapes of x and w
    "equal": ((720, 720), (720, 720)),
    "large x": ((2160, 720), (720, 720)),
    "large w": ((720, 720), (720, 2160)),
}

# Where OneFlow 0.9.0 does not follow the formula: (mode, placements, old SBP, new SBP) -> what all ranks send, in
# units of the tensor, the same as text, and the reason. p1 ranks hold the tensor before, p2 after.
ALL_TO_ALL = (
    "Each rank sends (p-1)/p + (p-1)/p². The second part is an extra all-to-all between S(1) and S(0). It is left out"
    " unless p divides both dimensions."
)
GATHERS = (
    "Each rank sends (p-1)/p. The graph gathers the whole tensor on every rank, as S → B does. The first rank keeps it"
    " as its part of the sum, and the others keep zeros."
)
SENDS_WHOLE = (
    "Each old rank sends its block to every new rank, as S → B does: p2/p1. From a single old rank, one copy is sent."
)
B_TO_B = (
    "One old rank sends the tensor to one new rank. Then all new ranks add it to zeros in an all-reduce, for which each"
    " sends 2(p2-1)/p2."
)
P_TO_P = "The old ranks add their parts first, in an all-reduce: each sends 2(p1-1)/p1. One of them then sends the sum."
DEVIATIONS = {
    **dict.fromkeys(
        [("eager", "same", "S(1)", "B"), ("eager", "same", "P", "S(1)")],
        (lambda p, _: (p - 1) + (p - 1) / p, "(p-1) + (p-1)/p", ALL_TO_ALL),
    ),
    **{("graph", "same", split, "P"): (lambda p, _: p - 1, "p-1", GATHERS) for split in ("S(0)", "S(1)")},
    ("eager", "disjoint", "B", "B"): (lambda p1, p2: 1 + 2 * (p2 - 1), "1 + 2(p2-1)", B_TO_B),
    ("eager", "disjoint", "P", "B"): (
        lambda p1, p2: p1 * p2,
        "p1 p2",
        "Each old rank sends its part of the sum to every new rank: p2.",
    ),
    ("eager", "disjoint", "P", "P"): (lambda p1, p2: 1 + 2 * (p1 - 1), "1 + 2(p1-1)", P_TO_P),
    **dict.fromkeys(
        [("graph", "disjoint", "S(0)", "P"), ("graph", "disjoint", "S(1)", "P")],
        (lambda p1, p2: p2 if p1 > 1 else 1, "p2 (1 if p1 = 1)", SENDS_WHOLE),
    ),
}
# The paper's formulas as text, for all ranks together: on the same p ranks, and from p1 ranks to p2 other ranks.
SAME_RANKS = {("S", "S"): "(p-1)/p", ("S", "B"): "p-1", ("P", "S"): "p-1", ("P", "B"): "2(p-1)"}
OTHER_RANKS = {("S", "B"): "p2", ("B", "B"): "p2", ("P", "S"): "p1", ("P", "B"): "p1+p2-1", ("P", "P"): "p1"}
# The same for each rank; from p1 to p2 ranks: of each old rank, of each new rank. Any old rank can send a B.
EACH_SENDS = {("S", "S"): "(p-1)/p²", ("S", "B"): "(p-1)/p", ("P", "S"): "(p-1)/p", ("P", "B"): "2(p-1)/p"}
EACH_TO_OTHERS = {
    ("B", "B"): ("p2/p1 on average", "0"),
    ("B", "S"): ("1/p1 on average", "0"),
    ("B", "P"): ("1/p1 on average", "0"),
    ("S", "B"): ("p2/p1", "0"),
    ("P", "S"): ("1", "0"),
    ("P", "P"): ("1", "0"),
    ("P", "B"): ("1", "(p2-1)/p2"),
}


def kind(source, target):
    """Whether two lists of ranks are the "same", "disjoint" or "overlapping"."""
    if source == target:
        return "same"
    return "overlapping" if set(source) & set(target) else "disjoint"


def formula(source, target, old, new, shape=SHAPE):
    """The theory.Boxing of a conversion, in units of the tensor."""
    return theory.Boxing(shape, (old, source), (new, target), item=1 / np.prod(shape))


def formula_in_words(which, old, new):
    """The paper's formula for "same" or "disjoint" ranks."""
    if which == "same":
        return "0" if old == new else SAME_RANKS.get((old[0], new[0]), "0")
    return OTHER_RANKS.get((old[0], new[0]), "1")


def sent_by_each(old, new):
    """The bytes of each rank by the formula, as text, on the same p ranks."""
    return "0" if old == new else EACH_SENDS.get((old[0], new[0]), "0")


def sent_to_others(old, new):
    """(bytes of each old rank, bytes of each new rank) by the formula, as text, for disjoint ranks."""
    return EACH_TO_OTHERS.get((old[0], new[0]), ("1/p1", "0"))


def expected(mode, shape, old, new):
    """Elements that all ranks send for a conversion between two (SBP, ranks) in OneFlow 0.9.0."""
    lines = theory.lines(shape, Layout(*old), Layout(*new))
    for _, before, after in lines[:1]:  # all lines have the same SBPs
        deviation = DEVIATIONS.get((mode, kind(before.ranks, after.ranks), before.sbp, after.sbp))
        if deviation:
            return sum(deviation[0](len(a.ranks), len(b.ranks)) * float(np.prod(part)) for part, a, b in lines)
    return theory.Boxing(shape, old, new).total


def measured_on(pool):
    """Measure all conversions and signatures on the ranks of a harness.pool.Pool.

    Returns {("conversions", source, target, mode): {(old, new): [multiple of the tensor that each rank sent]},
    ("signatures", n, which of MATMULS, mode): {(x, w): (out, [bytes sent by each rank])}}.
    """
    functions, n, tables = "oneflow_cookbook.measure.conversions", pool.world_size, {}
    for mode in MODES:
        for number, (source, target) in enumerate([SAME[n], DISJOINT[n]]):
            ranks = {"source": source, "target": target}
            by_rank = pool.call(f"{functions}:conversions", shape=SHAPE, graph=mode == "graph", **ranks)
            table = {pair: [sent[pair] / (4 * np.prod(SHAPE)) for sent in by_rank] for pair in PAIRS}
            tables["conversions", tuple(source), tuple(target), mode] = table
            if mode == "graph" and number % 2:
                pool.close()  # frees the memory of its graphs; the next call starts new ranks
        for which in {(2, "eager"): list(MATMULS), (2, "graph"): ["equal"]}.get((n, mode), []):
            shapes = dict(zip(("x_shape", "w_shape"), MATMULS[which]))
            by_rank = pool.call(f"{functions}:signatures", graph=mode == "graph", **shapes)
            table = {pair: (by_rank[0][pair][0], [sent[pair][1] for sent in by_rank]) for pair in PAIRS}
            tables["signatures", n, which, mode] = table
    pool.close()
    return tables
