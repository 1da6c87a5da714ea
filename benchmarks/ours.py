"""Functions that bench.py calls on the ranks of a pool: steps of a recipe. Times: seconds on this rank."""

import time

import oneflow as flow

from oneflow_cookbook.measure.calls import watching
from oneflow_cookbook.measure.entry import call_entry
from oneflow_cookbook.start import recipe


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


def differences(times):
    return [end - begin for begin, end in zip(times, times[1:])]
