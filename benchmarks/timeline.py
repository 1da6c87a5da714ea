"""When each stage of a pipeline works in a step: the states of the threads that compute, sampled from outside."""

import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.steps import OURS, SQUARE, of_script
from harness.pool import Pool

RANKS, MICRO_BATCHES, BATCH = 2, 8, 2048
STEPS = 12
GAP = 0.002  # seconds: samples of work that are nearer belong together


def running(pid):
    """The threads of a process that run, or are ready to."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "R":
                found.add(int(task.name))
    return found


class Sampler(threading.Thread):
    """Notes again and again which threads of some processes run, until `done` is set."""

    def __init__(self, pids):
        super().__init__(daemon=True)
        self.pids, self.samples, self.done = pids, [], threading.Event()

    def run(self):
        while not self.done.is_set():
            self.samples.append((time.perf_counter(), [running(pid) for pid in self.pids]))


def sampled(pool, **arguments):
    """(samples, what each rank says of itself) while train_pipeline.py trains in a graph."""
    pool.call(f"{OURS}:wait")
    sampler = Sampler([process.pid for process in pool.ranks.processes])
    sampler.start()
    try:
        return sampler.samples, of_script(pool, "step_begins", "train_pipeline", graph=True, **arguments)
    finally:
        sampler.done.set()
        sampler.join()


def worker(samples, rank, apart):
    """The thread of a rank, not one of `apart`, that runs in most samples."""
    counts = {}
    for _, threads in samples:
        for thread in threads[rank] - apart:
            counts[thread] = counts.get(thread, 0) + 1
    return max(counts, key=counts.get)


def spans(times):
    """[(begin, end)] of runs of times that are near each other."""
    found = []
    for moment in times:
        if found and moment - found[-1][1] <= GAP:
            found[-1][1] = moment
        else:
            found.append([moment, moment])
    return found


def median_step(begins):
    """(begin, end) of the step of median length, without the first."""
    pairs = list(zip(begins[1:], begins[2:]))
    middle = statistics.median_low([end - begin for begin, end in pairs])
    return next((begin, end) for begin, end in pairs if end - begin == middle)


def timeline(_, say):
    """{"micro_batches", "step": seconds, "busy": [[begin, end] from the step's begin on, by rank]}, on 2 ranks."""
    with Pool(RANKS, timeout=300) as pool:
        sizes = {"micro_batches": MICRO_BATCHES, **SQUARE, "batch": BATCH}
        samples, ranks = sampled(pool, steps=STEPS, **sizes)
        mains = [process.pid for process in pool.ranks.processes]
    begin, end = median_step(ranks[0]["begins"])
    inside = [sample for sample in samples if begin <= sample[0] < end]
    busy = []
    for rank, (said, main) in enumerate(zip(ranks, mains)):
        thread = worker(inside, rank, {said["scheduling"], main})
        busy.append(spans([moment - begin for moment, threads in inside if thread in threads[rank]]))
    say(f"{len(inside)} samples of a step of {1e3 * (end - begin):.0f} ms")
    return {"micro_batches": MICRO_BATCHES, "step": end - begin, "busy": busy}
