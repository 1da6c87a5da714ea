"""For your own tests: run a function on several ranks, and check the tensors that it returns, rank by rank.

`docs/testing.md` has an example. `./launch.sh test path/to/test_mine.py` runs it, from any folder.
"""

import functools
import inspect
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest

from oneflow_cookbook.measure.sbp import Layout
from oneflow_cookbook.pool import PoolError, pool_cache
from oneflow_cookbook.start.signals import heeded

RETURNED = "oneflow_cookbook.returned:returned"


def on_ranks(*world_sizes, rtol=1e-5, atol=1e-6):
    """Decorate a test function, which then runs once for each of these world sizes.

    On every rank the function returns {name: (global tensor, SBP, numpy array)}: the tensor, the SBP that it must have
    (on a mesh a tuple of SBPs), and its full value. The test fails if the SBP, the shape, a rank's shard or the value
    differs, and names the tensor and the rank. rtol, atol: as in np.testing.assert_allclose. It may return nothing, and
    use pytest.skip, xfail and the like, if it does so on every rank.

    The function may have parameters, such as those of pytest.mark.parametrize: the ranks get copies of their values.
    """

    if not world_sizes or not all(isinstance(size, int) for size in world_sizes):
        raise TypeError("on_ranks needs numbers of ranks: @on_ranks(2, 3, 4)")

    def decorate(function):
        path = inspect.getsourcefile(function)
        parameters = inspect.signature(function).parameters.values()

        @pytest.mark.parametrize("world_size", world_sizes)
        @functools.wraps(function)
        def test(*instance, pools, world_size, **arguments):  # instance: of the test's class, if it has one
            if any(parameter.name == "world_size" for parameter in parameters):
                arguments["world_size"] = world_size
            folder = str(Path(path).parents[function.__module__.count(".")])  # of the test's outermost package
            test_in_module = {"folder": folder, "module": function.__module__, "name": function.__qualname__}
            values = {name: pickled(name, value) for name, value in arguments.items()}
            try:
                results = dict(enumerate(pools(world_size).call(RETURNED, **test_in_module, arguments=values)))
                problems = list(unlike(results, world_size))
                if not problems:
                    end_as_the_ranks(*results[0])
                    problems = list(differences([tensors for _, tensors in results.values()], rtol, atol))
            except PoolError as error:
                others = unlike(error.answers, world_size) if error.hung and error.answers else ()
                problems = [*others, in_own_words(error, path)]
            if problems:
                pytest.fail("\n".join(problems).lstrip(), pytrace=False)

        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("pools", "world_size")]
        theirs = [parameter for parameter in parameters if parameter.name != "world_size"]
        test.__signature__ = inspect.Signature([*theirs, *ours])
        test.on_rank = function
        return test

    return decorate


def pickled(name, value):
    """An argument of a test, pickled for the ranks; fails the test if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        message = f"on_ranks: {name} cannot be copied to the ranks: {error}"
    pytest.fail(f"{message}; make it inside the test, from values that can be pickled", pytrace=False)


def pytest_load_initial_conftests():
    """Let signals that end a job end pytest, too, with its ranks."""
    for number in heeded([signal.SIGHUP]):
        signal.signal(number, end)


def end(number, frame):
    """End pytest at a signal; its fixtures then end the ranks. A second signal ends it at once."""
    signal.signal(number, signal.SIG_DFL)
    pytest.exit(f"{signal.Signals(number).name}: every rank is ended", returncode=128 + number)


def in_own_words(error, path):
    """The message of a PoolError, with the traceback from the test's own file on."""
    lines = str(error).replace(f"{RETURNED}: ", "", 1).splitlines()
    in_file = [number for number, line in enumerate(lines) if line.startswith(f'  File "{path}"')]
    if in_file:
        lines[2 : in_file[0]] = []
    return "\n".join(lines)


def unlike(results, world_size):
    """Yield a line if the ranks did not end the test in the same way. results: {rank: result of `returned`}."""
    ends = {rank: (how, *(sorted(value) if how == "returned" else ())) for rank, (how, value) in results.items()}
    if len(ends) < world_size or len(set(ends.values())) > 1:
        words = []
        for rank, (how, value) in results.items():
            what = ", ".join(value) or "nothing" if how == "returned" else value
            words.append(f"rank {rank} of {world_size}: {how} {what}")
        yield f"{'; '.join(words)}: all ranks must end a test in the same way"


def end_as_the_ranks(how, reason):
    """End pytest's test as the test on the ranks ended."""
    if how == "exit":
        pytest.exit(*reason)
    elif how == "skip":
        raise pytest.skip.Exception(reason, _use_item_location=True)  # the line of the test, in pytest's summary
    elif how == "xfail":
        pytest.xfail(reason)
    elif how == "fail":
        pytest.fail(reason, pytrace=False)


def differences(results, rtol, atol):
    """Yield the text of each difference. results: what the test returned on each rank."""
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
                arrays["shard"] = (tensor["shard"], expected[layout.slices(expected.shape, rank)])
            for what, pair in arrays.items():
                try:
                    np.testing.assert_allclose(
                        *pair, rtol, atol, err_msg=f"{where}: {what} (x: on the ranks, y: expected)"
                    )
                except AssertionError as error:
                    yield str(error)


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its Pool, which is started at the first call."""
    with pool_cache() as pools:
        yield pools
