"""The front door of the benchmarks and their page. Times are not tested."""

import hashlib
import json
import re

import numpy as np
import pytest

from benchmarks import bench, details, formulas, gpt, page, peers, planned, records, steps, timeline
from tests.cases import CASES, reference_gpt
from tests.cases.reference import Value


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


FOUND = records.read()


@pytest.mark.parametrize("path", bench.PAGES, ids=lambda path: path.name)
def test_a_page_has_what_was_found_and_nothing_else(path):
    assert path.read_text() == bench.PAGES[path](FOUND)


def test_each_part_has_a_section():
    assert set(bench.PARTS) == {section.__name__ for section in (page.training, page.gpt, *details.SECTIONS)}
    assert list(FOUND) == [name for name in bench.PARTS if name in FOUND]


def test_a_record_stays_when_only_the_words_of_a_recipe_change():
    source = '"""Split x."""\n\n\ndef f(x):\n    """x: (2, 4)."""\n    y = "a"  # why\n    return x\n'
    for old, new in (("Split x", "Split the rows"), ("(2, 4)", "(4, 4)"), ("# why", "# because"), ("\n\n\n", "\n")):
        assert records.code(source.replace(old, new)) == records.code(source), new
    assert records.code(source + "\n\ndef main():\n    f(1)\n") == records.code(source + "\n\ndef main():\n    f(2)\n")
    for old, new in (('"a"', '"b"'), ("return x", "return y"), ("    return x", "return x")):
        assert records.code(source.replace(old, new)) != records.code(source), new


def test_a_record_stays_until_what_it_measured_changes(monkeypatch):
    def record(cpu, digest):
        return {"machine": {"model": cpu}, "measured": digest}

    monkeypatch.setattr(records, "digest", lambda part: "new")
    kept = {"gpt": {"A": record("A", "old"), "B": record("B", "new")}, "limit": {"A": record("A", "old")}}
    assert records.current(kept) == {"gpt": {"B": kept["gpt"]["B"]}}
    more = records.added(kept, "gpt", record("C", "new"))
    assert list(more["gpt"]) == ["A", "B", "C"] and more["limit"] == kept["limit"]
    assert records.added(kept, "gpt", record("A", "new"))["gpt"]["A"]["measured"] == "new"


def test_no_page_shows_what_has_changed_since():
    assert records.current(FOUND) == FOUND, "./launch.sh bench drops it"


def test_rows_of_two_cpus_stand_side_by_side():
    both = {cpu: FOUND["limit"][next(iter(FOUND["limit"]))] for cpu in ("AMD EPYC", "Intel(R) Xeon(R) Processor")}
    lines = [line for line in details.page({"limit": both}).splitlines() if line.startswith("| OneFlow")]
    assert [line.split(" | ")[1] for line in lines] == ["AMD EPYC", "Intel Xeon"]


@pytest.mark.parametrize("theme", ["", "-dark"])
@pytest.mark.parametrize("name", [name for name in ("scaling", "sizes", "timeline", "collectives") if name in FOUND])
def test_a_plot_is_of_what_was_found_and_legible_on_a_phone(name, theme):
    last = max(FOUND[name].values(), key=lambda record: record["date"])
    mark = hashlib.sha256(json.dumps(last["data"], sort_keys=True).encode()).hexdigest()
    plot = (bench.DOCS / "pictures" / f"performance-{name}{theme}.svg").read_text()
    assert mark in plot
    assert f"pictures/performance-{name}{theme}.svg" in (bench.DOCS / "performance-details.md").read_text()
    assert float(re.search(r'viewBox="0 0 ([\d.]+)', plot).group(1)) <= 358  # px of a phone's page
    assert min(float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", plot)) >= 11


SMALL = {"batch_size": 8, "seq_len": 8, "num_layers": 1, "hidden_size": 16, "num_heads": 4}


class Numpy:
    """In place of PyTorch and JAX: trains the GPT from the file that they would get."""

    off = 0.0  # what is added to its losses

    def __init__(self, framework, ranks):
        self.ranks = ranks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def step_times(self, file=None, heads=None, kind=None, **matmuls):
        if file is None:
            return [[1.0]] * self.ranks
        w = dict(np.load(file))
        rows, losses = w.pop("rows"), reference_gpt.trained(gpt.TRAINED, **SMALL)["losses"]
        w = {name: Value(weight) for name, weight in w.items()}
        first = reference_gpt.loss_of(w, rows[0, :, :-1], rows[0, :, 1:], heads)
        assert first.exact == pytest.approx(losses[0]) and len(rows) == gpt.TRAINED
        return [{"losses": [x + self.off for x in losses], "seconds": [1.0], "update": 0.2}] * self.ranks


def test_gpt_has_the_same_losses_on_all_sides(monkeypatch):
    monkeypatch.setattr(gpt, "Peer", Numpy)
    monkeypatch.setattr(gpt, "in_turns", lambda turns, sides: {name: [side()] for name, side in sides.items()})  # once
    rows = gpt.gpt(2, print, SMALL, ranks=(2,))
    assert [row["strategy"] for row in rows] == list(gpt.KINDS)[1:]
    for row in rows:
        assert row["difference"] <= gpt.ALIKE
        assert all(seconds > 0 for side in row["parts"].values() for seconds in side.values())
    [(cpu, record), *_] = FOUND["launches"].items()
    text = page.page({"gpt": {cpu: {**record, "data": rows}}})
    assert "## A GPT" in text and "| fully sharded | 2 | OneFlow |" in text


def test_gpt_with_other_losses_is_not_timed(monkeypatch):
    monkeypatch.setattr(gpt, "Peer", Numpy)
    monkeypatch.setattr(Numpy, "off", 2e-4)
    with pytest.raises(peers.PeerError, match="one rank, 1 ranks: losses of eager .* are not those of PyTorch"):
        gpt.gpt(2, print, SMALL, ranks=(1,))


def test_flops_of_the_matmuls_of_a_gpt():
    """A weight takes 6 for each letter, a sequence's attention 12 x width x length for each letter and layer."""
    weights, letters = 12 * 4 * 512**2 + 96 * 512, 8 * 128
    whole = letters * (6 * weights + 12 * 4 * 512 * 128)
    for data, tensor in ((1, 1), (2, 1), (1, 4)):
        shapes = gpt.matmuls(data, tensor, 96, **gpt.SIZES)
        assert data * tensor * sum(2 * np.prod(shape) for shape in shapes) == whole


@pytest.mark.parametrize(
    "strategy, name, n, more",
    [
        ("data parallel", "train_data_parallel", 2, {"optimizer": "momentum"}),
        ("column-row", "train_model_parallel", 2, {}),
        ("pipeline", "train_pipeline", 2, {}),
        ("data x tensor", "train_data_tensor", 4, {}),
    ],
)
def test_bytes_of_the_formula_are_those_that_are_proven(monkeypatch, strategy, name, n, more):
    monkeypatch.setattr(formulas, "BATCH", 32)
    monkeypatch.setattr(formulas, "FEATURES", 16)
    case = CASES[name](n, batch=32, in_features=16, hidden_size=64, out_features=16, steps=1, **more)
    assert 4 * max(case.sends) == formulas.sent(strategy, n, 64)


def test_orders_are_compared_by_spearman():
    assert planned.spearman([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1)
    assert planned.spearman([1, 2, 3, 4], [9, 8, 7, 0]) == pytest.approx(-1)
    assert planned.spearman([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert planned.ranks_of([5.0, 1.0, 5.0, 9.0]).tolist() == [1.5, 0, 1.5, 3]


def test_layouts_that_are_compared_with_the_plan_are_different_and_divide():
    chosen = list(planned.layouts())
    assert len(set(chosen)) == len(chosen) == 16
    assert {layout.mesh for layout in chosen} == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    every = {layout.micro_batches(planned.BATCH_SIZE) for layout in chosen}
    assert every == {1, 4} and all(layout.micro_batch >= 1 for layout in chosen)


def test_rates_of_the_plan_are_those_that_were_measured():
    """A machine on which a step of one rank takes a second, of which the update takes a tenth."""
    model = planned.Model(**planned.SIZES, vocab_size=96)
    found = {"update": 0.1 / planned.formulas.parameters(model), "bytes": 1e9}
    cluster = planned.cluster_of(found, model, alone=1.0)
    assert cluster.flops == pytest.approx(planned.formulas.flops(model, planned.BATCH_SIZE) / 0.9)
    alone = planned.cost.cost(model, planned.cost.Layout(1, 1, 1, planned.BATCH_SIZE), planned.BATCH_SIZE, cluster)
    assert alone.time["matmuls"] == pytest.approx(0.9) and alone.time["update"] == pytest.approx(0.1, rel=0.01)


def test_lanes_of_gpipe():
    """Of two stages, as by hand: the last one waits for the first micro-batch, the first one for its gradient."""
    first, last = formulas.gpipe(2)
    assert last == [(1, 2), (2, 3), (3, 5), (5, 7)]
    assert first == [(0, 1), (1, 2), (5, 6), (7, 8)]


def test_a_thread_works_in_the_spans_of_its_samples():
    samples = [(moment / 1000, [{1, 7} if moment % 10 < 4 else {1}, {2}]) for moment in range(30)]
    assert timeline.spans(samples, 0, {1}) == [[0.0, 0.003], [0.01, 0.013], [0.02, 0.023]]
    assert timeline.spans(samples, 1, set()) == [[0.0, 0.029]]
    assert timeline.median_step([0, 9, 10, 12, 15, 90]) == (10, 12)


def test_crossing():
    assert formulas.crossing([1, 4, 16], [1, 2, 3], [2, 2.5, 2.5]) == pytest.approx(8)
    assert formulas.crossing([1, 4, 16], [3, 2, 1], [0, 0, 0]) is None
    assert formulas.crossing([1, 4], [5, 0], [0, 5]) == pytest.approx(2)
