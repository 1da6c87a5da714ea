"""The benchmarks' front door and page, and the settings of launch.sh that they measure. Times are not tested."""

import hashlib
import json
import re

import pytest

from benchmarks import bench, formulas, page, peers, steps
from harness.start.ranks import NodeRanks, cores_of
from tests.cases import CASES


def test_threads_that_the_user_has_set_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert NodeRanks(2, port=1).environment(0)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "cores, n, wanted",
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1], 4, [[0], [1], [0], [1]]),
        ([2, 3, 5, 7, 8], 2, [[2, 3], [5, 7]]),
        ([4], 1, [[4]]),
    ],
)
def test_each_rank_has_its_cores(cores, n, wanted):
    assert [cores_of(rank, n, cores) for rank in range(n)] == wanted


def test_without_the_peers_it_says_how_to_get_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit) as end:
        bench.main([])
    assert end.value.code == 2
    assert "pip install -r benchmarks/requirements-peers.txt" in capsys.readouterr().err


def test_strategies_are_recipes():
    assert all(script in CASES for _, script, _, _ in steps.STRATEGIES.values())


@pytest.mark.parametrize(
    "arguments, words",
    [(["steps"], "steps: no such part; there are training, "), (["--short", "suite"], "leave them out")],
)
def test_parts_that_there_are_not(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err


FOUND = json.loads(bench.FOUND.read_text())


def test_the_page_has_what_was_found_and_nothing_else():
    assert bench.PAGE.read_text() == page.page(FOUND)
    assert list(bench.PARTS) == [section.__name__ for section in page.SECTIONS]
    assert list(FOUND) in (list(bench.PARTS), list(bench.PARTS)[:-1])  # the last is the time of this suite itself


@pytest.mark.parametrize("theme", ["", "-dark"])
@pytest.mark.parametrize("name", ["scaling", "sizes", "collectives"])
def test_a_plot_is_of_what_was_found_and_legible_on_a_phone(name, theme):
    mark = hashlib.sha256(json.dumps(FOUND[name]["data"], sort_keys=True).encode()).hexdigest()
    plot = (bench.DOCS / "pictures" / f"performance-{name}{theme}.svg").read_text()
    assert mark in plot and f"pictures/performance-{name}{theme}.svg" in bench.PAGE.read_text()
    assert float(re.search(r'viewBox="0 0 ([\d.]+)', plot).group(1)) <= 358  # px of a phone's page
    assert min(float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", plot)) >= 11


@pytest.mark.parametrize(
    "strategy, name, n, more",
    [
        ("data parallel", "train_data_parallel", 2, {"optimizer": "momentum"}),
        ("column, then row", "train_model_parallel", 2, {"input_gradient": False}),
        ("pipeline", "train_pipeline", 2, {}),
        ("data x tensor", "train_data_tensor", 4, {}),
    ],
)
def test_bytes_of_the_formula_are_those_that_are_proven(monkeypatch, strategy, name, n, more):
    monkeypatch.setattr(formulas, "BATCH", 32)
    monkeypatch.setattr(formulas, "FEATURES", 16)
    case = CASES[name](n, batch=32, in_features=16, hidden=64, out_features=16, steps=1, **more)
    assert 4 * max(case.sends) == formulas.sent(strategy, n, 64)


def test_crossing():
    assert formulas.crossing([1, 4, 16], [1, 2, 3], [2, 2.5, 2.5]) == pytest.approx(8)
    assert formulas.crossing([1, 4, 16], [3, 2, 1], [0, 0, 0]) is None
    assert formulas.crossing([1, 4], [5, 0], [0, 5]) == pytest.approx(2)
