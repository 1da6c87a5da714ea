"""What hangs on purpose: a call of a pool's ranks that is never answered."""

import re

from harness.pool import Pool, PoolError


def assert_hangs(function, *shown, **arguments):
    """Two ranks do not answer this call, and the error has these patterns, such as where they wait.

    A busy machine may need longer until they wait there, so there is a second try.
    """
    for seconds in (2, 60):
        with Pool(2, timeout=seconds) as pool:
            try:
                result = pool.call(function, **arguments)
            except PoolError as error:
                text = str(error)
            else:
                raise AssertionError(f"{function} returned {result}")
        wanted = [f"gave no answer in {seconds} s", *shown]
        if all(re.search(pattern, text) for pattern in wanted):
            return
    raise AssertionError(f"one of {wanted} is not in {text}")
