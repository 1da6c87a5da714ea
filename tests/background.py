"""Calls that a thread makes while other tests run: they mostly wait, and no load changes a byte of what they return."""

import os
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from functools import partial

from harness.report import runs
from tests.cases import PROOFS
from tests.pools import TIMEOUT, RecipePool


class Background:
    """Calls to pools of ranks, made one after another by a thread; `result` waits for one of them.

    calls: key -> (number of ranks, function of a pool). Those on as many ranks come together, and their pool is closed
    when they are done. On 0 ranks there is none: the function gets None. What a call raises, its result raises.
    """

    def __init__(self, calls):
        self.pool = None
        self.thread = ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,))  # of this thread, and of its ranks
        in_turn = sorted(calls, key=lambda key: calls[key][0])
        self.futures = {key: self.thread.submit(self._call, *calls[key]) for key in in_turn}
        self.thread.submit(self._close)

    def _call(self, n, function):
        if n == 0:
            return function(None)
        if self.pool is None or self.pool.world_size != n:
            self._close()
            self.pool = RecipePool(n, timeout=2 * TIMEOUT)  # other tests have most of the cores
        return function(self.pool)

    def _close(self):
        if self.pool:
            self.pool.close()
            self.pool = None

    def result(self, *key, seconds=1800):
        try:
            return self.futures[key].result(seconds)
        except TimeoutError:
            raise AssertionError(f"the measurement {key} was not made within {seconds} s") from None

    def close(self):
        """What is not begun is not made."""
        for future in self.futures.values():
            future.cancel()
        self.thread.shutdown()


def step_call(name, n, mode, **more):
    """The call that measures a step of a training recipe, at the sizes of its case."""
    run = partial(runs.training_run, name=name, n=n, mode=mode, **{**PROOFS[name].measured_at, **more})
    return {("step", name, n, mode, *more.items()): (n, run)}
