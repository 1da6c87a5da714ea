import pytest

from harness.pool import Pool
from tests import test_official
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


def pytest_collection_finish(session):
    """OneFlow's own launcher may sleep for 10 s at the start, so its jobs begin first and run beside other tests."""
    wanted = any("official_jobs" in getattr(item, "fixturenames", ()) for item in session.items)
    session.official_jobs = {}
    if wanted and not session.config.option.collectonly:
        session.official_jobs = {name: start() for name, start in test_official.JOBS.items()}


@pytest.fixture(scope="session")
def official_jobs(request):
    """The jobs of test_official.py, by name, already begun."""
    return request.session.official_jobs
