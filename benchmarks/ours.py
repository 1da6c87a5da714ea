"""What a pool's ranks run to be measured: steps of a recipe, the parts of a step, matmuls, collectives."""

import contextlib
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import oneflow as flow

from harness.measure.calls import replaced, watching
from harness.measure.entry import call_entry
from harness.measure.sbp import sbp_of
from harness.start import recipe

zero_grad = flow.optim.Optimizer.zero_grad
CHANGES = {  # of a recipe, to see what a line of it is worth: name -> what is called instead
    "zeros": {(flow.optim.Optimizer, "zero_grad"): lambda update, set_to_none=False: zero_grad(update)},
    "squares": {(flow.nn.functional, "mse_loss"): lambda out, y: ((out - y) ** 2).mean()},
}


def wait():
    """Until all that this rank was told to do is done."""
    flow._oneflow_internal.eager.Sync()


def step_times(path, change=None, **arguments):
    """The seconds of each step but the first and the last of a training recipe's own loop, on this rank."""
    return between(steps(path, time.perf_counter, change, **arguments)[0])


def losses_and_times(path, **arguments):
    """Of recipes/transformer/gpt.py: {"losses", "seconds" of each step but two, on this rank}."""
    found, (_, losses) = steps(path, time.perf_counter, **arguments)
    return {"losses": [float(loss) for loss in losses], "seconds": between(found)}


def between(found):
    begins = [begin for begin, _ in found]
    return [end - begin for begin, end in zip(begins[1:], begins[2:])]


def steps(path, clock, change=None, in_parts=False, **arguments):
    """Run a training recipe; returns for each step (clock() when it begins, if in_parts {part: its seconds}), and what
    the recipe returned.

    Parts are of eager mode only, and the rank waits for the end of each, which takes some time itself.
    """
    found = []
    first = "graph" if arguments.get("graph") else "zero_grad"

    def timed(call):
        wait()
        if call.kind == first:
            found.append((clock(), Counter()))
            return call.proceed()
        start = time.perf_counter()
        result = call.proceed()
        wait()
        for _, seconds in found[-1:]:  # none before gpt.py's first step, which ends with zero_grad
            seconds[call.kind] += time.perf_counter() - start
        return result

    kinds = [first, "update"] if in_parts else [first]
    with replaced(CHANGES.get(change, {})), watching(timed, kinds):
        returned = call_entry(recipe.load(path), arguments)
        wait()
    return found, returned


def step_begins(path, **arguments):
    """{"begins": when each step of a training recipe begins, by the clock that all processes share, "scheduling": the
    thread of OneFlow that schedules}"""
    spinning = scheduling_thread()
    found, _ = steps(path, time.perf_counter, **arguments)
    return {"begins": [begin for begin, _ in found], "scheduling": spinning}


def parts_of_step(path, **arguments):
    """The median seconds on this rank of {"update", "step": all of it} of a step in eager mode."""
    parts = [seconds for _, seconds in steps(path, time.perf_counter, in_parts=True, **arguments)[0]][1:-1]
    update = statistics.median(one["update"] for one in parts)
    return {"update": update, "step": statistics.median(step_times(path, **arguments))}


def thread_times():
    """The seconds that each thread of this process has run so far, by its number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def busiest(work, *apart):
    """The number of the thread, of those that OneFlow has started and are not `apart`, that runs longest in work()."""
    before = thread_times()
    work()
    after = thread_times()
    ran = {thread: after[thread] - before.get(thread, 0) for thread in after if thread not in (os.getpid(), *apart)}
    return max(ran, key=ran.get)


def one_matmul():
    flow.matmul(flow.ones(2048, 2048), flow.ones(2048, 2048)).numpy()


def many_operations():
    x = flow.ones(64)
    for _ in range(300):
        x = x + 1
    x.numpy()


def scheduling_thread():
    return busiest(many_operations, busiest(one_matmul))


def lower_scheduling_thread():
    os.setpriority(os.PRIO_PROCESS, scheduling_thread(), 19)


def cpu_times(path, **arguments):
    """Seconds a step that this rank's threads ran: {"scheduling": OneFlow's thread that spins, "others", "step"}."""
    spinning = scheduling_thread()
    found, _ = steps(path, lambda: (thread_times(), time.perf_counter()), **arguments)
    [_, ((before, begin), _), *_, ((after, end), _)] = found
    count = len(found) - 2
    used = {thread: (after[thread] - before.get(thread, 0)) / count for thread in after}
    spun = used.pop(spinning)
    return {"scheduling": spun, "others": sum(used.values()), "step": (end - begin) / count}


def times_of(run, count):
    """The seconds of each of so many runs but the first."""
    ends = []
    for _ in range(count):
        run()
        wait()
        ends.append(time.perf_counter())
    return [end - begin for begin, end in zip(ends, ends[1:])]


def move_times(old, new, elements, steps):
    """The seconds of to_global from one SBP to another, on all ranks, of a square-like tensor."""
    x = flow.ones(64, elements // 64, placement=flow.placement.all("cpu"), sbp=sbp_of(old))
    return times_of(lambda: x.to_global(sbp=sbp_of(new)).to_local(), steps)


def matmul_times(shapes, steps):
    """The seconds of matmuls of these shapes, (..., rows, inner, columns), on this rank alone, one after another."""
    pairs = [(flow.ones(*many, m, k), flow.ones(*many, k, n)) for *many, m, k, n in shapes]
    return times_of(lambda: [flow.matmul(x, w) for x, w in pairs], steps)


def kernel_times(kernel, shapes, steps):
    """The seconds of one operation on ones of these shapes, on this rank alone."""
    given = [flow.ones(*shape) for shape in shapes]
    weight = flow.nn.Parameter(flow.ones(*shapes[0]))
    weight.grad = flow.ones(*shapes[0])
    run = {
        "matmul": lambda: flow.matmul(*given),
        "add": lambda: given[0].add_(given[1]),
        "relu": lambda: flow.relu(given[0]),
        "mse_loss": lambda: flow.nn.functional.mse_loss(*given),
        "squares": lambda: ((given[0] - given[1]) ** 2).mean(),
        "gelu": lambda: flow.nn.functional.gelu(given[0]),
        "minus": lambda: given[0] - given[1],
        "expand": lambda: given[0] - given[1].expand(*shapes[0]),
        "transpose": lambda: given[0].transpose(0, 1).contiguous(),
        "momentum": flow.optim.SGD([weight], lr=0.1, momentum=0.9).step,
        "sgd": flow.optim.SGD([weight], lr=0.1).step,
        "adam": flow.optim.Adam([weight], lr=0.1).step,
    }[kernel]
    return times_of(run, steps)
