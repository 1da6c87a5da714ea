"""What hangs on purpose: a call of a pool's ranks that is never answered."""

import re

from harness.pool import Pool, PoolError
from tests.cases import ROOT

RANK_OF = f"{ROOT / 'tests' / 'on_rank.py'}:rank_of"


def assert_hangs(function, *shown, **arguments):
    """Two ranks do not answer this call, and the error has these patterns, such as where they wait.

    A busy machine may need longer until they wait there, so there is a second try.
    """
    for seconds in (2, 60):
        with Pool(2) as pool:
            pool.call(RANK_OF)  # so that the time is not that of the start
            pool.timeout = seconds
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
