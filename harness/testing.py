"""For your own tests: run a function on several ranks, and check what the ranks hold of the tensors that it returns.

`docs/testing.md` has an example. `./launch.sh test path/to/test_mine.py` runs such a file, wherever it lies.
"""

import inspect
from pathlib import Path

import numpy as np
import pytest

from harness.measure import theory
from harness.pool import Pool

RETURNED = f"{Path(__file__).parent / 'measure' / 'observe.py'}:returned"


def on_ranks(*world_sizes, rtol=1e-5, atol=1e-6):
    """Decorate a test: it runs on each of these numbers of ranks.

    On every rank the function returns {name: (global tensor, SBP, numpy array)}: a tensor, the SBP that it must have
    (one, or a tuple on a mesh), and the whole value. The test fails, and names the tensor and the rank, where the SBP,
    the shape, the rank's shard or the value is another one. rtol, atol: as in np.testing.assert_allclose.
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
    """Lines that say what is not as expected, from what `observe.returned` gave on each rank."""
    for rank, tensors in enumerate(results):
        for name, found in tensors.items():
            where = f"{name}: rank {rank} of {len(results)}"
            wanted = found["wanted"]
            if found["sbp"] != found["wanted_sbp"]:
                yield f"{where}: SBP is {found['sbp']}, expected {found['wanted_sbp']}"
            elif found["shape"] != wanted.shape:
                yield f"{where}: shape is {found['shape']}, expected {wanted.shape}"
            else:
                yield difference(f"{where}: value", found["value"], wanted, rtol, atol)
                layout = theory.Layout(found["sbp"], found["ranks"])
                if rank in layout.members and "P" not in found["sbp"].split(", "):  # only the sum of a P is known
                    block = tuple(slice(*span) for span in layout.block(wanted.shape, rank))
                    yield difference(f"{where}: shard", found["shard"], wanted[block], rtol, atol)


def difference(what, found, wanted, rtol, atol):
    """A line that says where two arrays differ most, None if they are close."""
    if found.shape != wanted.shape:
        return f"{what} has shape {found.shape}, expected {wanted.shape}"
    off = np.abs(found - wanted)
    if (off <= atol + rtol * np.abs(wanted)).all():
        return None
    at = tuple(int(i) for i in np.unravel_index(np.nanargmax(off), off.shape))
    return f"{what} at {at} is {found[at]:.6g}, expected {wanted[at]:.6g}"


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its pool of ranks; a pool is started when it is first used."""
    started = {}
    yield lambda n: started.setdefault(n, Pool(n))
    for pool in started.values():
        pool.close()
