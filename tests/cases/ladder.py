"""The proof ladder: what is asserted of a run of a recipe on all its ranks, each rung against numpy."""

import tempfile

import numpy as np

from oneflow_cookbook.measure.sbp import Layout
from tests.cases import CASES, ROOT, TRAINED, modes, proven_on, sizes_of
from tests.cases.layouts import LOCAL
from tests.cases.reference import Value

ON_RANK = ROOT / "tests" / "on_rank_recipe.py"
OBSERVE, MAIN = f"{ON_RANK}:observe", f"{ON_RANK}:main_of"
SCALE = 0.5  # of each matmul; a power of two rounds nothing, and 2.0 would make a deep gradient ill-conditioned


class Checks:
    """Assertions with a message, and how many recipes and runs were checked."""

    runs, recipes = 0, set()

    @staticmethod
    def that(holds, *what):
        if not holds:
            raise AssertionError(" ".join(str(part) for part in what))

    @classmethod
    def equal(cls, actual, expected, *what):
        cls.that(actual == expected, *what, "is", actual, "and must be", expected)

    @classmethod
    def sent(cls, sent, wanted, messages, *what):
        """Bytes are those of a formula, within 2 % and OneFlow's own messages."""
        cls.that(abs(sent - wanted) <= 0.02 * wanted + messages, *what, "sends", sent, "and must send", wanted)


def shard_of(value, sbp, ranks, rank, parts):
    """The Value of the shard that a rank must hold; None outside the placement, and where only the sum is known.

    sbp: one SBP for each axis of the placement `ranks`; parts: what each position along the axis of a P holds.
    """
    if sbp == "local":
        return parts[rank] if parts else value
    layout = Layout(sbp, ranks)
    if rank not in layout.members:
        return None
    if "P" in layout.axes or (parts and set(layout.axes) == {"B"}):
        axis = layout.axes.index("P") if "P" in layout.axes else 0
        value = parts and parts[layout.position(rank)[axis]]
    return value and value[layout.slices(value.exact.shape, rank)]


def assert_close(actual, expected, *what):
    """An array is a Value, within the rounding that float32 is allowed: nothing at all for inputs."""
    Checks.equal(actual.shape, expected.exact.shape, *what, "shape")
    excess = np.abs(actual.astype(np.float64) - expected.exact) - expected.bound
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
    for case_arguments, recipe_arguments in runs_of({**mode, **arguments}):
        case = CASES[name](n, **{"graph": graph, **case_arguments}, **facts)
        seen = pool.call(OBSERVE, path=str(path), names=list(case.layout), **recipe_arguments)
        case.draw(seen[0]["tensors"])
        check_tensors(case, seen)
        check_operations(case, graph, seen)
    first = n == proven_on(name)[0] and sizes == "even"
    if (case.matmuls or case.work) and first:  # once: what depends on a matmul does not depend on sizes
        if name in TRAINED:  # one step, as rounding grows with the scale in each
            arguments = {**arguments, "steps": 1}
        case = CASES[name](n, graph, matmul_scale=SCALE, **arguments)
        names = list(case.layout)
        scaled = pool.call(OBSERVE, path=str(path), names=names, matmul_scale=SCALE, **mode, **arguments)
        case.draw(scaled[0]["tensors"])
        check_tensors(case, scaled)


def runs_of(arguments):
    """Yields (arguments of the case, arguments of the recipe) for each run: one, or two.

    With "before" in the arguments there is an earlier run with these, from whose checkpoint the other one resumes.
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
        for tensor in case.layout:
            what = f"rank {rank}: {tensor}:"
            if tensor in result["tensors"]:
                check_tensor(case, seen, rank, tensor, what)
            elif tensor in result["arrays"] and case.layout[tensor] == LOCAL:
                by_rank = case.parts.get(tensor)
                assert_close(result["arrays"][tensor], by_rank[rank] if by_rank else case.values[tensor], what, "value")
            elif tensor in result["in_graph"]:  # where it has no value
                expected = (*case.layout[tensor], case.values[tensor].exact.shape)
                Checks.equal(result["in_graph"][tensor], expected, what, "SBP, ranks and shape")
            else:
                Checks.that(False, f"rank {rank}: there is no tensor {tensor}")
    for sentence, is_true in case.claims([{**result["arrays"], **result["tensors"]} for result in seen]).items():
        Checks.that(is_true, sentence)


def check_tensor(case, seen, rank, tensor, what):
    """A tensor on a rank: its global properties, the rank's shard, and the value."""
    actual, (sbp, ranks) = seen[rank]["tensors"][tensor], case.layout[tensor]
    expected, parts = case.values[tensor], case.parts.get(tensor)
    if sbp == "local" and parts:
        expected = parts[rank]
    Checks.equal(actual["shape"], expected.exact.shape, what, "global shape")
    Checks.equal(actual["dtype"], expected.dtype, what, "dtype")
    Checks.equal(actual["sbp"], sbp, what, "SBP")
    Checks.equal((actual["device"], actual["ranks"]), ("cpu", ranks), what, "placement")
    if np.isnan(expected.exact).all():  # drawn by OneFlow: the ranks must agree, but each may have its own local tensor
        drawn = seen[rank if sbp == "local" else 0]["tensors"][tensor]["value"]
        expected = Value(drawn, dtype=expected.dtype)
    shard = shard_of(expected, sbp, ranks, rank, parts)
    Checks.equal(actual["shard"] is not None, sbp == "local" or rank in np.array(ranks), what, "holds something")
    if shard is not None:
        Checks.equal(actual["shard"].dtype, np.dtype(expected.dtype), what, "dtype of the shard")
        assert_close(actual["shard"], shard, what, "shard")
    elif actual["shard"] is not None:  # of a P of which only the sum is known
        on_ranks = seen[min(ranks) : max(ranks) + 1]
        shards = [result["tensors"][tensor]["shard"].astype(np.float64) for result in on_ranks]
        assert_close(sum(shards), expected, what, "sum of the shards")
    differs_by_rank = sbp == "local" or (parts and set(sbp.split(", ")) == {"B"})
    assert_close(actual["value"], shard if differs_by_rank else expected, what, "value")


def check_operations(case, graph, seen):
    """Each rank multiplies its share: a layer fed by a replicated input gives the right value too.

    And a run with graph=True calls a graph, in which all its matmuls are.
    """
    for rank, result in enumerate(seen):
        what = f"rank {rank}:"
        if case.work is not None:
            check_work(case, graph, rank, result, what)
        if case.matmuls is not None:
            shapes = [[operand(case, name, rank) for name in names] for names in case.matmuls]
            Checks.equal(result["matmuls"], shapes, what, "matmuls (SBP, ranks, shape of x, w, out)")
        if case.moves is not None:
            Checks.equal(result["moves"], [list(move) for move in case.moves], what, "moves (SBP, ranks)")
        if case.sends and not any(case.sends) and "losses" not in case.values:  # a single layer
            moves = [move for move in result["moves"] if move[0][0] != "local" and move[0] != move[1]]
            Checks.equal(moves, [], what, "moves, where nothing is sent")
        if not graph:
            Checks.equal((result["graphs"], result["calls"]), ([], []), what, "graphs in eager mode")
        else:
            Checks.that(result["calls"] or case.passes == 0, what, "no call of a graph")
            for fact, wanted in (("stages", case.stages), ("recomputed", case.recomputed)):
                Checks.that(
                    wanted is None or result[fact] == wanted, what, fact, "are", result[fact], "and not", wanted
                )
        Checks.equal(result["without_identity"], [], what, "parameters that micro-batches read without identity")


def check_work(case, graph, rank, result, what):
    """The operations of a rank's matmuls are its share, and in a graph its matmuls are in one."""
    share = case.work[rank] * case.passes_in(graph)
    operations = sum(operations_of(matmul, rank) for matmul in result["matmuls"])
    is_share = abs(operations - share) < 1e-6 * (1 + share)
    Checks.that(is_share, what, operations, "operations in matmuls, its share is", share)
    # where passes are counted by hand, some may be in eager mode
    others = set(result["lazy"]) - {graph} if case.passes is None else {graph} - set(result["lazy"])
    Checks.that(share == 0 or not others, what, "a matmul is", "eager" if graph else "in a graph")


def operations_of(matmul, rank):
    """The floating-point operations of a rank in a matmul, two for each product of numbers, from its own operands."""
    sizes = []
    for sbp, ranks, shape in matmul:
        block = Layout(sbp, ranks).block(shape, rank)
        sizes.append([stop - start for start, stop in block] if block else [0])
    x, w, out = (np.prod(size, dtype=np.float64) for size in sizes)
    stacked = np.prod(sizes[1][:-2], dtype=np.float64)  # matrices of w, one for each of x
    return 2 * np.sqrt(x * w * out / stacked) if x else 0.0


def operand(case, name, rank):
    """SBP, ranks and shape of a matmul's operand on a rank; a local one may have a shape for each rank."""
    if isinstance(name, str):
        return (*case.layout[name], case.values[name].exact.shape)
    sbp, ranks, shape = name
    return (sbp, ranks, shape[rank] if isinstance(shape, list) else shape)
