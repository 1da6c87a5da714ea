"""The proof ladder: what is asserted of one run of a recipe on all its ranks, each rung against numpy."""

import numpy as np

from tests import reference
from tests.cases import CASES, ROOT, SIZES

OBSERVE = f"{ROOT / 'harness' / 'observe.py'}:observe"
BYTES_SENT = OBSERVE.replace(":observe", ":bytes_sent")
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
    """The Value of the shard that a rank must hold, or None outside the placement."""
    if sbp == "local":
        return value
    if rank not in ranks:
        return None
    if sbp == "P":
        return parts[ranks.index(rank)]
    if sbp == "B":
        return value
    return value[reference.split(value.exact.shape, int(sbp[2:-1]), ranks.index(rank), len(ranks))]


def close(found, wanted, factor, *what):
    """Within the rounding that float32 is allowed: nothing at all for inputs."""
    Checks.equal(found.shape, wanted.exact.shape, *what, "shape")
    excess = np.abs(found.astype(np.float64) - factor * wanted.exact) - factor * wanted.bound
    Checks.that((excess <= 0).all(), *what, "differs from numpy by", excess.max(), "more than rounding allows")


def climb(pool, path, name, graph, sizes):
    """Run the recipe at `path` as the case `name` in a pool and climb all rungs; AssertionError or PoolError if not."""
    n, uneven, sizes = pool.world_size, sizes != "even", SIZES[sizes]
    case = CASES[name](n)
    values, parts = case.values(n, **sizes)
    seen = pool.call(OBSERVE, path=str(path), graph=graph, **sizes)
    check_tensors(case, values, parts, seen)
    check_operations(case, values, graph, seen)
    if uneven:
        return seen  # what the output depends on does not depend on the sizes
    check_dependence(case, values, pool.call(OBSERVE, path=str(path), graph=graph, gain=GAIN, **sizes))
    return seen


def check_tensors(case, values, parts, seen):
    for rank, result in enumerate(seen):
        Checks.equal(list(result["tensors"]), list(case.layout), f"rank {rank}: names of the tensors")
        for tensor, (sbp, ranks) in case.layout.items():
            found, what = result["tensors"][tensor], (f"rank {rank}: {tensor}:",)
            Checks.equal(found["shape"], values[tensor].exact.shape, *what, "global shape")
            Checks.equal(found["dtype"], "float32", *what, "dtype")
            Checks.equal(found["sbp"], sbp, *what, "SBP")
            Checks.equal((found["device"], found["ranks"]), ("cpu", ranks), *what, "placement")
            shard = shard_of(values[tensor], sbp, ranks, rank, parts.get(tensor))
            Checks.equal(found["shard"] is None, shard is None, *what, "holds nothing")
            if shard is not None:
                Checks.equal(found["shard"].dtype, np.dtype("float32"), *what, "dtype of the shard")
                close(found["shard"], shard, 1, *what, "shard")
            close(found["value"], values[tensor], 1, *what, "value")


def check_operations(case, values, graph, seen):
    """The ranks multiplied what they should: a layer fed by a replicated input gives the right value too."""
    for rank, result in enumerate(seen):
        wanted = [[(*case.layout[t], values[t].exact.shape) for t in names] for names in case.matmuls]
        Checks.equal(result["matmuls"], wanted, f"rank {rank}: matmuls (SBP, ranks, shape of x, w, out)")
        Checks.equal(result["lazy"], [graph] * len(wanted), f"rank {rank}: matmuls run inside a graph")
        Checks.equal(result["moves"], moves_of(case, graph), f"rank {rank}: moves (SBP, ranks before and after)")
        Checks.equal(result["stages"], case.stages if graph else [], f"rank {rank}: stages of the graph")


def moves_of(case, graph):
    """In a graph, set_stage moves a stage's input to the stage's ranks before the module's own to_global sees it."""
    if not (graph and case.stages):
        return [list(move) for move in case.moves]
    through = [((sbp, ranks), (sbp, new_ranks), new) for (sbp, ranks), new in case.moves for new_ranks in [new[1]]]
    return [list(move) for before, between, after in through for move in ((before, between), (between, after))]


def check_dependence(case, values, seen):
    """With every matmul scaled by GAIN, each output must be scaled by it once for every matmul before it."""
    power = {}
    for x, _, out in case.matmuls:
        power[out] = power.get(x, 0) + 1
        following = list(case.layout)[list(case.layout).index(out) + 1 :][:1]
        if following and following[0] not in power:  # the next tensor is this one, moved: x1 = out0, out = partial
            power[following[0]] = power[out]
    for rank, result in enumerate(seen):
        for tensor in case.layout:
            factor = GAIN ** power.get(tensor, 0)
            close(result["tensors"][tensor]["value"], values[tensor], factor, f"rank {rank}: {tensor} at gain {GAIN}")
