"""How much of the time the stages of recipes/train_pipeline.py are idle, against (p-1)/(m+p-1).

    .venv/bin/python benchmarks/pipeline_idle.py [--ranks 2] [--pairs 5] [--batch 2048] [--width 1024]

Each rank keeps to a core of its own. One batch is trained as m = 1, 2, 4, ... micro-batches, alternating with m = 1 in
the same run, so that only ratios count. The work of a step is the time at m = 1, in which one stage works after the
other; in p times the time of a step, what is not work is idle. Printed are medians of the pairs.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import recipe  # noqa: E402
from harness.pool import Pool  # noqa: E402

RECIPE = recipe.RECIPES / "train_pipeline.py"
CORES = sorted(os.sched_getaffinity(0))
STEPS = (2, 8)  # what a run of 8 steps takes longer than one of 2 is 6 steps


def step_time(micro_batches, batch, width):
    """Seconds of one step in a graph on this rank, which keeps to a core of its own."""
    import oneflow as flow

    from harness.observe import kept

    pin()
    module = recipe.load(RECIPE)
    kept.append(module)
    seconds = []
    for steps in STEPS:
        flow.comm.barrier()
        begin = time.perf_counter()
        sizes = {"batch": batch, "in_features": width, "hidden": width, "out_features": width}
        tensors = module.run(graph=True, steps=steps, micro_batches=micro_batches, **sizes)
        tensors["losses"].numpy()
        seconds.append(time.perf_counter() - begin)
        kept.append((vars(module.run).copy(), tensors))
    return (seconds[1] - seconds[0]) / (STEPS[1] - STEPS[0])


def pin():
    """Keep every thread of this rank to one core, another for each rank."""
    import oneflow as flow

    core = CORES[flow.env.get_rank() % len(CORES)]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=1024, help="default: %(default)s")
    options = parser.parse_args()
    if not 2 <= options.ranks <= len(CORES):
        parser.exit(2, f"--ranks {options.ranks}: from 2, each with a core of its own, and there are {len(CORES)}\n")
    p = options.ranks
    with Pool(p, timeout=300) as pool:

        def seconds(m):
            return max(pool.call(f"{__file__}:step_time", micro_batches=m, batch=options.batch, width=options.width))

        print(f"p = {p} stages, batch {options.batch}, width {options.width}; median of {options.pairs} pairs")
        print("  m    step / step at m = 1    formula    idle share    formula")
        for m in (2, 4, 8, 16):
            ratio = statistics.median(seconds(m) / seconds(1) for _ in range(options.pairs))
            print(f"{m:3}    {ratio:20.2f}    {(m + p - 1) / (m * p):7.2f}    {1 - 1 / (p * ratio):10.2f}", end="")
            print(f"    {(p - 1) / (m + p - 1):7.2f}", flush=True)


if __name__ == "__main__":
    main()
