"""Functions that bench.py calls on the ranks of a pool: steps of a recipe, collectives. Times: seconds on this rank."""

import time
from contextlib import ExitStack
from unittest import mock

import oneflow as flow

from harness.measure.calls import watching
from harness.measure.entry import call_entry
from harness.measure.sbp import sbp_of
from harness.start import recipe


def wait():
    """Wait until this rank has finished its work."""
    flow._oneflow_internal.eager.Sync()


def train(path, arguments):
    """Run a training recipe; returns (times of its steps but the first and the last, its result)."""
    begins = []

    def begin_step(call):
        wait()
        begins.append(time.perf_counter())
        return call.proceed()

    with watching(begin_step, ["graph" if arguments.get("graph") else "zero_grad"]):
        result = call_entry(recipe.load(path), arguments)
        wait()
    return differences(begins[1:]), result


def losses_and_times(path, **arguments):
    """Train a recipe: {"losses", "seconds" of its steps but the first and the last}."""
    times, (_, losses) = train(path, arguments)
    return {"losses": [float(loss) for loss in losses], "seconds": times}


def move_times(old, new, elements, steps):
    """The times of to_global between two SBPs, on all ranks, of a tensor with 64 rows."""
    x = flow.ones(64, elements // 64, placement=flow.placement.all("cpu"), sbp=sbp_of(old))
    ends = []
    for _ in range(steps):
        x.to_global(sbp=sbp_of(new)).to_local()
        wait()
        ends.append(time.perf_counter())
    return differences(ends)


def differences(times):
    return [end - begin for begin, end in zip(times, times[1:])]


def clocks(path, schedule, rows, features, micro_batches, steps):
    """The calls of pipeline_schedules.py on this rank in each step: [[(operation, micro-batch, begin, end)], ...].

    Times: seconds since all ranks began the step. A rank waits for what it receives before a call begins.
    """
    module, n = recipe.load(path), flow.env.get_world_size()
    stages, sizes = module.placements("cpu", n), [features] * 3
    model, x, y = module.make(stages, micro_batches, rows * micro_batches, *sizes)
    table, own, seen = module.SCHEDULES[schedule](n, micro_batches), flow.env.get_rank(), []

    def timed(function, ranks_of):
        def call(first, *arguments):
            if own not in ranks_of(first).ranks:
                return function(first, *arguments)
            wait()
            begin = time.perf_counter()
            result = function(first, *arguments)
            wait()
            seen[-1].append((begin - start, time.perf_counter() - start))
            return result

        return call

    changes = [(module.Stage, name, lambda stage: stage.ranks) for name in ("forward", "weight_backward")]
    changes.append((flow.Tensor, "backward", lambda tensor: tensor.placement))
    with ExitStack() as stack:
        for owner, name, ranks_of in changes:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), ranks_of)))
        for _ in range(steps + 1):
            seen.append([])
            flow.comm.barrier()
            start = time.perf_counter()
            module.run_step(model, table, x, y)
            wait()
    return [with_names(table[own], times) for times in seen[1:]]


def with_names(row, times):
    """[(operation, micro-batch, begin, end)]: a B took the time of the gradients of the input and of the weight."""
    times, calls = iter(times), []
    for op, _, micro_batch in row:
        begin, end = next(times)
        if op == "B":
            _, end = next(times)
        calls.append((op, micro_batch, begin, end))
    return calls
