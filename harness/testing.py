"""For your own tests: run a function on several ranks, and check what the ranks hold of the tensors that it returns.

`docs/testing.md` has an example. `./launch.sh test path/to/test_mine.py` runs it, from any folder.
"""

import inspect
from pathlib import Path

import numpy as np
import pytest

from harness.measure.sbp import Layout
from harness.pool import PoolError, pool_cache

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
            try:
                results = pools(world_size).call(RETURNED, path=path, name=function.__name__)
                problems = list(differences(results, rtol, atol))
            except PoolError as error:
                problems = [in_own_words(error, path)]
            if problems:
                pytest.fail("\n".join(problems), pytrace=False)

        test.__name__, test.__doc__, test.on_rank = function.__name__, function.__doc__, function
        return test

    return decorate


def in_own_words(error, path):
    """What a PoolError says of the rank, with its traceback from the test's own file on."""
    lines = str(error).replace(f"{RETURNED}: ", "", 1).splitlines()
    in_file = [number for number, line in enumerate(lines) if line.startswith(f'  File "{path}"')]
    if in_file:
        lines[2 : in_file[0]] = []
    return "\n".join(lines)


def differences(results, rtol, atol):
    """Yield the text of each difference; results: what `observe.returned` returned, by rank."""
    for rank, tensors in enumerate(results):
        for name, tensor in tensors.items():
            where, expected = f"{name}: rank {rank} of {len(results)}", tensor["expected"]
            if tensor["sbp"] != tensor["expected_sbp"]:
                yield f"{where}: SBP is {tensor['sbp']}, expected {tensor['expected_sbp']}"
                continue
            if tensor["shape"] != expected.shape:
                yield f"{where}: shape is {tensor['shape']}, expected {expected.shape}"
                continue
            arrays, layout = {"value": (tensor["value"], expected)}, Layout(tensor["sbp"], tensor["ranks"])
            if rank in layout.members and "P" not in layout.axes:  # shards of P may have any values
                block = tuple(slice(*span) for span in layout.block(expected.shape, rank))
                arrays["shard"] = (tensor["shard"], expected[block])
            for what, pair in arrays.items():
                try:
                    np.testing.assert_allclose(*pair, rtol, atol, err_msg=f"{where}: {what} (x: found, y: expected)")
                except AssertionError as error:
                    yield str(error)


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its Pool, which is started at the first call."""
    with pool_cache() as pools:
        yield pools
