import pytest

from harness.pool import Pool
from tests.ladder import Checks


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its pool of ranks; a pool is started when it is first used."""
    started = {}
    yield lambda n: started.setdefault(n, Pool(n))
    for pool in started.values():
        pool.close()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{Checks.count} checks against numpy and the declared layouts")
