"""For your own tests: run a function on several ranks, and check what the ranks hold of the tensors that it returns.

`docs/testing.md` has an example. `./launch.sh test path/to/test_mine.py` runs it, from any folder.
"""

import inspect
from pathlib import Path

import numpy as np
import pytest

from harness.measure import theory
from harness.pool import Pool

RETURNED = f"{Path(__file__).parent / 'measure' / 'observe.py'}:returned"


def on_ranks(*world_sizes, rtol=1e-5, atol=1e-6):
    """Decorate a test: it runs once for each of these world sizes.

    On every rank the function returns {name: (global tensor, SBP, numpy array)}: the tensor, the SBP that it must have
    (on a mesh a tuple of them), and its full value. The test fails if the SBP, the shape, a rank's shard or the value
    differs, and names the tensor and the rank. rtol, atol: as in np.testing.assert_allclose.
    """

    def decorate(function):
        @pytest.mark.parametrize("world_size", world_sizes)
        def test(pools, world_size):
            path = inspect.getsourcefile(function)
            results = pools(world_size).call(RETURNED, path=path, name=function.__name__)
            problems = [line for line in differences(results, rtol, atol) if line]
            assert not problems, "\n".join(problems)

        test.__name__, test.__doc__, test.on_rank = function.__name__, function.__doc__, function
        return test

    return decorate


def differences(results, rtol, atol):
    """Yield a line for each difference, or None; results: what `observe.returned` returned, by rank."""
    for rank, tensors in enumerate(results):
        for name, found in tensors.items():
            where = f"{name}: rank {rank} of {len(results)}"
            expected = found["wanted"]
            if found["sbp"] != found["wanted_sbp"]:
                yield f"{where}: SBP is {found['sbp']}, expected {found['wanted_sbp']}"
            elif found["shape"] != expected.shape:
                yield f"{where}: shape is {found['shape']}, expected {expected.shape}"
            else:
                yield difference(f"{where}: value", found["value"], expected, rtol, atol)
                layout = theory.Layout(found["sbp"], found["ranks"])
                if rank in layout.members and "P" not in found["sbp"].split(", "):  # shards of P may have any values
                    block = tuple(slice(*span) for span in layout.block(expected.shape, rank))
                    yield difference(f"{where}: shard", found["shard"], expected[block], rtol, atol)


def difference(what, found, expected, rtol, atol):
    """A line that says where two arrays differ most; None if they are close."""
    if found.shape != expected.shape:
        return f"{what} has shape {found.shape}, expected {expected.shape}"
    error = np.abs(found - expected)
    if (error <= atol + rtol * np.abs(expected)).all():
        return None
    at = tuple(int(i) for i in np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape))
    return f"{what} at {at} is {found[at]:.6g}, expected {expected[at]:.6g}"


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its Pool, which is started at the first call."""
    started = {}
    yield lambda n: started.setdefault(n, Pool(n))
    for pool in started.values():
        pool.close()
