"""One rank of a recipe, timed step by step: what pool.call runs."""

import time

import oneflow as flow

from harness import recipe
from harness.observe import kept, replaced


def step_times(path, **arguments):
    """The seconds of each step but the first and the last of a training recipe's own loop, on this rank."""
    module = recipe.load(path)
    kept.append(module)
    begins = []

    def timed(function):
        def begin(*given, **named):
            flow._oneflow_internal.eager.Sync()
            begins.append(time.perf_counter())
            return function(*given, **named)

        return begin

    places = [(flow.nn.Graph, "__call__")] if arguments.get("graph") else [(flow.optim.Optimizer, "zero_grad")]
    with replaced({place: timed(getattr(*place)) for place in places}):
        tensors = module.run(**arguments)
        flow._oneflow_internal.eager.Sync()
    if arguments.get("graph"):
        kept.append((vars(module.run).copy(), tensors))
    return [end - begin for begin, end in zip(begins[1:], begins[2:])]


SBPS = {"P": flow.sbp.partial_sum, "B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1)}


def move_times(old, new, elements, steps):
    """The seconds of each to_global from one SBP to another but the first, on all ranks, of a square-like tensor."""
    ranks = flow.placement.all("cpu")
    x = flow.ones(64, elements // 64, placement=ranks, sbp=SBPS[old])
    ends = []
    for _ in range(steps):
        x.to_global(sbp=SBPS[new]).to_local()
        flow._oneflow_internal.eager.Sync()
        ends.append(time.perf_counter())
    return [end - begin for begin, end in zip(ends, ends[1:])]


def gemm_times(shapes, steps):
    """The seconds that the matmuls of these shapes, (rows, inner, columns), take this rank alone, one after another."""
    pairs = [(flow.ones(rows, inner), flow.ones(inner, columns)) for rows, inner, columns in shapes]
    ends = []
    for _ in range(steps):
        for x, w in pairs:
            flow.matmul(x, w)
        flow._oneflow_internal.eager.Sync()
        ends.append(time.perf_counter())
    return [end - begin for begin, end in zip(ends, ends[1:])]
