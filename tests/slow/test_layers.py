"""The page of the ready-made layers: its tables are read, and each row is compared with runs and with numpy."""

import re
from typing import NamedTuple

import pytest

from oneflow_cookbook.pool import PoolError
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.cases.layers import expected

PAGE = (ROOT / "docs" / "layers.md").read_text()
ON_RANK_LAYERS = ROOT / "tests" / "on_rank_layers.py"
RUN = f"{ON_RANK_LAYERS}:run"
ON_RANK = ROOT / "tests" / "on_rank_refused.py"
CONTROL = 60_000  # bytes of OneFlow's own messages for a step, at most
TOLERANCE = 4e-6  # of the largest entry, or of 1
EAGER = "in eager mode only"
STRATEGIES = {  # names in the tables of what is sent -> in the first table
    "data parallel": "data",
    "column parallel": "column",
    "row parallel": "row",
    "fully sharded": "sharded",
}
ROUNDING = 1e-5  # between a single rank and several, which add in a different order

# What p ranks together send for a collective, in units of its tensor. From or to S(1), eager mode adds an all-to-all.
FORMULAS = {
    "all-gather": lambda p: p - 1,
    "reduce-scatter": lambda p: p - 1,
    "all-reduce": lambda p: 2 * (p - 1),
    "all-to-all": lambda p: (p - 1) / p,
    "all-gather from S(1)": lambda p: (p - 1) + (p - 1) / p,
    "reduce-scatter to S(1)": lambda p: (p - 1) + (p - 1) / p,
}


class Kind(NamedTuple):
    """A layer of oneflow.nn: functions from sizes to its arguments and to the shape of x.

    large: sizes to measure bytes, at which its tensors differ in size; small: sizes to compare values.
    """

    options: object
    shape: object
    large: tuple
    small: tuple


PLAIN = Kind(lambda n, m: {}, lambda n, m: (n, m), (512, 1024), (12, 6))
NORM = Kind(None, lambda n, m: (n, m), (8, 65536), (12, 6))
KINDS = {
    "Linear": Kind(
        lambda n, i, o: {"in_features": i, "out_features": o}, lambda n, i, o: (n, i), (1024, 256, 384), (12, 6, 18)
    ),
    "Embedding": Kind(
        lambda n, v, m: {"num_embeddings": v, "embedding_dim": m}, lambda n, v, m: (n,), (512, 768, 512), (12, 18, 6)
    ),
    "LayerNorm": NORM._replace(options=lambda n, m: {"normalized_shape": m}),
    "Conv2d": Kind(
        lambda n, i, o, side: {"in_channels": i, "out_channels": o, "kernel_size": 3, "padding": 1},
        lambda n, i, o, side: (n, i, side, side),
        (8, 64, 96, 16),
        (6, 6, 12, 3),
    ),
    "BatchNorm1d": NORM._replace(options=lambda n, m: {"num_features": m}),
    "BatchNorm2d": NORM._replace(options=lambda n, m: {"num_features": m}, shape=lambda n, m: (n, m, 1, 2)),
    **dict.fromkeys(("ReLU", "GELU", "Dropout", "CrossEntropyLoss"), PLAIN),
    "LSTM": Kind(
        lambda n, i, o: {"input_size": i, "hidden_size": o}, lambda n, i, o: (4, n, i), (512, 256, 128), (6, 4, 6)
    ),
}
KINDS_OF_TITLE = {  # if the heading is not the name of the layer
    "Linear as Column, Row": ["Linear"],
    "BatchNorm1d, BatchNorm2d": ["BatchNorm1d", "BatchNorm2d"],
    "LSTM, h0 S(1)": ["LSTM"],
    "clip_grad_norm_, in a graph clip_grad_max_norm": ["Linear"],
}


class Row(NamedTuple):
    """A row of a table of the page, for one layer.

    sbps: of "x", "out" and the parameters by name, "W" being all. sends: {"forward", "backward" or "clip": {"x", "W"
    or "out": (how much of it one of 2 ranks sends, in which collectives)}}. graph: the same for a graph's call, or how
    it fails; None if the graph sends what eager mode does.
    """

    title: str
    kind: str
    strategy: str
    sbps: dict
    sends: dict
    graph: object
    wrong: bool

    @property
    def name(self):
        return f"{self.title}: {self.kind}, {self.strategy}, x {self.sbps['x']}"

    @property
    def clips(self):
        return "clip" in self.sends


WITH_WEIGHTS = ("Linear", "Embedding", "LayerNorm", "Conv2d", "BatchNorm1d, BatchNorm2d")
LEFT_OUT = {  # of the tables of the page: rows that send nothing, or that are wrong
    "BatchNorm1d, BatchNorm2d": """
| **column parallel**<br>weight, bias S(0)<br>x S(1) → out S(0)<br>**graph aborts**<br>**wrong** | \
0.25 x (all-to-all) + 0.50 W (all-gather) | 0.50 x (2 × all-to-all) + 0.75 W (0.5 × all-gather, reduce-scatter) |
| **row parallel**<br>weight, bias B<br>x S(1) → out S(0)<br>in a graph: 0.50 x + 1.00 W<br>**wrong** | 0.25 x \
(all-to-all) | 0.50 x (2 × all-to-all) + 1.00 W (all-reduce) |
""",
    **dict.fromkeys(
        ("ReLU", "GELU"),
        """
| **data parallel**<br>x S(0) → out S(0) | 0 | 0 |
| **row parallel**<br>x S(1) → out S(1) | 0 | 0 |
""",
    ),
    "Dropout": """
| **data parallel**<br>x S(0) → out S(0)<br>**wrong** | 0 | 0 |
| **row parallel**<br>x S(1) → out S(1)<br>**wrong** | 0 | 0 |
| **row parallel**<br>x P → out S(0)<br>**wrong** | 0.50 x (reduce-scatter) | 0.50 x (all-gather) |
""",
}


def rows():
    """Of the table of each section, of the one that holds for all layers with weights, and those that are left out."""
    text = PAGE.split("## What each layer sends")[1].split("## What OneFlow refuses")[0]
    for_all, *parts = text.split("\n### ")
    for section in parts:
        title = section.splitlines()[0]
        lines = cells_of(section)
        header = lines[0] if lines else ["", "forward", "backward"]
        more = cells_of(LEFT_OUT.get(title, ""))
        if title in WITH_WEIGHTS:
            wrong = "<br>**wrong**" if title.startswith("BatchNorm") else ""
            more += [[layout + wrong, *cells] for layout, *cells in cells_of(for_all)[2:]]
        for cells in lines[2:] + more:
            for kind in KINDS_OF_TITLE.get(title, [title]):
                yield row_of(title, kind, header[1:], cells)


def cells_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def row_of(title, kind, phases, cells):
    strategy, *facts = cells[0].split("<br>")
    sbps, graph = {}, None
    for fact in facts:
        if " → " in fact:
            sbps["x"], sbps["out"] = re.fullmatch(r"x (\S+) → out (\S+)", fact).groups()
        elif fact.startswith("in a graph: "):
            graph = multiples(fact.partition(": ")[2])
        elif fact.startswith("**graph "):
            graph = fact.strip("*").partition(" ")[2]
        elif fact != "**wrong**":
            names, _, sbp = fact.rpartition(" ")
            sbps.update(dict.fromkeys(names.split(", "), sbp))
    sends = {phase: multiples(cell) for phase, cell in zip(phases, cells[1:])}
    return Row(title, kind, strategy.strip("*"), sbps, sends, graph, "**wrong**" in facts)


def multiples(cell):
    """{unit: (multiple, [(how often, collective)])} of "0.25 x (all-to-all) + 0.50 W (all-gather)"; {} of "0"."""
    units = {}
    for part in cell.split(" + ") if cell != "0" else []:
        multiple, unit, collectives = re.fullmatch(r"([\d.]+) (\w+)(?: \((.+)\))?", part).groups()
        words = collectives.split(", ") if collectives else []
        counted = [re.fullmatch(r"(?:([\d.]+) × )?(.+)", word).groups() for word in words]
        units[unit] = float(multiple), [(float(times or 1), name) for times, name in counted]
    return units


ROWS = {row.name: row for row in rows()}


def run(pool, row, sizes, **options):
    """What on_rank_layers.run returns on each rank for the layer of a row."""
    kind = KINDS[row.kind]
    how = None
    if row.strategy == "fully sharded":
        how = f"{path_of('fully_sharded_module')}:shard"
    elif row.title == "Linear as Column, Row":
        how = f"{path_of('tensor_parallel_module')}:{row.strategy.split()[0].title()}"
    splits_batch = row.sbps["x"] == "S(0)" or row.kind == "LSTM"  # and with it the targets, or h0
    layout = {"x": row.sbps["x"], "more": row.sbps["x"] if splits_batch else "B", "sbps": row.sbps, "how": how}
    layer = {"kind": row.kind, "options": kind.options(*sizes), "shape": kind.shape(*sizes)}
    return pool.call(RUN, **layer, layout=layout, clip=row.clips, **options)


def measured_eager(pool):
    return {name: run(pool, row, KINDS[row.kind].large) for name, row in ROWS.items()}


def measured_graph(pool):
    """Of the rows that a graph runs."""
    rows = {name: row for name, row in ROWS.items() if not isinstance(row.graph, str)}
    return {name: run(pool, row, KINDS[row.kind].large, graph=True) for name, row in rows.items()}


def background_calls(item):
    """What a test needs: see pools.py."""
    calls = {2: {("layers", 2): (2, measured_eager), ("layers in a graph", 2): (2, measured_graph)}}
    calls[4] = {("layers", 4): (4, measured_eager)}
    return calls.get(item.callspec.params.get("ranks"), {}) if hasattr(item, "callspec") else {}


def sent(by_rank, phase):
    """The bytes that all ranks sent."""
    return sum(result["sent"][phase] for result in by_rank)


def by_formula(collectives, ranks):
    """What all ranks send of a tensor, in units of it."""
    return sum(times * FORMULAS[name](ranks) for times, name in collectives)


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_send_what_the_page_says(measured, ranks):
    for name, by_rank in measured("layers", ranks).items():
        row, sizes = ROWS[name], by_rank[0]["sizes"]
        for tensor, sbp in by_rank[0]["sbp"].items():
            Checks.equal(sbp, row.sbps.get(tensor, row.sbps.get("W")), name, tensor, "SBP")
        for phase, units in row.sends.items():
            wanted = 0
            for unit, (multiple, collectives) in units.items():
                times = by_formula(collectives, ranks)
                if ranks == 2:
                    Checks.that(abs(multiple - times / 2) < 0.005, name, unit, multiple, "is not that of", collectives)
                wanted += sizes[unit] * times
            sent_here = sent(by_rank, phase)
            Checks.sent(sent_here, wanted, CONTROL, name, phase, ranks, "ranks")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row.graph, str)])
def test_graphs_fail_as_the_page_says(pools, name):
    row = ROWS[name]
    with pytest.raises(PoolError) as failed:
        run(pools(2), row, KINDS[row.kind].small, graph=True)
    Checks.equal("aborts" if failed.value.signal else "is refused", row.graph, name, "graph")


@pytest.mark.parametrize("ranks", [2])
def test_graphs_send_what_the_page_says(measured, ranks):
    eager = measured("layers", ranks)
    for name, by_rank in measured("layers in a graph", ranks).items():
        row = ROWS[name]
        Checks.equal(by_rank[0]["sbp"], eager[name][0]["sbp"], name, "SBPs in a graph")
        wanted = sent(eager[name], "forward") + sent(eager[name], "backward")
        if row.graph is not None:
            here = sum(ranks * by_rank[0]["sizes"][unit] * multiple for unit, (multiple, _) in row.graph.items())
            wanted = wanted + here if row.clips else here
        Checks.sent(sent(by_rank, "graph"), wanted, CONTROL, name, "graph")


@pytest.mark.parametrize("n, graph", [(2, False), (3, False), (2, True)])
def test_values_are_those_of_numpy(pools, n, graph):
    for name, row in ROWS.items():
        if graph and isinstance(row.graph, str):  # it aborts, or is refused
            continue
        [result, *_] = run(pools(n), row, KINDS[row.kind].small, graph=graph, arrays=True)
        arrays = result["arrays"]
        values = expected(row.kind, arrays, clipped=row.clips)
        off = {key: abs(arrays[key] - value).max() / max(abs(value).max(), 1) for key, value in values.items()}
        wrong = max(off.values()) > TOLERANCE or result["same mask"]
        Checks.equal(wrong, row.wrong, name, n, "graph" if graph else "eager", off, "wrong")


def test_first_table_sums_up_the_rows():
    answers = dict(re.findall(r"^\| \[(.+?)\]\(#.+?\) \| (.+) \|$", PAGE, flags=re.MULTILINE))
    assert set(answers) == {row.title for row in ROWS.values()}
    for title, cell in answers.items():
        strategies = dict(answer.partition(": ")[::2] for answer in cell.split("<br>"))  # "" means all of them
        verdicts = set()
        for row in (row for row in ROWS.values() if row.title == title):
            verdict = "**wrong**" if row.wrong else EAGER if isinstance(row.graph, str) else "yes"
            verdicts.add(verdict)
            assert strategies.get(verdict) == "" or STRATEGIES[row.strategy] in strategies[verdict], row.name
        assert set(strategies) == verdicts, title


RECURRENT, CELLS = ("LSTM", "GRU", "RNN"), ("LSTMCell", "GRUCell", "RNNCell")
REFUSED = [  # in the order of the page: words of its entry, function of on_rank_refused.py, arguments, kinds of layers
    ("and no h0", "forward", {"sbp": "S(0)", "batch_first": True}, RECURRENT),
    ("in an nn.Graph with a split batch", "forward", {"sbp": "S(1)", "graph": True}, RECURRENT),
    ("on local tensors", "local", {}, RECURRENT),
    ("RNNCell without h0", "cell", {}, CELLS),
    ("nn.SyncBatchNorm", "sync_batch_norm", {}, ()),
    ("nn.MultiheadAttention", "missing", {"name": "MultiheadAttention"}, ()),
]
ENTRIES = re.findall(r"^\*\*(.+?)\*\*\. (?:.+\n)+\n```text\n(.*)\n```", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: REFUSED[number][0])
def test_error_of_a_refused_layer_is_that_of_the_page(pools, number):
    words, function, arguments, kinds = REFUSED[number]
    entry, message = ENTRIES[number]
    assert len(ENTRIES) == len(REFUSED) and words in entry
    for kind in kinds or [None]:
        keywords = {**arguments, "kind": kind} if kind else arguments
        if "graph" in arguments:  # one rank raises, and the others wait
            with pytest.raises(PoolError) as failed:
                pools(2).call(f"{ON_RANK}:{function}", **keywords)
            line = re.sub(r"\x1b\[[\d;]*m", "", str(failed.value).strip().splitlines()[-1]).strip()
        else:
            line = next(filter(None, pools(2).call(f"{ON_RANK}:error", what=function, **keywords)))
        assert line == message, kind


@pytest.mark.parametrize(
    "function, arguments, kinds, graph",
    [
        ("recurrent_with_h0", {"sbp": "S(0)", "batch_first": True}, RECURRENT, False),
        ("recurrent_with_h0", {"sbp": "S(1)"}, RECURRENT, False),
        ("cell_in_a_loop", {}, CELLS, False),
        ("cell_in_a_loop", {}, CELLS, True),
    ],
)
def test_what_is_used_instead_is_right(pools, function, arguments, kinds, graph):
    for kind in kinds:
        off = pools(2).call(f"{ON_RANK}:{function}", kind=kind, graph=graph, **arguments)
        Checks.that(max(off) <= ROUNDING, kind, function, arguments, "is off by", off)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_optimizer_clips_each_group_by_its_own_norm(pools, graph):
    for sizes, norm in (([2], 1.0), ([1, 1], 2**0.5)):
        for own in pools(2).call(f"{ON_RANK_LAYERS}:norm_of_update", group_sizes=sizes, graph=graph):
            Checks.that(abs(own - norm) <= 1e-4, sizes, "update by", own, "but should by", norm)
