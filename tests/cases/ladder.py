"""The proof ladder: what is asserted of one run of a recipe on all its ranks, each rung against numpy."""

import tempfile

import numpy as np

from tests.cases import CASES, ROOT, TRAINED, modes, proven_on, reference, sizes_of
from tests.cases.reference import Value

OBSERVE = f"{ROOT / 'harness' / 'measure' / 'observe.py'}:observe"
MAIN = f"{ROOT / 'harness' / 'measure' / 'main.py'}:main_of"
SCALE = 0.5  # of each matmul; a power of two rounds nothing, and 2.0 would make a deep gradient ill-conditioned


class Checks:
    """Assertions with a message, and how many recipes and runs were checked."""

    runs, recipes = 0, set()

    @staticmethod
    def that(holds, *what):
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


def assert_close(found, wanted, *what):
    """Within the rounding that float32 is allowed: nothing at all for inputs."""
    Checks.equal(found.shape, wanted.exact.shape, *what, "shape")
    excess = np.abs(found.astype(np.float64) - wanted.exact) - wanted.bound
    Checks.that((excess <= 0).all(), *what, "differs from numpy by", excess.max(), "more than rounding allows")


def check_recipe(pool, path, name, graph, sizes, **facts):
    """Run the recipe at `path` in a pool and check it against the case `name`; AssertionError or PoolError if it fails.

    sizes: a name of `sizes_of`; facts: what else the case must know, such as the number of nodes.
    """
    Checks.runs += 1
    Checks.recipes.add(name)
    n = pool.world_size
    arguments = sizes_of(name, n)[sizes]
    mode = {"graph": graph} if len(modes(name)) == 2 else {}
    for of_case, of_recipe in runs_of({**mode, **arguments}):
        case = CASES[name](n, **{"graph": graph, **of_case}, **facts)
        seen = pool.call(OBSERVE, path=str(path), names=list(case.layout), **of_recipe)
        case.draw(seen[0]["tensors"])
        check_tensors(case, seen)
        check_operations(case, graph, seen)
    if case.matmuls and (n, sizes) == (proven_on(name)[0], "even"):  # what depends on a matmul does not depend on sizes
        if name in TRAINED:  # one, as rounding grows with the scale in each
            arguments = {**arguments, "steps": 1}
        case = CASES[name](n, graph, matmul_scale=SCALE, **arguments)
        names = list(case.layout)
        scaled = pool.call(OBSERVE, path=str(path), names=names, matmul_scale=SCALE, **mode, **arguments)
        case.draw(scaled[0]["tensors"])
        check_tensors(case, scaled)
    return seen


def runs_of(arguments):
    """Yields (arguments of its case, arguments of the recipe) for each run: one, or two.

    With "before" in the arguments the first run has those in it as well, and the second resumes from its checkpoint.
    """
    if "before" not in arguments:
        yield arguments, arguments
        return
    arguments = dict(arguments)
    before = arguments.pop("before")
    with tempfile.TemporaryDirectory() as folder:
        arguments["checkpoint_dir"] = folder
        first = {**arguments, **before}
        yield first, first
        yield {**arguments, "before": before}, arguments


def check_tensors(case, seen):
    """Names, shapes, dtypes, SBP, placements, shards and values on every rank, and the claims of the case."""
    for rank, result in enumerate(seen):
        for tensor, (sbp, ranks) in case.layout.items():
            is_number = sbp == "local" or tensor in case.numbers or tensor.endswith("losses")
            if is_number and tensor in result["arrays"] and tensor not in result["tensors"]:
                wanted = case.parts[tensor][rank] if tensor in case.parts else case.values[tensor]
                assert_close(result["arrays"][tensor], wanted, f"rank {rank}: {tensor}: value")
                continue
            if tensor in result["in_graph"] and tensor not in result["tensors"]:
                look = (sbp, ranks, case.values[tensor].exact.shape)
                Checks.equal(result["in_graph"][tensor], look, f"rank {rank}: {tensor}: SBP, ranks and shape")
                continue
            Checks.that(tensor in result["tensors"], f"rank {rank}: there is no tensor {tensor}")
            found, what = result["tensors"][tensor], (f"rank {rank}: {tensor}:",)
            wanted, parts = case.values[tensor], case.parts.get(tensor)
            if sbp == "local" and parts:
                wanted = parts[rank]
            Checks.equal(found["shape"], wanted.exact.shape, *what, "global shape")
            Checks.equal(found["dtype"], wanted.dtype, *what, "dtype")
            Checks.equal(found["sbp"], sbp, *what, "SBP")
            Checks.equal((found["device"], found["ranks"]), ("cpu", ranks), *what, "placement")
            if np.isnan(wanted.exact).all():  # drawn by OneFlow: the ranks must agree, but each may have its own local
                drawn = (result if sbp == "local" else seen[0])["tensors"][tensor]["value"]
                wanted = Value(drawn, dtype=wanted.dtype)
            shard = shard_of(wanted, sbp, ranks, rank, parts)
            holds = sbp == "local" or rank in np.array(ranks)
            Checks.equal(found["shard"] is not None, holds, *what, "holds something")
            if shard is not None:
                Checks.equal(found["shard"].dtype, np.dtype(wanted.dtype), *what, "dtype of the shard")
                assert_close(found["shard"], shard, *what, "shard")
            elif found["shard"] is not None:
                own = [one["tensors"][tensor]["shard"].astype(np.float64) for one in seen[min(ranks) : max(ranks) + 1]]
                assert_close(sum(own), wanted, *what, "sum of the shards")
            differs = sbp == "local" or (parts and set(sbp.split(", ")) == {"B"})
            assert_close(found["value"], shard if differs else wanted, *what, "value")
    for words, holds in case.claims([{**result["arrays"], **result["tensors"]} for result in seen]).items():
        Checks.that(holds, words)


def check_operations(case, graph, seen):
    """The ranks multiplied and moved what they should: a layer fed by a replicated input gives the right value too."""
    for rank, result in enumerate(seen):
        shapes = [[operand(case, name, rank) for name in names] for names in case.matmuls]
        Checks.equal(result["matmuls"], shapes, f"rank {rank}: matmuls (SBP, ranks, shape of x, w, out)")
        Checks.equal(result["lazy"], case.lazy or [graph] * len(shapes), f"rank {rank}: matmuls run inside a graph")
        moves = [list(move) for move in case.moves]
        Checks.equal(result["moves"], moves, f"rank {rank}: moves (SBP, ranks before and after)")
        Checks.equal(result["reads"], case.reads, f"rank {rank}: values read (SBP, ranks)")
        Checks.equal(len(result["calls"]), case.graph_calls * graph, f"rank {rank}: number of calls of a graph")
        if graph:  # else a recipe may make the graph all the same, and does not call it
            Checks.equal(result["stages"], case.stages, f"rank {rank}: stages of the graph")
            Checks.equal(result["recomputed"], case.recomputed, f"rank {rank}: ops computed again in backward")
        Checks.equal(
            result["without_identity"], [], f"rank {rank}: parameters that micro-batches read without identity"
        )


def operand(case, name, rank):
    """SBP, ranks and shape of a matmul's operand on a rank; a local one may have a shape for each rank."""
    if isinstance(name, str):
        return (*case.layout[name], case.values[name].exact.shape)
    sbp, ranks, shape = name
    return (sbp, ranks, shape[rank] if isinstance(shape, list) else shape)
