"""When each stage of a pipeline works in a step: the states of the threads that compute, sampled from outside."""

import os
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.steps import OURS, SQUARE, of_script
from harness.pool import Pool

RANKS, MICRO_BATCHES, BATCH = 2, 8, 2048
STEPS = 12


class Threads:
    """The threads of a process; their files stay open, as opening them takes most of the time of a sample."""

    def __init__(self, pid):
        self.folder, self.files = Path(f"/proc/{pid}/task"), {}

    def look_for_new(self):
        for task in self.folder.iterdir():
            if task.name not in self.files:
                with suppress(OSError):
                    self.files[task.name] = os.open(task / "stat", os.O_RDONLY)

    def running(self):
        """Those that run, or are ready to."""
        found = set()
        for name, file in self.files.items():
            with suppress(OSError):  # it has ended
                if os.pread(file, 100, 0).rpartition(b") ")[2][:1] == b"R":
                    found.add(int(name))
        return found

    def close(self):
        for file in self.files.values():
            os.close(file)


class Sampler(threading.Thread):
    """Notes again and again which threads of some processes run, until `done` is set."""

    def __init__(self, pids):
        super().__init__(daemon=True)
        self.processes, self.samples, self.done = [Threads(pid) for pid in pids], [], threading.Event()

    def run(self):
        while not self.done.is_set():
            if len(self.samples) % 100 == 0:
                for threads in self.processes:
                    threads.look_for_new()
            self.samples.append((time.perf_counter(), [threads.running() for threads in self.processes]))
        for threads in self.processes:
            threads.close()


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


def spans(samples, rank, apart):
    """[(begin, end)] of the samples in a row in which a thread of a rank, not one of `apart`, runs."""
    found, before = [], False
    for moment, threads in samples:
        busy = bool(threads[rank] - apart)
        if busy and before:
            found[-1][1] = moment
        elif busy:
            found.append([moment, moment])
        before = busy
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
    inside = [(moment - begin, threads) for moment, threads in samples if begin <= moment < end]
    aparts = [{said["scheduling"], main} for said, main in zip(ranks, mains)]
    busy = [spans(inside, rank, apart) for rank, apart in enumerate(aparts)]
    say(f"{len(inside)} samples of a step of {1e3 * (end - begin):.0f} ms")
    return {"micro_batches": MICRO_BATCHES, "step": end - begin, "busy": busy}
