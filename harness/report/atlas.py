"""The SBP atlas: every conversion and every matmul signature measured, and what each is expected to cost."""

import itertools

from harness.measure import theory
from harness.start.recipe import HARNESS

SBPS = ("B", "S(0)", "S(1)", "P")
PAIRS = list(itertools.product(SBPS, SBPS))
MODES = ("eager", "graph")
SHAPE = (480, 1080)  # 2.1 MB of float32; 2, 3 and 4 divide both sizes
SAME = {n: (list(range(n)), list(range(n))) for n in (2, 3, 4)}
DISJOINT = {2: ([0], [1]), 3: ([0], [1, 2]), 4: ([0, 1], [2, 3])}
OVERLAPPING = {3: [([0, 1], [1, 2]), ([0, 1], [0, 1, 2]), ([0, 1, 2], [0, 1])]}
MATMULS = {  # shapes of x and w
    "equal": ((720, 720), (720, 720)),
    "large x": ((2160, 720), (720, 720)),
    "large w": ((720, 720), (720, 2160)),
}

# (mode, placements, old SBP, new SBP) -> the units of the tensor that leave all ranks, in words, and why they are not
# those of the formula. p1 ranks hold the tensor before, p2 after; on the same ranks both are p.
ALL_TO_ALL = "an all-to-all from or to S(0) comes on top, where p divides both sizes; uneven splits keep to the formula"
THROUGH_B = "the graph makes the whole tensor on the target's ranks first, as S to B does, and keeps it on the first"
DEVIATIONS = {
    ("eager", "same", "S(1)", "B"): (lambda p, _: (p - 1) + (p - 1) / p, "(p-1) + (p-1)/p", ALL_TO_ALL),
    ("eager", "same", "P", "S(1)"): (lambda p, _: (p - 1) + (p - 1) / p, "(p-1) + (p-1)/p", ALL_TO_ALL),
    ("graph", "same", "S(0)", "P"): (lambda p, _: p - 1, "p-1", THROUGH_B),
    ("graph", "same", "S(1)", "P"): (lambda p, _: p - 1, "p-1", THROUGH_B),
    ("eager", "disjoint", "B", "B"): (
        lambda p1, p2: 1 + 2 * (p2 - 1),
        "1 + 2(p2-1)",
        "one rank sends it to one target as a P, and the targets add that up with zeros in an all-reduce",
    ),
    ("eager", "disjoint", "P", "B"): (lambda p1, p2: p1 * p2, "p1 p2", "every rank sends its part to every target"),
    ("eager", "disjoint", "P", "P"): (
        lambda p1, p2: 1 + 2 * (p1 - 1),
        "1 + 2(p1-1)",
        "the sum is made first, in an all-reduce, and sent to one target",
    ),
    ("graph", "disjoint", "S(0)", "P"): (lambda p1, p2: p2 if p1 > 1 else 1, "p2 (1 if p1 = 1)", THROUGH_B),
    ("graph", "disjoint", "S(1)", "P"): (lambda p1, p2: p2 if p1 > 1 else 1, "p2 (1 if p1 = 1)", THROUGH_B),
}


def kind(source, target):
    """Whether two lists of ranks are the "same", "disjoint" or "overlapping"."""
    common = set(source) & set(target)
    return "same" if source == target else "overlapping" if common else "disjoint"


def formula(source, target, old, new, shape=SHAPE):
    """What theory says that a conversion costs, in units of the tensor: a theory.Boxing."""
    one = theory.boxing(shape, theory.Layout(old, source), theory.Layout(new, target))
    whole = shape[0] * shape[1]
    by_rank = one.by_rank and {rank: sent / whole for rank, sent in one.by_rank.items()}
    return theory.Boxing(one.collective, one.total / whole, by_rank)


def deviation(mode, source, target, old, new):
    """(units, formula in words, reason) where OneFlow 0.9.0 sends something else than theory says, or None."""
    known = DEVIATIONS.get((mode, kind(source, target), old, new))
    if known is None:
        return None
    units = known[0](len(source), len(target))
    return None if abs(units - formula(source, target, old, new).total) < 1e-9 else (units, *known[1:])


def expected(mode, shape, old, new):
    """Elements that leave all ranks for a conversion between two (SBP, ranks), what OneFlow 0.9.0 adds included."""
    layouts = [theory.Layout(*old), theory.Layout(*new)]
    one = theory.boxing(shape, *layouts)
    axes = [layout.axes for layout in layouts]
    changed = [axis for axis, pair in enumerate(zip(*axes)) if pair[0] != pair[1]]
    if len(axes[0]) == len(axes[1]) == 1:
        known = DEVIATIONS.get((mode, kind(old[1], new[1]), old[0], new[0]))
        return known[0](len(old[1]), len(new[1])) * shape[0] * shape[1] if known else one.total
    if old[1] != new[1] or len(changed) != 1:
        return one.total
    [axis] = changed  # the collective runs on each line of the mesh along this axis
    known = DEVIATIONS.get((mode, "same", axes[0][axis], axes[1][axis]))
    if known is None:
        return one.total
    p = layouts[0].grid.shape[axis]
    part = [stop - start for start, stop in without(layouts[0], axis).block(shape, layouts[0].members[0])]
    return known[0](p, p) * part[0] * part[1] * layouts[0].grid.size / p


def without(layout, axis):
    """The same layout with nothing split along one axis of the mesh."""
    return theory.Layout(", ".join("B" if k == axis else sbp for k, sbp in enumerate(layout.axes)), layout.ranks)


def measured(pools):
    """Measure all of it; pools: a function from a world size to a harness.pool.Pool. Units are of the tensor.

    Returns {"conversions": {(source, target, mode): {(old, new): [units sent by each rank]}},
    "signatures": {(n, which of MATMULS, mode): {(x, w): (out, [bytes sent by each rank])}}}.
    """
    return merged(measured_on(pools(n)) for n in SAME)


def merged(parts):
    """Several results of `measured_on` as one."""
    found = {"conversions": {}, "signatures": {}}
    for part in parts:
        for what, tables in part.items():
            found[what].update(tables)
    return found


def measured_on(pool):
    """That part of `measured` that a pool of this world size can measure."""
    ledger, whole, n = str(HARNESS / "measure" / "ledger.py"), 4 * SHAPE[0] * SHAPE[1], pool.world_size
    found = {"conversions": {}, "signatures": {}}
    for mode in MODES:
        graph = mode == "graph"
        for number, (source, target) in enumerate([SAME[n], DISJOINT[n], *OVERLAPPING.get(n, [])]):
            ranks = {"source": source, "target": target}
            by_rank = pool.call(f"{ledger}:conversions", shape=SHAPE, graph=graph, **ranks)
            table = {pair: [sent[pair] / whole for sent in by_rank] for pair in PAIRS}
            found["conversions"][tuple(source), tuple(target), mode] = table
            if graph and number % 2:
                pool.close()  # frees the memory of its graphs; the next call starts it anew
        for which in {(2, "eager"): list(MATMULS), (2, "graph"): ["equal"]}.get((n, mode), []):
            x_shape, w_shape = MATMULS[which]
            by_rank = pool.call(f"{ledger}:signatures", x_shape=x_shape, w_shape=w_shape, graph=graph)
            table = {pair: (by_rank[0][pair][0], [sent[pair][1] for sent in by_rank]) for pair in PAIRS}
            found["signatures"][n, which, mode] = table
    pool.close()
    return found


# The paper's formulas in words, for the same p ranks and from p1 to p2 other ones: units of the tensor, all ranks.
SAME_RANKS = {("S", "S"): "(p-1)/p", ("S", "B"): "p-1", ("P", "S"): "p-1", ("P", "B"): "2(p-1)"}
OTHER_RANKS = {("S", "B"): "p2", ("B", "B"): "p2", ("P", "S"): "p1", ("P", "B"): "p1+p2-1", ("P", "P"): "p1"}


def formula_in_words(which, old, new):
    """The paper's formula, "same" or "disjoint"."""
    if which == "same":
        return "0" if old == new else SAME_RANKS.get((old[0], new[0]), "0")
    return OTHER_RANKS.get((old[0], new[0]), "1")
