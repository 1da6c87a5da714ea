"""Every recipe on two hosts: the proof ladder of one host, and the bytes that leave a host by its network device."""

import pytest

from harness.measure import theory
from harness.measure.sbp import Layout
from harness.pool import Pool
from harness.report import atlas
from harness.start.recipe import path_of, world_sizes
from tests.cases import CASES, ROOT, modes, sizes_of
from tests.cases.ladder import Checks, prove
from tests.hosts import NO_HOSTS

HERE = str(ROOT / "tests" / "on_rank_hosts.py")
SIZE = 1024  # rows and columns of what is moved between hosts: 4 MB
HEADERS = 0.02  # of the bytes; segments of up to 64 KB share one
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


@pytest.fixture(scope="module")
def pools(hosts):
    """A function from a world size to a pool of as many ranks, half of them on each host."""
    started = {}

    def pool(n):
        words = [hosts.on(rank * 2 // n) for rank in range(n)]
        given = (hosts.addresses[0], words)
        return started.setdefault(n, Pool(n, repeat=True, hosts=given))

    yield pool
    for one in started.values():
        one.close()


def on_two_hosts():
    """(recipe, world size, graph or not): 1 rank on each host, or 2, for every recipe of more than one rank."""
    for name in CASES:
        for n in (2, 4):
            if n in world_sizes(path_of(name)):
                for graph in modes(name):
                    yield name, n, graph


@pytest.mark.parametrize("name, n, graph", on_two_hosts())
def test_proof_ladder_on_two_hosts(hosts, pools, name, n, graph):
    facts = {"nodes": 2 if hosts.real else 1} if name == "hello_ranks" else {}
    prove(pools(n), path_of(name), name, graph, next(iter(sizes_of(name, n))), **facts)


def crossings():
    """The rows of the table in docs/clusters.md: (source, target, old SBP, new SBP, graph or not, times the tensor)."""
    found = []
    for line in (ROOT / "docs" / "clusters.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and " → " in cells[0] and cells[1].startswith("0"):
            ranks = [[int(rank) for rank in side.split(", ")] for side in cells[1].split(" → ")]
            for graph, cell in ((False, cells[2]), (True, cells[3])):
                found.append((ranks[0], ranks[-1], *cells[0].split(" → "), graph, float(cell)))
    return found


@pytest.mark.parametrize("source, target, old, new, graph, units", crossings())
def test_bytes_between_two_hosts(hosts, pools, source, target, old, new, graph, units):
    """What leaves host 0. The least of three, since whatever else is sent comes on top."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    given = {"source": source, "target": target, "old": old, "new": new, "graph": graph}
    found = [
        pools(4).call(f"{HERE}:between_hosts", rows=SIZE, columns=SIZE, **given)[0] / (4 * SIZE**2) for _ in range(3)
    ]
    Checks.that(abs(min(found) - units) <= HEADERS * max(1, units), old, new, found, "times the tensor, not", units)


def test_table_of_what_crosses_has_the_formulas():
    """Between two groups of ranks the total; among all of them, in a ring, what each rank sends to the next."""
    assert len(crossings()) == 22
    for source, target, old, new, graph, units in crossings():
        layouts = Layout(old, source), Layout(new, target)
        if graph:
            continue
        if source != target:
            copied_on = {("B", "B"): 2}.get((old, new), 0)  # among the new ranks
            assert units == atlas.expected("eager", (4, 4), (old, source), (new, target)) / 16 - copied_on
        else:
            sent = theory.Boxing((4, 4), *layouts).total / 16 / len(source)
            two_ranks_to_two = 4 / 3 if theory.collective(*layouts) == "all-to-all" else 1  # each sends to 2 of 3 there
            assert units == pytest.approx(sent * two_ranks_to_two)


STRATEGIES = {  # bytes that a step sends over a link between two ranks, in one direction, or in one after the other
    "train_data_parallel": lambda batch: 4 * 2 * WIDTH * HIDDEN,
    "train_model_parallel": lambda batch: 4 * 2 * batch * WIDTH,
    "train_pipeline": lambda batch: 4 * 2 * batch * HIDDEN,
}
WIDTH, HIDDEN, RATE = 1024, 256, 80_000_000


@MODES
@pytest.mark.parametrize(
    "batch, order",
    [
        (64, ["train_pipeline", "train_model_parallel", "train_data_parallel"]),
        (512, ["train_pipeline", "train_data_parallel", "train_model_parallel"]),
    ],
)
def test_slow_link_sets_the_order(hosts, pools, batch, order, graph):
    """Between two hosts of 80 Mbit/s the strategies are as fast as what they send is little."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    assert sorted(STRATEGIES, key=lambda name: STRATEGIES[name](batch)) == order
    sizes = {"batch": batch, "in_features": WIDTH, "hidden": HIDDEN, "out_features": WIDTH}
    more = {name: max(2, round(RATE / 8 / STRATEGIES[name](batch))) for name in order}  # steps of a second or longer
    runs = {name: [float("inf")] * 2 for name in order}  # the least: a busy machine only ever makes a run longer
    hosts.limit(f"{RATE}bit")
    try:
        for _ in range(5):
            for name in order:
                given = {"path": str(path_of(name)), "graph": graph, "more": more[name], **sizes}
                found = pools(2).call(f"{HERE}:times_of_training", **given)
                runs[name] = [min(least, max(ranks)) for least, *ranks in zip(runs[name], *found)]
            times = {name: (longer - short) / more[name] for name, (short, longer) in runs.items()}
            by_the_link = {name: STRATEGIES[name](batch) / (RATE / 8) for name in order}
            if sorted(order, key=times.get) == order:
                break
        else:
            raise AssertionError(f"seconds by step: {times}; the link takes {by_the_link}")
    finally:
        hosts.limit(None)
