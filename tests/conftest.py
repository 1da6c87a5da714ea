"""Fixtures, the order of the tests, and what runs beside them.

1. pytest collects the tests and sorts them: whole jobs, tests on pools of ranks, then those that take measurements.
2. `early` starts the jobs that each module names in `early_jobs(tmp_path_factory)`: {name: Run}.
3. `measured` collects what each test names in `background_calls(item)`: {key: (number of ranks, function of a pool)}.
   A thread makes these calls one after another; tests with the same key share a call.
4. The tests run. A test takes `early[name]`, or `measured(*key)`, which waits for the call.
5. Calls that have not begun when the last test has ended are cancelled.
"""

import inspect
import os
import re
import signal
import time
from functools import lru_cache

import pytest

from oneflow_cookbook.pool import pool_cache
from tests import jobs
from tests.cases.ladder import Checks
from tests.hosts import Hosts
from tests.pools import Background, RecipePool

BEGIN = time.monotonic()

# A thread that wakes does not preempt the running one: small runs take a quarter less. Child processes inherit it.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Started in the background or with nohup, pytest ignores these signals; the jobs of the tests must not inherit that.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, as far as Linux allows: see hosts.py."""
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its pool of ranks; a pool is started when it is first used."""
    with pool_cache(RecipePool) as pools:
        yield pools


def calls_of(item):
    """The background calls that a test needs."""
    return item.module.background_calls(item) if hasattr(item.module, "background_calls") else {}


@pytest.fixture(scope="session", autouse=True)
def measured(request):
    """A function from a key to the result of the background call with that key; see Background in pools.py."""
    calls = {}
    for item in request.session.items:
        calls.update(calls_of(item))
    background = Background(calls)
    yield background.result
    background.close()


@pytest.fixture(scope="session", autouse=True)
def early(request, tmp_path_factory):
    """Whole jobs by name; as they mostly wait, other tests run beside them."""
    jobs_by_name = {}
    for module in {item.module for item in request.session.items}:
        if hasattr(module, "early_jobs"):
            jobs_by_name.update(module.early_jobs(tmp_path_factory))
    return jobs_by_name


def pytest_addoption(parser):
    parser.addoption("--install", action="store_true", help="run the tests that install other software, too")


def installed_by(item):
    """The words for what a test installs, or None."""
    mark = item.get_closest_marker("installs")
    return mark.args[0] if mark else "a browser" if "browser" in item.fixturenames else None


LEFT_OUT = []  # for each test that was left out, as it installs something: the words for that


RECIPE = re.compile(r"""\b(?:path_of|path)\(["'](\w+)["']\)""")


@lru_cache(maxsize=None)
def recipes_of(function):
    """The names of the recipes whose path a test function takes, itself or by constants of its module."""
    text, module = inspect.getsource(function), inspect.getsource(inspect.getmodule(function))
    constants = re.findall(r"^([A-Z_, ]+) = (.*)$", module, flags=re.MULTILINE)
    used = [value for names, value in constants if re.search(rf"\b({names.replace(', ', '|')})\b", text)]
    return RECIPE.findall("\n".join([text, *used]))


def pytest_itemcollected(item):
    """`-k NAME` also selects tests of a recipe without its name in theirs."""
    if item.config.option.keyword:
        item.extra_keyword_matches.update(recipes_of(item.function))


WAITING = ("test_faults", "test_launcher", "test_nodes", "test_shell_jobs")  # while the measurements compute


def pytest_collection_modifyitems(config, items):
    """First whole jobs, which mostly wait; then tests on pools; then those of measurements; last the blocks of pages.

    With all tests, those that others contain are left out: test_mains.py and test_verify_programs.py have them.
    """

    def turn(item):
        name = item.module.__name__.rpartition(".")[2]
        return name == "test_pages", bool(calls_of(item)), "pools" in item.fixturenames, name not in WAITING

    items.sort(key=turn)
    modules = {item.module.__name__ for item in items}
    if {"tests.test_mains", "tests.slow.test_verify_programs"} <= modules:
        contained = ("test_main_of_a_copy_passes", "test_right_recipe", "test_wrong_program")
        items[:] = [item for item in items if item.originalname not in contained]
    if not config.option.install:
        LEFT_OUT.extend(filter(None, map(installed_by, items)))
        config.hook.pytest_deselected(items=[item for item in items if installed_by(item)])
        items[:] = [item for item in items if not installed_by(item)]


def pytest_terminal_summary(terminalreporter):
    repeated = RecipePool.repeated + jobs.repeated
    if repeated:
        terminalreporter.write_line(
            f"{len(repeated)} calls repeated, as OneFlow died of SIGSEGV or hung as it exited: {repeated}"
        )

    if LEFT_OUT:
        software = ", ".join(sorted(set(LEFT_OUT)))
        left_out = f"{len(LEFT_OUT)} tests are left out, as they install {software}"
        terminalreporter.write_line(f"{left_out}: --install runs them")


def pytest_unconfigure(config):
    """The last line, after pytest's own."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if Checks.runs and reporter:
        numbers = f"recipes: {len(Checks.recipes)}, runs against numpy: {Checks.runs},"
        reporter.write_line(f"{numbers} in {time.monotonic() - BEGIN:.0f} s")
