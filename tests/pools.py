"""Pools of ranks for the tests: calls on recipes with deadlines, calls in the background, calls that must hang."""

import os
import re
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from functools import partial
from pathlib import Path

from harness.pool import Pool, PoolError
from harness.report import runs
from harness.start.cores import available
from tests.cases import PROOFS

TIMEOUT = 60  # seconds for a call on a recipe: of 800, on two cores with 20 processes that wanted them, none took 20
LONGER = {"gpt": 300, "llama": 180, "training_run": 300, "spawn": 180}  # graphs compile slowly; spawn.py starts ranks
OTHER_CALLS = 300  # for a call on no recipe, such as the measurements of the SBP atlas


class RecipePool(Pool):
    """A pool with a deadline for each recipe. When a recipe hangs, its other calls fail at once, in all pools.

    So a recipe that hangs costs one deadline, not one for each of its runs.
    """

    hung = {}  # source of a recipe -> the call that hung
    calling = {}  # pool -> source of the recipe that it calls now
    repeated = []  # calls that were repeated because OneFlow died of SIGSEGV

    def __init__(self, world_size, timeout=TIMEOUT, repeat=True, forked=True, **options):
        super().__init__(world_size, timeout, repeat, forked=forked, **options)
        self.recipe_timeout, self.repeated = timeout, RecipePool.repeated

    def call(self, function, **arguments):
        path = Path(arguments.get("path", ""))
        if path.suffix != ".py" or not path.is_file():
            self.timeout = max(self.recipe_timeout, OTHER_CALLS)
            return super().call(function, **arguments)
        self.timeout = max(self.recipe_timeout, LONGER.get(path.stem, 0))
        source = path.read_bytes()  # a copy counts as the same recipe, a changed copy does not
        self._raise_if_hung(path, source)
        self.calling[self] = source
        try:
            return super().call(function, **arguments)
        except PoolError as error:
            self._raise_if_hung(path, source)
            if error.hung:
                self.hung[source] = f"{Path(function).name} on {self.world_size} ranks"
                self._end_other_calls(source)
                error.args = (f"{error}\n{self._perhaps(arguments)}",)
            raise
        finally:
            del self.calling[self]

    def _raise_if_hung(self, path, source):
        if source in self.hung:
            message = f"{path.name} did not answer {self.hung[source]} in time, so it is not called again"
            raise PoolError(0, message, hung=True) from None

    def _perhaps(self, arguments):
        """What else than a hang it may be."""
        sizes = {name: value for name, value in arguments.items() if name not in ("path", "names")}
        return (
            f"It was called with {sizes}. The load average is {os.getloadavg()[0]:.0f} on {len(available())} cores.\n"
            "If it only takes long at these sizes, give its case smaller ones, in `measured_at` or `sizes`."
        )

    def _end_other_calls(self, source):
        """End the calls of this recipe that other threads wait for."""
        for pool, called in list(self.calling.items()):
            if called == source and pool is not self and pool.ranks:
                pool.ranks.end(grace=0)


class Background:
    """Calls of pools, made by a thread while other tests run: they mostly wait, and no load changes what they return.

    calls: key -> (number of ranks, function of a pool); with 0 ranks the function gets None. Calls on as many
    ranks share a pool. `result` waits for a call, returns what it returned, or raises what it raised.
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
            # Where other tests compute, these ranks have a tenth of the cores. They start as those of a user.
            self.pool = RecipePool(n, timeout=15 * TIMEOUT, forked=False)
        return function(self.pool)

    def _close_pool(self):
        if self.pool:
            self.pool.close()
            self.pool = None

    def result(self, *key, seconds=1800):
        try:
            return self.futures[key].result(seconds)
        except TimeoutError:
            raise AssertionError(f"the measurement {key} was not made within {seconds} s") from None

    def close(self):
        """Cancel the calls that have not begun."""
        for future in self.futures.values():
            future.cancel()
        self.thread.shutdown()
        self.unpooled.shutdown()


def step_call(name, n, mode, **more):
    """A call for Background that measures a step of a training recipe, at the sizes of its case."""
    run = partial(runs.training_run, name=name, n=n, mode=mode, **{**PROOFS[name].measured_at, **more})
    return {("step", name, n, mode, *more.items()): (n, run)}


def assert_hangs(function, *patterns, **arguments):
    """Two ranks do not answer this call, and the error has these patterns, such as where they wait.

    On a busy machine they may not have got there in 2 s, so there is a second try.
    """
    for seconds in (2, 60):
        with Pool(2, timeout=seconds, forked=True) as pool:
            try:
                result = pool.call(function, **arguments)
            except PoolError as error:
                text = str(error)
            else:
                raise AssertionError(f"{function} returned {result}")
        expected = [f"gave no answer in {seconds} s", *patterns]
        if all(re.search(pattern, text) for pattern in expected):
            return
    raise AssertionError(f"one of {expected} is not in {text}")
