"""Pools of ranks for the tests: calls on recipes with deadlines, and calls in the background."""

import os
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from functools import partial
from pathlib import Path

from oneflow_cookbook.pool import Pool
from tests.cases import PROOFS, measuring

TIMEOUT = 60  # seconds for a call on a recipe: of 800, on two cores with 20 processes that wanted them, none took 20
LONGER = {"gpt": 300, "llama": 180, "training_run": 300, "spawn": 180}  # graphs compile slowly; spawn.py starts ranks
LONGEST = 1800  # seconds until a call in the background has ended
OTHER_CALLS = 300  # for a call on no recipe, such as the measurements of the SBP atlas


class RecipePool(Pool):
    """A pool with a deadline for each recipe."""

    repeated = []  # calls that were repeated because OneFlow died of SIGSEGV

    def __init__(self, world_size, timeout=TIMEOUT, repeat=True, **options):
        super().__init__(world_size, timeout, repeat, **options)
        self.recipe_timeout, self.repeated = timeout, RecipePool.repeated

    def call(self, function, **arguments):
        path = Path(arguments.get("path", ""))
        own = LONGER.get(path.stem, 0) if path.suffix == ".py" else OTHER_CALLS
        self.timeout = max(self.recipe_timeout, own)
        return super().call(function, **arguments)


class Background:
    """Calls of pools, made by a thread while other tests run: they mostly wait, and no load changes what they return.

    calls: key -> (number of ranks, function of a pool); 0 ranks: there is no pool, and the function gets None. Calls
    on as many ranks share a pool. `result` waits for a call, returns what it returned, or raises what it raised.
    """

    def __init__(self, calls):
        self.pool = None
        # os.nice is for the thread and its ranks. What has no pool here gets a thread of its own.
        self.thread, self.unpooled = (ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,)) for _ in range(2))
        self.futures = {}
        for key, (n, function) in sorted(calls.items(), key=lambda call: call[1][0]):
            self.futures[key] = (self.thread if n else self.unpooled).submit(self._call, n, function)
        self.thread.submit(self._close_pool)

    def _call(self, n, function):
        if n == 0:
            return function(None)
        if self.pool is None or self.pool.world_size != n:
            self._close_pool()
            self.pool = RecipePool(n, timeout=15 * TIMEOUT)  # where other tests compute, it has a tenth of the cores
        return function(self.pool)

    def _close_pool(self):
        if self.pool:
            self.pool.close()
            self.pool = None

    def result(self, *key):
        try:
            return self.futures[key].result(LONGEST)
        except TimeoutError:
            raise AssertionError(f"the measurement {key} was not made within {LONGEST} s") from None

    def close(self):
        """Cancel the calls that have not begun."""
        for future in self.futures.values():
            future.cancel()
        self.thread.shutdown()
        self.unpooled.shutdown()


def step_call(name, n, mode, **more):
    """A call for Background that measures a step of a training recipe, at the sizes of its case."""
    run = partial(measuring.training_run, name=name, n=n, mode=mode, **{**PROOFS[name].measured_at, **more})
    return {("step", name, n, mode, *more.items()): (n, run)}
