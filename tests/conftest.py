import os
import signal
import time

import pytest

from harness.pool import pool_cache
from tests import jobs
from tests.background import Background
from tests.cases.ladder import Checks
from tests.hosts import Hosts
from tests.pools import RecipePool

BEGIN = time.monotonic()

# A thread that wakes does not interrupt the running one: small runs take a quarter less. What we start inherits this.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Begun in the background or under nohup, we ignore these, and the jobs of the tests must not inherit that.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)


@pytest.fixture(scope="module")
def hosts():
    """Two of them, as far as Linux allows: see hosts.py."""
    with Hosts(2) as both:
        yield both


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its pool of ranks; a pool is started when it is first used."""
    with pool_cache(RecipePool) as pools:
        yield pools


@pytest.fixture(scope="session", autouse=True)
def measured(request):
    """A function to the result of a measurement that was begun before the first test: see background.py."""
    calls = {}
    for item in request.session.items:
        if hasattr(item.module, "background_calls"):
            calls.update(item.module.background_calls(item))
    background = Background(calls)
    yield background.result
    background.close()


def pytest_terminal_summary(terminalreporter):
    repeated = RecipePool.repeated + jobs.repeated
    if repeated:
        terminalreporter.write_line(f"{len(repeated)} calls made once more, as OneFlow died of SIGSEGV: {repeated}")


def pytest_unconfigure(config):
    """The last line, behind pytest's own."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if Checks.runs and reporter:
        numbers = f"{len(Checks.recipes)} recipes, {Checks.runs} runs against numpy"
        reporter.write_line(f"{numbers} in {time.monotonic() - BEGIN:.0f} s")


@pytest.fixture(scope="session", autouse=True)
def early(request, tmp_path_factory):
    """Whole jobs by name, begun before the first test: they mostly wait, so other tests run beside them."""
    begun = {}
    for module in {item.module for item in request.session.items}:
        if hasattr(module, "early_jobs"):
            begun.update(module.early_jobs(tmp_path_factory))
    return begun


def pytest_collection_modifyitems(items):
    """First jobs that mostly wait; then tests on pools; then those of measurements; last the page of errors, alone."""

    def turn(item):
        last = item.module.__name__.endswith("test_diagnosing")
        return last, hasattr(item.module, "background_calls"), "pools" in item.fixturenames

    items.sort(key=turn)
