"""The front door of the benchmarks and their page. Times are not tested."""

import json

import numpy as np
import pytest

from benchmarks import bench, peers
from tests.cases import CASES, reference_gpt
from tests.cases.reference import Value


def test_without_the_peers_it_says_how_to_get_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit) as end:
        bench.main([])
    assert end.value.code == 2
    assert "pip install -r benchmarks/requirements-peers.txt" in capsys.readouterr().err


def test_a_part_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["steps"])
    assert end.value.code == 2
    assert "steps: no such part; there are strategies, " in capsys.readouterr().err


def test_strategies_are_recipes():
    assert all(recipe in CASES for recipe, *_ in bench.STRATEGIES.values())


def test_the_page_has_the_results():
    results = json.loads(bench.RESULTS.read_text())
    assert bench.PAGE.read_text() == bench.page(results)
    assert set(results) == set(bench.PARTS)


def test_a_row_has_the_median_and_the_spread_of_the_turns_of_the_faster_mode():
    seconds = {"eager": [8.0, 2.0, 3.0], "graph": [9.0, 9.0, 1.0], "PyTorch": [2.0, 1.0, 1.0], "JAX": [4.0, 4.0, 1.0]}
    row = bench.row_of("column-row", 2, seconds)
    assert row["mode"] == "eager"
    assert row["ratios"] == {"PyTorch": 3.0, "JAX": 2.0}
    assert row["spread"] == {"PyTorch": [2.0, 4.0], "JAX": [0.5, 3.0]}


SMALL = {"batch_size": 8, "seq_len": 8, "num_layers": 1, "hidden_size": 16, "num_heads": 4}


class Numpy:
    """In place of PyTorch and JAX: trains the GPT from the file that they would get."""

    error = 0.0  # is added to its losses

    def __init__(self, framework, ranks):
        self.ranks = ranks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, function, file, heads, kind):
        assert function == "train_gpt"
        w = dict(np.load(file))
        rows, losses = w.pop("rows"), reference_gpt.trained(bench.GPT_STEPS, **SMALL)["losses"]
        w = {name: Value(weight) for name, weight in w.items()}
        first = reference_gpt.loss_of(w, rows[0, :, :-1], rows[0, :, 1:], heads)
        assert first.exact == pytest.approx(losses[0]) and len(rows) == bench.GPT_STEPS
        return [{"losses": [x + self.error for x in losses], "seconds": [1.0]}] * self.ranks


def test_gpt_has_the_same_losses_on_all_sides(monkeypatch):
    monkeypatch.setattr(bench, "Peer", Numpy)
    rows = bench.gpt(SMALL, ranks=(2,), turns=1)
    assert [row["strategy"] for row in rows] == list(bench.GPT_STRATEGIES)[1:]
    assert all(row["ratios"].keys() == bench.PEERS.keys() for row in rows)


def test_gpt_with_different_losses_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench, "Peer", Numpy)
    monkeypatch.setattr(Numpy, "error", 2e-4)
    with pytest.raises(peers.PeerError, match="one rank, 1 ranks: losses of eager .* are not those of PyTorch"):
        bench.gpt(SMALL, ranks=(1,), turns=1)
