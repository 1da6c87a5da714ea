"""`launch.sh show` and `launch.sh bytes`, on recipes and on a user's own script, on terminals of any kind."""

import contextlib
import io
import re
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from oneflow_cookbook.measure.events import ONEFLOW, SCRIPT
from oneflow_cookbook.measure.steps import Move
from oneflow_cookbook.measure.theory import Boxing, matmul_boxings, probable_boxings
from oneflow_cookbook.report import run
from oneflow_cookbook.report import show as program
from oneflow_cookbook.report.drawing import formula_in_words
from oneflow_cookbook.report.shorten import fold_blocks
from tests.cases import ROOT
from tests.jobs import LAUNCH, SLEEPS, Run, ended, launch, wait_until

PLAIN = """
import oneflow as flow

ranks = flow.placement("cpu", [0, 1])
x = flow.ones(4, 6, placement=ranks, sbp=flow.sbp.split(1))
w = flow.full((6, 2), 0.5, placement=ranks, sbp=flow.sbp.split(0))
partial = flow.matmul(x, w)
out = partial.to_global(sbp=flow.sbp.broadcast)
doubled = out * 2
if flow.env.get_rank() == 0:
    print("the sum is", out.numpy().sum())  # each rank has it all: it waits for none
"""

WITH_MAIN = """
import argparse
import oneflow as flow
from oneflow import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(6, 2, bias=False))

    def forward(self, data):
        hidden = self.layer(data)
        return self.head(hidden)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    rows = parser.parse_args().rows
    ranks = flow.placement("cpu", [0, 1])
    net = Net().to_global(placement=ranks, sbp=flow.sbp.broadcast)
    optimizer = flow.optim.SGD(net.parameters(), lr=0.1)
    for step in range(24):
        x = flow.randn(rows, 8, placement=ranks, sbp=flow.sbp.split(0))
        out = net(x)
        loss = out.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.numpy())

if __name__ == "__main__":
    main()
"""

WITH_LAYERS = """
import oneflow as flow
from oneflow import nn

B, S = flow.sbp.broadcast, flow.sbp.split

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.relu(self.up(self.norm(x))))

class Row(nn.Linear):
    def forward(self, x):
        return flow.matmul(x, self.weight, transpose_b=True).to_global(sbp=B) + self.bias

class Column(nn.Linear):
    def forward(self, x):
        return flow.matmul(x.to_global(sbp=B, grad_sbp=B), self.weight, transpose_b=True) + self.bias

def train(pinned=False, graph=False):
    ranks = flow.placement.all("cpu")
    net = nn.Sequential(Block(), Block()).to_global(placement=ranks, sbp=B)
    for block in net:
        for layer, kind, dims in ((block.up, Column, (S(0), S(0))), (block.down, Row, (S(1), B))):
            layer.weight = nn.Parameter(layer.weight.to_global(sbp=dims[0]))
            layer.bias = nn.Parameter(layer.bias.to_global(sbp=dims[1]))
            layer.__class__ = kind if pinned else nn.Linear
    for step in range(3):
        net(flow.ones(256, 128, placement=ranks, sbp=B)).sum().backward()
"""

WITH_RUN_OF_N = """
import sys
import oneflow as flow

class Scaled(flow.nn.Graph):
    def build(self, x):
        return (x * 2).to_global(sbp=flow.sbp.broadcast)

def run(n):
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    x = flow.ones(n, 4, placement=ranks, sbp=flow.sbp.split(0))
    return Scaled()(x)

if __name__ == "__main__":
    y = run(int(sys.argv[1]))
    sys.exit(0)
"""


@pytest.fixture
def show(pools, monkeypatch, capfd, tmp_path):
    """The program in this process, on ranks that run already; script: the text of mine.py in the current folder."""
    monkeypatch.setattr(run, "Pool", lambda n, timeout: contextlib.nullcontext(pools(n)))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def call(command, *arguments, script=None, code=0):
        if script:
            (tmp_path / "mine.py").write_text(script)
        monkeypatch.chdir(tmp_path if script else ROOT)
        returned = program.main(command, [str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert returned == code, err
        return SimpleNamespace(out=out, err=err)

    return call


def lines(out):
    """Each row of the table as a list of its columns, and each move as a text."""
    matches = re.findall(r"^  (?:  ↓ (.*)|(\S.*| {4,}\S.*))$", out, flags=re.MULTILINE)
    return [move or [cell for cell in re.split(" {2,}", row.rstrip())] for move, row in matches]


def steps(out):
    """The tensors and moves in their order: "x S(0)" and "x @ w = out: no communication"."""
    named = [line for line in lines(out) if isinstance(line, str) or line[0]]
    return [line if isinstance(line, str) else f"{line[0]} {line[2]}" for line in named if line[0] != "tensor"]


def ends_with(out, *last_lines):
    """Whether these are the last lines of what is printed."""
    return out.splitlines()[-len(last_lines) :] == list(last_lines)


def drawn(out):
    """What each rank holds, by tensor: a list for each line of ranks."""
    shards, name = {}, None
    for line in (line for line in lines(out) if not isinstance(line, str)):
        name = line[0] or name
        shards.setdefault(name, []).append(line[3:] if line[0] else line[1:])
    return shards


def test_show_draws_each_tensor_with_what_moves_between(show):
    job = show("show", "recipes/row_parallel.py", "--batch", 4, "--in-features", 4)
    assert lines(job.out) == [
        ["tensor", "shape", "SBP", "rank 0", "rank 1"],
        ["x", "(4, 4)", "S(1)", "(4, 2) columns 0-1", "(4, 2) columns 2-3"],
        ["w", "(4, 8)", "S(0)", "(2, 8) rows 0-1", "(2, 8) rows 2-3"],
        ["partial", "(4, 8)", "P", *["(4, 8) addend"] * 2],
        "partial -> out: P -> B, all-reduce, 128 B from each rank by the formula",
        ["out", "(4, 8)", "B", *["(4, 8) whole"] * 2],
    ]
    assert ends_with(
        job.out,
        "Not listed: 1 matmul of 0 B.",
        "In the run, all ranks together: your code asks for 1 move (partial -> out: 256 B); "
        "OneFlow adds none in layers and matmuls.",
    )


def test_script_without_functions_is_run_and_traced(show):
    job = show("show", "mine.py", script=PLAIN)
    assert steps(job.out) == [
        *("x S(1)", "w S(0)", "partial P"),
        *("partial -> out: P -> B, all-reduce, 32 B from each rank by the formula", "out B", "doubled B"),
    ]
    assert "the sum is" not in job.out and drawn(job.out)["x"] == [["(4, 3) columns 0-2", "(4, 3) columns 3-5"]]


def test_parameters_have_their_path_and_steps_that_come_again_are_counted(show):
    job = show("show", "mine.py", "--rows", 6, script=WITH_MAIN)
    names = ["layer.weight", "layer.bias", "head.1.weight"]
    sizes = [("head.1.weight", 48), ("layer.bias", 24), ("layer.weight", 192)]
    assert steps(job.out) == [
        *("Net.to_global: local -> B, local to global", *(f"{name} B" for name in names)),
        *("x S(0)", "hidden S(0)", "head.0() S(0)", "out S(0)", "loss P"),
        "backward: the gradients (24 times)",
        *(
            f"  gradient of {name}: P -> B, all-reduce, {b} B from each rank by the formula (24 times)"
            for name, b in sizes
        ),
        *(f"{name}.grad B" for name in names),
        "loss.numpy(): P -> B, all-reduce, 4 B from each rank by the formula",
    ]
    job = show("show", "mine.py", "--row", "x", script=WITH_MAIN, code=2)
    assert job.err == "launch.sh: mine.py: argument --rows: invalid int value: 'x'\n"


def test_moves_in_a_model_name_the_layer(show):
    job = show("show", "mine.py", "--pinned", script=WITH_LAYERS)
    shown = steps(job.out)
    assert "0-1.down: P -> B, all-reduce, 131 kB from each rank by the formula (3 times each)" in shown
    assert not any("nothing" in line for line in shown)
    [backward] = [line for line in shown if "backward of" in line]
    assert backward == "  backward of 0-1.up: P -> B, all-reduce, 131 kB from each rank by the formula (3 times each)"
    assert job.out.endswith(
        ": your code asks for 4 moves (0-1.down, 0-1.up: 1.05 MB); OneFlow adds none in layers and matmuls.\n"
    )


def test_moves_that_no_line_asks_for_are_listed(show):
    job = show("bytes", "mine.py", script=WITH_LAYERS)
    assert re.search(
        r"\nPer step, .*: your code asks for no move; OneFlow adds 2 more \(0, 1: about \d+ kB\); ", job.out
    )
    implicit = re.findall(r"inside (\S+) \((.*?)\), 3 times +│ OneFlow moved an operand", job.out)
    assert implicit == [("0", "B -> B"), ("1", "B -> B")]  # the sum with x, which is B, of what is P
    assert re.findall(r"backward of (\S+),", job.out) == ["1.norm", "0.norm"]
    assert "in eager mode it does not tell which ones. Add --graph: there each move is listed." in job.out


def test_gradients_of_a_graph_are_told_from_moves_that_oneflow_inserts(show):
    steps_of = "Per step, all ranks together: your code asks for"
    job = show("bytes", "train_data_parallel", "--graph")
    inserted = "OneFlow adds none; the gradients take 2 moves (model.w0, model.w1: 512 B)."
    assert re.search(rf"\n{steps_of} 1 move \(loss.numpy\(\): 8 B\); {re.escape(inserted)}\n$", job.out)
    job = show("show", "-n", 2, "pipeline_module", "--graph")
    assert f"{steps_of} 3 moves" in job.out and "OneFlow adds none" in job.out.splitlines()[-1]
    assert job.out.endswith("A graph's moves are counted once, not for each micro-batch.\n")


def test_memory_of_each_rank_is_shown_on_request(show):
    job = show("show", "--memory", "train_data_parallel", "--hidden-size", 1000)
    rows = re.findall(r"│ +(\d) │ +\S+ .B │ +(.*?) │ +(.*?) │ +(.*?) │ +\S+ .?B │\n", job.out)
    assert rows == [(rank, "32 kB", "32 kB", "64 kB") for rank in "01"], job.out  # Adam
    assert "Per step, " in job.out.splitlines()[-1]
    assert show("bytes", "--memory", "data_parallel", code=2).err == "launch.sh: bytes has no --memory, but show has\n"
    refused = show("show", "--silent", 3, "data_parallel", code=2).err
    assert refused == "launch.sh: show has no --silent: it is an option of jobs\n"
    assert "bytes runs on one host" in show("bytes", "--nnodes", 2, "data_parallel", code=2).err


def named(name, **fields):
    return Move(name, 5, None, **{"times": 2, "size": 8, "why": SCRIPT, **fields})


def test_equal_blocks_are_written_once():
    down = [named(f"blocks.{block}.down", size=9 if block == 3 else 8) for block in range(6)]
    assert [item.name for item in fold_blocks(down)] == ["blocks.0-2,4-5.down", "blocks.3.down"]
    more = [
        named(name) for name in ("layers.1.experts.0.up", "layers.1.experts.1.up", "layers.2.experts.0.up", "w0", "w1")
    ]
    assert [item.name for item in fold_blocks(more)] == ["layers.1-2.experts.0.up", "layers.1.experts.1.up", "w0", "w1"]
    for fields in ({"times": 3}, {"line": 6}, {"change": "P -> B"}, {"why": ONEFLOW}, {"collective": "send"}):
        pair = [named("a.0.x"), replace(named("a.1.x"), **fields)]
        assert fold_blocks(pair) == pair, fields
    measured = [named(f"a.{block}.x") for block in range(3)]
    for move, sent in zip(measured, ([500_000, 0], [509_000, 900], [600_000, 0])):
        move.sent = sent
    assert [item.name for item in fold_blocks(measured)] == ["a.0-1.x", "a.2.x"]


def test_run_that_needs_arguments_is_called_by_the_script_itself(show):
    job = show("show", "-n", 3, "mine.py", "6", script=WITH_RUN_OF_N)
    assert steps(job.out) == [
        *("x S(0)", "a call of Scaled: all-gather, 64 B from each rank by the formula"),
        *("scalar_mul -> output 0: S(0) -> B, all-gather, 64 B from each rank by the formula", "y B"),
    ]


def test_show_draws_a_mesh_as_a_mesh(show):
    job = show("show", "recipes/layouts/two_d_sbp.py", "--graph")
    assert drawn(job.out)["out"] == [
        ["rank 0 (2, 4) rows 0-1, columns 0-3", "rank 1 (2, 4) rows 0-1, columns 4-7"],
        ["rank 2 (2, 4) rows 2-3, columns 0-3", "rank 3 (2, 4) rows 2-3, columns 4-7"],
    ]
    assert "all-gather along axis 0" in job.out and "↓ a call of LayerGraph: " in job.out


@pytest.mark.parametrize(
    "old, new, words",
    [
        (("P", [0, 1]), ("B", [0, 1]), "120 B from each rank"),
        (("S(0)", [0, 1]), ("B", [0, 1]), "120 B in all"),  # 5 rows: rank 0 sends three of them, rank 1 two
        (("B, S(1)", [[0, 1], [2, 3]]), ("B, B", [[0, 1], [2, 3]]), "60 B from each rank"),
        (("B", [0]), ("B", [1]), "120 B in all"),
    ],
)
def test_bytes_are_those_of_each_rank_if_all_send_as_much(old, new, words):
    move = Move("x", 1, None, boxings=[Boxing((5, 6), old, new, item=4)])
    assert formula_in_words(move) == words


def all_reduce(out):
    """The cells of the one all-reduce in what `bytes` lists."""
    [row] = [line for line in out.splitlines() if "all-reduce" in line]
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_bytes_lists_every_step(show):
    sizes = ("--batch", 768, "--in-features", 64, "--out-features", 1024)
    job = show("bytes", "-n", 3, "recipes/row_parallel.py", *sizes)
    cells = all_reduce(job.out)
    text = (ROOT / "recipes" / "row_parallel.py").read_text().splitlines()[int(cells[0]) - 1]
    assert "partial.to_global(" in text
    assert cells[1:3] == ["partial -> out (P -> B)", "all-reduce"]
    *sent, total, formula = (int(cell.replace(",", "")) for cell in cells[3:8])
    assert formula == 2 * 2 * 768 * 1024 * 4 and sum(sent) == total and 1 <= total / formula < 1.02
    assert cells[8] == f"{total / formula:.3f}"
    assert "between the steps" in job.out and "\x1b" not in job.out


def test_bytes_of_small_tensors_are_marked_as_inexact(show):
    job = show("bytes", "recipes/row_parallel.py")
    cells = all_reduce(job.out)
    assert all(re.fullmatch(r"~[\d,]+", cell) for cell in cells[3:6]) and cells[6:8] == ["256", ""]
    assert "Tensors under 1 MB: what was measured is marked with ~" in job.out
    job = show("show", "recipes/row_parallel.py", "--batch", 512, "--out-features", 512)
    assert re.search(r"all-reduce, 1.05 MB from each rank by the formula, sent by rank: 1.05 MB, 1.05 MB\n", job.out), (
        job.err
    )
    assert "Tensors under 1 MB" not in job.out
    for arguments, script in ((["train_data_parallel"], None), (["mine.py"], WITH_LAYERS)):
        out = show("show", *arguments, script=script).out
        assert "Tensors under 1 MB: what was measured is not shown, or marked with" in out, arguments
        assert ("about" in out.splitlines()[-1]) == bool(script), out  # no formula knows what OneFlow adds


# SBPs of x and w, whether w is transposed as in nn.Linear, SBP of the product.
LEGAL_MATMULS = [
    ("B", "S(0)", True, "S(1)"),
    ("B", "S(1)", False, "S(1)"),
    ("P", "B", False, "P"),
]
LEGAL_BATCHED_MATMULS = [
    ("S(1)", "S(1)", False, "S(1)"),  # heads
    ("S(2)", "B", False, "S(2)"),  # rows of each matrix
    ("B", "S(3)", False, "S(3)"),
    ("B", "S(2)", True, "S(3)"),
    ("S(3)", "S(2)", False, "P"),
    ("S(0), S(1)", "S(0), S(1)", True, "S(0), S(1)"),
    ("P", "B", False, "P"),
]


def boxings(dims, x, w, transposed, product, ranks=(0, 1)):
    x, w = ({"sbp": sbp, "ranks": ranks, "shape": (4,) * dims, "item": 4} for sbp in (x, w))
    return matmul_boxings([x, w], {"sbp": product}, (False, transposed))


def test_matmul_moves_nothing_if_its_pair_of_sbps_is_legal():
    for dims, matmuls in ((2, LEGAL_MATMULS), (4, LEGAL_BATCHED_MATMULS)):
        for matmul in matmuls:
            assert boxings(dims, *matmul) == [], matmul
    assert [name for name, _ in boxings(2, "B", "S(0)", False, "S(1)")] == ["w"]
    assert boxings(4, "B, S(1)", "S(0), S(1)", False, "B, S(1)", [[0, 1]]) == []  # one rank on the first axis
    assert boxings(4, "B, S(1)", "S(0), S(1)", False, "B, S(1)", [[0, 1], [2, 3]]) is None
    assert boxings(2, "S(0)", "S(0)", True, "S(0)") is None  # OneFlow has moved something, not known what
    for x, w in (("S(1)", "S(0)"), ("S(2)", "S(2)"), ("S(3)", "S(3)")):
        assert boxings(4, x, w, False, x) is None


def probably(x, w, product, sent, ranks=(0, 1)):
    """What probable_boxings says of x @ w.T, where x and w have 256 bytes each."""
    x, w = ({"sbp": sbp, "ranks": ranks, "shape": (8, 8), "item": 4} for sbp in (x, w))
    boxings = probable_boxings([x, w], {"sbp": product}, (False, True), sent)
    return boxings and [f"{name} {boxing.change}" for name, boxing in boxings]


def test_matmul_names_what_probably_moved_where_the_sbps_and_the_bytes_leave_one_answer():
    assert probably("S(0)", "S(0)", "S(0)", None) == ["w S(0) -> B"]
    assert probably("S(0)", "S(0)", "S(0)", 600) is None  # the gather sends 256
    assert probably("S(0)", "S(1)", "P", None) is None
    assert probably("S(0)", "S(1)", "P", 128) == ["x S(0) -> S(1)"]
    assert probably("S(1)", "S(0)", "S(1)", 384) == ["x S(1) -> B"]  # eager mode sends half more
    mesh = [[0, 1], [2, 3]]
    assert probably("S(0), B", "B, S(1)", "S(0), S(1)", None, mesh) == ["w B, S(1) -> B, S(0)"]


def test_axes_of_a_single_rank_do_not_count():
    for old, ranks, new in (("B, P", [[0, 1]], "B"), ("P, S(0)", [[0], [1]], "B"), ("P, P", [[0, 1]], "B")):
        boxing = Boxing((4,), (old, ranks), (new, [0, 1]), item=4)
        assert (boxing.collective, boxing.total) == ("all-reduce", 32), old
    assert Boxing((4,), ("S(0), B", [[0, 1]]), ("B, B", [[0, 1]])).total == 0
    assert Boxing((4,), ("B, P", [[0, 1], [2, 3]]), ("B", [0, 1, 2, 3])).total is None


@pytest.mark.parametrize(
    "text, arguments, words",
    [
        ("def run(a=1): return {}", "--b 2", "unrecognized arguments: --b 2; the parameters of its run are --a"),
        ("def run(a=None): return {}", "--a x", "argument --a: invalid int value: 'x'; the parameters of its run are"),
        ("def run(:", "", "(mine.py, line 1)"),
    ],
)
def test_options_that_run_does_not_have_are_refused(show, text, arguments, words):
    job = show("bytes", "-n", 1, "mine.py", *arguments.split(), script=text, code=2)
    assert not job.out and job.err.startswith("launch.sh: mine.py: ") and words in job.err and job.err.count("\n") == 1


@pytest.mark.parametrize(
    "line, words",
    [
        ("row_parallel --batch -1", "--batch must be 1 or more, got -1"),
        ("row_parallel --in-features 0", "--in-features must be 1 or more, got 0"),
        ("train_pipeline --micro-batches 0 --graph", "--micro-batches must be 1 or more, got 0"),
        ("data_parallel --seed -1", "--seed must be 0 or more, got -1"),
    ],
)
def test_sizes_of_a_recipe_that_are_too_small_are_refused(show, line, words):
    for command in ("show", "bytes"):
        job = show(command, "-n", 2, *line.split(), code=2)
        assert not job.out and job.err.startswith("launch.sh: recipes/") and job.err.endswith(f": {words}\n"), job.err


@pytest.mark.parametrize(
    "command, words",
    [
        ("show -n 3 llama", "llama.py: --tensor 3 does not fit 4 heads with 2 of keys and values: type --tensor"),
        ("bytes -n 4 gpt --batch-size 7", "gpt.py: --data 4 does not divide the 7 rows of a batch; these do: 1, 7"),
        ("show -n 4 gpt --tensor 3", "gpt.py: data 1 x tensor 3 x pipeline 1 must be the number of ranks, 4"),
    ],
)
def test_what_a_recipe_refuses_is_refused_in_a_line(show, command, words):
    job = show(*command.split(), code=2)
    assert job.err.splitlines()[-1].startswith(f"launch.sh: {words}") and "Traceback" not in job.err and not job.out


def test_numbers_of_a_script_of_the_user_may_be_negative(show):
    job = show("show", "-n", 1, "mine.py", "--a", -2, script="def run(a=1): assert a == -2")
    assert job.out == "mine.py --a -2 on 1 ranks\n\nIt makes no global tensor.\n"


def test_script_without_global_tensors(show):
    job = show("show", "-n", 1, "mine.py", "--a", 2, script="def run(a=1): return 5")
    assert job.out == "mine.py --a 2 on 1 ranks\n\nIt makes no global tensor.\n"


def test_tensor_that_would_leave_a_rank_with_nothing_is_refused(show):
    job = show("show", "recipes/data_parallel.py", "--batch", 1, code=2)
    text = (ROOT / "recipes" / "data_parallel.py").read_text().splitlines()
    [line] = [number for number, words in enumerate(text, 1) if "x = flow.tensor(" in words]
    assert job.err.startswith(f"launch.sh: data_parallel.py:{line}: a tensor of shape (1, 5) cannot be split(0) over 2")
    assert job.err.endswith(": a rank would hold nothing; make that size 2 or more\n") and not job.out
    job = show("bytes", "recipes/model_parallel.py", "--out-features", 1, "--graph", code=2)
    assert "a tensor of shape (5, 1) cannot be split(1) over 2 ranks" in job.err
    begin = 'import oneflow as flow\nranks, B, S = flow.placement("cpu", [0, 1]), flow.sbp.broadcast, flow.sbp.split\n'
    for line, shape in (
        ("flow.randn(1, 5, placement=ranks, sbp=S(0))", "(1, 5)"),
        ("flow.ones(2, placement=ranks, sbp=B).sum(0, keepdim=True).to_global(sbp=S(0))", "(1,)"),
    ):
        job = show("show", "mine.py", script=f"{begin}x = {line}\n", code=2)
        assert job.err.startswith(f"launch.sh: mine.py:3: a tensor of shape {shape}"), job.err
        assert not job.out and job.err.count("\n") == 1


def test_what_is_not_there_is_refused(show):
    assert "no_such.py: no such file" in show("show", "no_such.py", code=2).err
    assert "name a Python script" in show("show", code=2).err


NAMES = """
import multiprocessing
if multiprocessing.parent_process() is None:
    import oneflow as flow
import pool, rank, recipe_mine, recipe_script, worker
from harness.model import double
from tests.shapes import SHAPE

def in_a_process(number):
    from harness import model
    return number + model.NUMBER

def train(ROWS):
    from harness import model
    with multiprocessing.get_context("spawn").Pool(1) as processes:  # on every rank: their processes meet in OneFlow
        assert processes.map(in_a_process, [1]) == [4]
    x = flow.ones(rows, *SHAPE, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    out = model.double(x)
    return out

if __name__ == "__main__":
    train(4)
"""


@pytest.fixture
def named_like_ours(tmp_path):
    """Packages and modules of a user with names that ours have, in the folder of mine.py."""
    for package in ("harness", "tests", "recipes", "benchmarks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "harness" / "model.py").write_text("NUMBER = 3\ndef double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "shapes.py").write_text("SHAPE = (2,)\n")
    for name in ("pool", "rank", "recipe_mine", "recipe_script", "worker"):
        (tmp_path / f"{name}.py").touch()


def test_modules_of_the_user_may_have_names_of_ours(named_like_ours, tmp_path):
    """Here in a script of which a function is shown, below in one that is shown as a whole."""
    (tmp_path / "mine.py").write_text(NAMES.replace("ROWS", "rows=4"))
    job = launch("show", "mine.py", cwd=tmp_path)
    assert steps(job.out)[-1] == "out S(0)", job.out + job.err


def test_module_is_shown_with_its_package(named_like_ours, tmp_path):
    (tmp_path / "harness" / "train.py").write_text(f"from .model import NUMBER\n{NAMES.replace('ROWS', 'rows')}")
    job = launch("show", "-m", "harness.train", cwd=tmp_path)
    assert job.out.startswith("harness/train.py on 2 ranks\n") and steps(job.out)[-1] == "out S(0)", job.out + job.err


@pytest.mark.parametrize(
    "text, words",
    [
        ("def run(a=1): raise ValueError('boom')", "ValueError: boom"),
        ("import sys; sys.exit('no luck')", "the script called sys.exit('no luck')"),
    ],
)
def test_error_of_a_rank_is_shown_and_nothing_is_left(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    job = launch("show", "-n", 2, "mine.py", cwd=tmp_path)
    assert job.code == 1 and words in job.err
    assert re.match(r"launch.sh: rank [01] of 2 failed:\n", job.err)


class FakeTerminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_terminal_gets_colour_and_a_narrow_one_wraps_and_an_old_one_gets_ascii(show, monkeypatch):
    def shown_on(columns, encoding="utf-8", **variables):
        with monkeypatch.context() as changed:
            terminal = FakeTerminal(io.BytesIO(), encoding=encoding)
            changed.setattr(sys, "stdout", terminal)
            for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **variables}.items():
                changed.setenv(name, value)
            show("show", "-n", 3, "recipes/row_parallel.py", "--in-features", 4)
            terminal.flush()
        return terminal.buffer.getvalue().decode(encoding)

    wide = shown_on(120)
    assert "\x1b[" in wide and re.search(r"x .*\(4, 4\).*\(4, 2\) columns 0-1.*\(4, 1\) column 3", wide) and "↓" in wide
    plain = shown_on(40, NO_COLOR="1")
    assert "\x1b[3" not in plain
    plain = re.sub(r"\x1b\[[\d;]*m", "", plain)
    assert re.search(r"\nx \(4, 4\) S\(1\)\s+rank 0 \(4, 2\) columns 0-1", plain)
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 40
    assert "v partial -> out" in shown_on(80, encoding="ascii")


def test_time_limit_and_ctrl_c_end_every_rank(tmp_path):
    (tmp_path / "mine.py").write_text(f"import time\ndef run(a=1):\n    {SLEEPS.replace(chr(10), '; ')}")
    job = launch("show", "-n", 2, "--timeout", 3, "mine.py", cwd=tmp_path)
    assert job.code == 124 and "gave no answer in 3 s" in job.err, job.err
    job = Run(LAUNCH, "bytes", "-n", 2, "mine.py", cwd=tmp_path)
    wait_until(lambda: len(job.ranks()) == 2, "two ranks")
    ended([job.signal(signal.SIGINT)])
    assert job.code == 128 + signal.SIGINT


WITH_TOWERS = """
import oneflow as flow
from oneflow import nn

B, S = flow.sbp.broadcast, flow.sbp.split

class Tower(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.act = table, nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU())
        self.up = nn.Parameter(flow.randn(8, 8))
        self.scale = nn.Parameter(flow.randn(8, 8))

    def forward(self, ids):
        up = flow._C.identity(self.up)
        if self.up.sbp[0] == S(0):  # fully sharded
            up = up.to_global(sbp=B, grad_sbp=S(0))
        return self.act(flow.matmul(self.table(ids), up)) * (self.scale * 2.0).to_global(sbp=B)[0]

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        table = nn.Embedding(6, 8)  # in both towers
        self.a, self.b = Tower(table), Tower(table)

    def forward(self, ids):
        q, v = self.a(ids), self.b(ids)
        return flow.matmul(q, v, transpose_b=True).mean()

class Training(nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, ids):
        loss = self.model(ids)
        loss.backward()
        return loss

def train(graph=False, clip=False, sharded=False, keep=False):
    ranks = flow.placement.all("cpu")
    model = Towers().to_global(placement=ranks, sbp=B)
    if sharded:
        for tower in (model.a, model.b):
            tower.up.data, tower.scale.data = tower.up.to_global(sbp=S(0)), tower.scale.to_global(sbp=S(0))
    groups = {"params": list(model.parameters()), **({"clip_grad_max_norm": 1.0} if clip else {})}
    optimizer = flow.optim.SGD([groups], lr=0.1)
    training = Training(model, optimizer)
    ids = flow.ones(6, dtype=flow.int64, placement=ranks, sbp=S(0))
    for step in range(3):
        if graph:
            training(ids)
        else:
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keep)
"""
FUNCTIONS = """
import oneflow as flow

ranks, B, S = flow.placement.all("cpu"), flow.sbp.broadcast, flow.sbp.split
w0, w1 = (flow.ones(8, 8, placement=ranks, sbp=B, requires_grad=True) for _ in range(2))
for step in range(3):
    x = flow.ones(4, 8, placement=ranks, sbp=S(0))
    flow.matmul(flow.relu(flow.matmul(x, w0)), w1).sum().backward()
"""
IN_TOWERS = {"a.table.weight": 6, **{f"{tower}.{w}": 8 for tower in "ab" for w in ("act.0.weight", "up", "scale")}}


@pytest.mark.parametrize(
    "script, options, n",
    [
        (WITH_TOWERS, "", 2),
        (WITH_TOWERS, "--keep", 3),
        (WITH_TOWERS, "--sharded", 2),
        (WITH_TOWERS, "--graph", 2),
        (WITH_TOWERS, "--graph --clip", 2),
        (WITH_TOWERS, "--graph --sharded", 2),
        (FUNCTIONS, "", 2),
    ],
    ids=["towers", "gradients kept", "sharded", "graph", "graph that clips", "sharded graph", "functions"],
)
def test_move_of_a_gradient_is_named_by_its_parameter(show, script, options, n):
    out = show("bytes", "-n", n, "mine.py", *options.split(), script=script).out
    lines = [line for line in out.splitlines() if "gradient of" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    rows = {}
    for _, what, collective, *_, formula, _ in cells:
        rows[re.sub(r"gradient of (model\.)?|, 3( times)?$", "", what)] = (collective, formula)
    wanted = {}
    for name, length in ({"w0": 8, "w1": 8} if script == FUNCTIONS else IN_TOWERS).items():
        size = 4 * 8 * length * (n - 1)
        if options.endswith("--sharded") and name.endswith(("up", "scale")):
            wanted[f"{name} (P -> S(0))"] = ("reduce-scatter", f"{size:,}")
        else:
            wanted[f"{name} (P -> B)"] = ("all-reduce", f"{2 * size:,}")
    assert rows == wanted, out
    assert f"the gradients take {len(wanted)} moves (" in out.splitlines()[-1]


LARGE_BATCH = """
import numpy as np
import oneflow as flow

ranks = flow.placement.all("cpu")
batch = np.ones((240, 500), dtype=np.float32)
for step in range(3):
    x = flow.tensor(batch, placement=ranks, sbp=flow.sbp.split(0))
    rows = flow.tensor(np.array_split(batch, len(ranks.ranks))[flow.env.get_rank()])
    y = rows.to_global(placement=ranks, sbp=flow.sbp.split(0))
"""


@pytest.mark.parametrize("n", [2, 3])
def test_batch_that_each_rank_sends_to_compare_it_is_listed(show, n):
    out = show("bytes", "-n", n, "mine.py", script=LARGE_BATCH).out
    rows = [[cell.strip(" ~") for cell in row.strip("│").split("│")] for row in out.splitlines() if row.startswith("│")]
    whole, own, *_ = rows
    assert whole[:3] == ["8", "flow.tensor -> x (local -> S(0)), 3 times", "OneFlow compares the ranks' copies"]
    assert own[:3] == ["10", "rows -> y (local -> S(0)), 3 times", "local to global"]
    for from_each, from_own in zip(whole[3 : 3 + n], own[3 : 3 + n]):
        assert 480_000 <= int(from_each.replace(",", "")) <= 490_000 and int(from_own.replace(",", "")) < 10_000, out


SENDS_MORE = """
import oneflow as flow

ranks = flow.placement.all("cpu")
x = flow.ones(1024, 1024, placement=ranks, sbp=flow.sbp.split(1))
w = flow.ones(1024, 1024, placement=ranks, sbp=flow.sbp.split(0))
out = (x @ w).to_global(sbp=flow.sbp.split(1))
"""


def test_last_line_has_the_bytes_that_were_sent_where_these_are_more_than_the_formula(show):
    """P to S(1) in eager mode: 3/4 of the 4.19 MB from each rank, and half of it by the formula."""
    assert "-> out: 6.29 MB)" in show("show", "-n", 2, "mine.py", script=SENDS_MORE).out.splitlines()[-1]


GATHERS_ITSELF = """
import oneflow as flow

q, v = (flow.ones(1024, 512, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)) for _ in range(2))
scores = flow.matmul(q, v, transpose_b=True)
"""


def test_operand_that_oneflow_moved_is_named(show):
    out = show("bytes", "-n", 2, "mine.py", script=GATHERS_ITSELF).out
    assert "q @ v = scores" in out and "probably v S(0) -> B: all-gather" in out and "OneFlow adds 1 more (q @ v" in out
