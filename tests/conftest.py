import pytest

from harness import pages
from harness.pool import Pool
from tests import test_atlas, test_official, test_set_up
from tests.cases import RECIPES
from tests.ladder import Checks


@pytest.fixture(scope="session")
def pools():
    """A function from a world size to its pool of ranks; a pool is started when it is first used."""
    started = {}
    yield lambda n: started.setdefault(n, Pool(n, repeat=True))
    for pool in started.values():
        pool.close()
        REPEATED.extend(pool.repeated)


@pytest.fixture(scope="session")
def runs(pools):
    """A function from a recipe's name, a world size and a mode to what its ledger says; measured when first asked."""
    known = {}

    def run(name, n, mode):
        if (name, n, mode) not in known:
            known[name, n, mode] = pages.recipe_run(pools(n), RECIPES / f"{name}.py", mode)
        return known[name, n, mode]

    return run


@pytest.fixture(scope="session")
def steps(early):
    """What a step of each training recipe sends and keeps, by (name, number of ranks, mode)."""
    return early["atlas"].result()[1]


REPEATED = []  # calls that were made once more because OneFlow died


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{Checks.count} checks against numpy and the declared layouts")
    if REPEATED:
        terminalreporter.write_line(f"{len(REPEATED)} calls made once more, as OneFlow died of SIGSEGV: {REPEATED}")


@pytest.fixture(scope="session", autouse=True)
def early(request, tmp_path_factory):
    """Whole jobs by name, begun before the first test: they mostly wait, so other tests run beside them."""
    jobs = {}
    modules = {item.module for item in request.session.items}
    for module in modules & {test_official, test_set_up}:
        jobs.update(module.early_jobs(tmp_path_factory))
    if any({"found", "steps"} & set(item.fixturenames) for item in request.session.items):
        jobs["atlas"] = test_atlas.measure_early()
    return jobs


def pytest_collection_modifyitems(items):
    """First those that start jobs of their own and mostly wait, last those that wait for what was begun early."""
    items.sort(key=lambda item: (bool({"found", "steps"} & set(item.fixturenames)), "pools" in item.fixturenames))
