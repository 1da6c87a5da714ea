"""The proof ladder: what is asserted of one run of a recipe on all its ranks, each rung against numpy."""

import inspect

import numpy as np

from harness.start.recipe import entry, world_sizes
from tests import reference
from tests.cases import CASES, PROVEN, ROOT, sizes_of
from tests.reference import Value

OBSERVE = f"{ROOT / 'harness' / 'measure' / 'observe.py'}:observe"
WIDEST = 0.03  # of the largest number of a tensor: a bound on rounding that is wider proves nothing
GAIN = 2.0  # a power of two, so that scaling a matmul by it rounds nothing


class Checks:
    """Assertions that count themselves, so that the suite can say how many it made."""

    count = 0

    @classmethod
    def that(cls, holds, *what):
        cls.count += 1
        if not holds:
            raise AssertionError(" ".join(str(part) for part in what))

    @classmethod
    def equal(cls, found, wanted, *what):
        cls.that(found == wanted, *what, "is", found, "and must be", wanted)


def shard_of(value, sbp, ranks, rank, parts):
    """The Value of the shard that a rank must hold; None outside the placement, and where only the sum is known.

    sbp: one SBP for each axis of the placement `ranks`; parts: what each position along the axis of a P holds.
    """
    if sbp == "local":
        return parts[rank] if parts else value
    where = np.argwhere(np.array(ranks) == rank)
    if not len(where):
        return None
    axes = sbp.split(", ")
    if "P" in axes or (parts and set(axes) == {"B"}):
        value = parts and parts[where[0][axes.index("P") if "P" in axes else 0]]
    for one, position, n in zip(axes, where[0], np.shape(ranks)):
        if one.startswith("S"):
            value = value[reference.split(value.exact.shape, int(one[2:-1]), position, n)]
    return value


def close(found, wanted, factor, *what):
    """Within the rounding that float32 is allowed: nothing at all for inputs."""
    Checks.equal(found.shape, wanted.exact.shape, *what, "shape")
    excess = np.abs(found.astype(np.float64) - factor * wanted.exact) - factor * wanted.bound
    Checks.that((excess <= 0).all(), *what, "differs from numpy by", excess.max(), "more than rounding allows")


def climb(pool, path, name, graph, sizes, **facts):
    """Run the recipe at `path` as the case `name` in a pool and climb all rungs; AssertionError or PoolError if not.

    facts: what else the case is to know, such as the number of nodes.
    """
    n = pool.world_size
    arguments = sizes_of(name, n)[sizes]
    case = CASES[name](n, **arguments, **facts)
    mode = {"graph": graph} if "graph" in entry(path) else {}
    seen = pool.call(OBSERVE, path=str(path), **mode, **arguments)
    check_tensors(case, graph, seen)
    check_operations(case, graph, seen)
    first = next(size for size in PROVEN if size in world_sizes(path))
    if case.matmuls and (n, sizes) == (first, "even"):  # it does not depend on sizes what depends on what
        if "steps" in entry(path):  # one, as rounding grows with the gain in each
            arguments = {**arguments, "steps": 1}
        scaled = pool.call(OBSERVE, path=str(path), gain=GAIN, **mode, **arguments)
        if case.steps or "gain" in inspect.signature(CASES[name]).parameters:
            check_tensors(CASES[name](n, gain=GAIN, **arguments), graph, scaled)
        else:
            check_dependence(case, scaled)
    return seen


def check_tensors(case, graph, seen):
    for rank, result in enumerate(seen):
        Checks.equal(list(result["tensors"]), list(case.layout_in(graph)), f"rank {rank}: names of the tensors")
        for tensor, (sbp, ranks) in case.layout_in(graph).items():
            found, what = result["tensors"][tensor], (f"rank {rank}: {tensor}:",)
            wanted, parts = case.values[tensor], case.parts.get((tensor, graph), case.parts.get(tensor))
            if sbp == "local" and parts:
                wanted = parts[rank]
            Checks.equal(found["shape"], wanted.exact.shape, *what, "global shape")
            dtype = case.dtypes.get(tensor, "float32")
            Checks.equal(found["dtype"], dtype, *what, "dtype")
            Checks.equal(found["sbp"], sbp, *what, "SBP")
            Checks.equal((found["device"], found["ranks"]), ("cpu", ranks), *what, "placement")
            if np.isnan(wanted.exact).all():  # drawn by OneFlow: the ranks must agree, but each may have its own local
                wanted = Value.known((result if sbp == "local" else seen[0])["tensors"][tensor]["value"])
            Checks.that((wanted.bound <= WIDEST * np.abs(wanted.exact).max(initial=0)).all(), *what, "bound too wide")
            shard = shard_of(wanted, sbp, ranks, rank, parts)
            Checks.equal(
                found["shard"] is not None, sbp == "local" or rank in np.array(ranks), *what, "holds something"
            )
            if shard is not None:
                Checks.equal(found["shard"].dtype, np.dtype(dtype), *what, "dtype of the shard")
                close(found["shard"], shard, 1, *what, "shard")
            elif found["shard"] is not None:
                total = sum(
                    one["tensors"][tensor]["shard"].astype(np.float64) for one in seen[min(ranks) : max(ranks) + 1]
                )
                close(total, Value(wanted.exact, len(ranks) * wanted.bound), 1, *what, "sum of the ranks' shards")
            own = sbp == "local" or (parts and set(sbp.split(", ")) == {"B"})
            close(found["value"], shard if own else wanted, 1, *what, "value")
    for words, holds in case.claims.items():
        Checks.that(holds([result["tensors"] for result in seen]), words)


def check_operations(case, graph, seen):
    """The ranks multiplied what they should: a layer fed by a replicated input gives the right value too."""
    for rank, result in enumerate(seen):
        models = case.matmuls if case.models > 1 else [case.matmuls] * case.models
        times = 1 if graph else (case.steps or 1) * case.passes
        matmuls = [one for own in models for one in (own + ([] if graph else case.matmuls_again)) * times]
        shapes = [[operand(case, name, rank) for name in names] for names in matmuls]
        Checks.equal(result["matmuls"], shapes, f"rank {rank}: matmuls (SBP, ranks, shape of x, w, out)")
        Checks.equal(result["lazy"], [graph] * len(shapes), f"rank {rank}: matmuls run inside a graph")
        moves = all_moves(case, graph)
        Checks.equal(result["moves"], moves, f"rank {rank}: moves (SBP, ranks before and after)")
        Checks.equal(
            len(result["calls"]), case.models * (case.steps or 1) * graph, f"rank {rank}: number of calls of a graph"
        )
        Checks.equal(result["stages"], case.stages if graph else [], f"rank {rank}: stages of the graph")
        Checks.equal(result["bare"], [], f"rank {rank}: parameters that micro-batches read without identity")


def operand(case, name, rank):
    """SBP, ranks and shape of a matmul's operand on a rank; one that ends in .T is that tensor, transposed.

    An operand that the recipe does not return is no name but (SBP, ranks, shape) itself; of a local one that differs
    between ranks it has a list of shapes.
    """
    if isinstance(name, tuple):
        sbp, ranks, shape = name
        return (sbp, ranks, shape[rank] if isinstance(shape, list) else shape)
    tensor, transposed = name.replace(".T", ""), name.endswith(".T")
    sbp, ranks = case.layout[tensor]
    shape = (case.parts[tensor][rank] if sbp == "local" and tensor in case.parts else case.values[tensor]).exact.shape
    if transposed:
        sbp, shape = sbp.translate({ord("0"): "1", ord("1"): "0"}), shape[::-1]
    return (sbp, ranks, shape)


def all_moves(case, graph):
    """Every to_global of a run, in order; those inside a graph come once, when it is built."""
    if case.all_moves:
        return [list(move) for move in case.all_moves[graph]]
    once, steps = moves_of(case, graph), case.steps or 1
    others = (case.moves_before, case.moves_each_step, case.moves_after)
    before, each, after = ([list(move) for move in moves] for moves in others)
    return before + (once + each * steps if graph else (once * case.passes + each) * steps) + after


def moves_of(case, graph):
    """In a graph, set_stage moves a stage's input to the stage's ranks before the module's own to_global sees it."""
    if graph and case.moves_in_graph is not None:
        return [list(move) for move in case.moves_in_graph]
    if not (graph and case.stages):
        return [list(move) for move in case.moves]
    through = [((sbp, ranks), (sbp, new_ranks), new) for (sbp, ranks), new in case.moves for new_ranks in [new[1]]]
    return [list(move) for before, between, after in through for move in ((before, between), (between, after))]


def check_dependence(case, seen):
    """With every matmul scaled by GAIN, each output must be scaled by it once for every matmul before it."""
    power = {}
    products = {out: (x.replace(".T", ""), w) for x, w, out in case.matmuls}
    for tensor in case.layout:  # in the order of execution, so that what a tensor comes from is known
        if tensor in products:
            power[tensor] = 1 + sum(power[operand] for operand in products[tensor])
        else:
            power[tensor] = power.get(case.moved.get(tensor), 0)
    for rank, result in enumerate(seen):
        for tensor in case.layout:
            found, factor = result["tensors"][tensor]["value"], GAIN ** power[tensor]
            close(found, case.values[tensor], factor, f"rank {rank}: {tensor} at gain {GAIN}")
