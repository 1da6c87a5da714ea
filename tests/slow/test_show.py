"""`launch.sh show` and `launch.sh bytes`, on our recipes and on a user's own script, on terminals of any kind."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from harness.measure.theory import matmul_boxings
from harness.report import show as program
from tests.cases import ROOT
from tests.jobs import LAUNCH, Run, launch
from tests.markdown import ENGLISH, blocks

OWN = """
import numpy as np
import oneflow as flow

def run(rows=4, graph=False, scale=1.0):
    ranks = flow.placement("cpu", [0, 1, 2])
    x = flow.tensor(np.ones((rows, 6), dtype=np.float32), placement=ranks, sbp=flow.sbp.split(0))
    w = flow.tensor(np.ones((6, 6), dtype=np.float32), placement=ranks, sbp=flow.sbp.split(1))
    return {"x": x, "w": w, "y": (x * scale) @ w}
"""


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
    """The program in this process, on ranks that run already; script: the text of mine.py, where it is called then."""
    monkeypatch.setattr(program, "Pool", lambda n, timeout: contextlib.nullcontext(pools(n)))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def call(command, *arguments, script=None, code=0):
        if script:
            (tmp_path / "mine.py").write_text(script)
        monkeypatch.chdir(tmp_path if script else ROOT)
        ended = program.main(command, [str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert ended == code, err
        return SimpleNamespace(out=out, err=err)

    return call


def lines(out):
    """The table's rows, each as its columns, and its moves."""
    found = re.findall(r"^  (?:  ↓ (.*)|(\S.*| {4,}\S.*))$", out, flags=re.MULTILINE)
    return [move or [cell for cell in re.split(" {2,}", row.rstrip())] for move, row in found]


def steps(out):
    """The tensors and moves in their order: "x S(0)" and "x @ w = out: nothing moves"."""
    named = [line for line in lines(out) if isinstance(line, str) or line[0]]
    return [line if isinstance(line, str) else f"{line[0]} {line[2]}" for line in named if line[0] != "tensor"]


def drawn(out):
    """What each rank holds, a list for each line of ranks, by tensor."""
    found, name = {}, None
    for line in (line for line in lines(out) if not isinstance(line, str)):
        name = line[0] or name
        found.setdefault(name, []).append(line[3:] if line[0] else line[1:])
    return found


def test_show_draws_each_tensor_with_what_moves_between():
    job = launch("show", "recipes/row_parallel.py", "--batch", 4, "--in-features", 4)
    assert job.code == 0, job.err
    assert lines(job.out) == [
        ["tensor", "shape", "SBP", "rank 0", "rank 1"],
        ["x", "(4, 4)", "S(1)", "(4, 2) columns 0-1", "(4, 2) columns 2-3"],
        ["w", "(4, 8)", "S(0)", "(2, 8) rows 0-1", "(2, 8) rows 2-3"],
        "x @ w = partial: nothing moves",
        ["partial", "(4, 8)", "P", *["(4, 8) part of the sum"] * 2],
        "partial -> out: P -> B, all-reduce, 256 B in all by the formula",
        ["out", "(4, 8)", "B", *["(4, 8) whole"] * 2],
    ]


def test_script_without_functions_is_run_and_traced(show):
    job = show("show", "mine.py", script=PLAIN)
    assert steps(job.out) == [
        *("x S(1)", "w S(0)", "x @ w = partial: nothing moves", "partial P"),
        *("partial -> out: P -> B, all-reduce, 64 B in all by the formula", "out B", "doubled B"),
    ]
    assert "the sum is" not in job.out and drawn(job.out)["x"] == [["(4, 3) columns 0-2", "(4, 3) columns 3-5"]]


def test_parameters_have_their_path_and_steps_that_come_again_are_counted(show):
    job = show("show", "mine.py", "--rows", 6, script=WITH_MAIN)
    names = ["layer.weight", "layer.bias", "head.1.weight"]
    moved = [part for name in names for part in (f"{name} -> {name}: local -> B, local to global", f"{name} B")]
    assert steps(job.out) == [
        *(*moved, "x S(0)", "x @ layer.weight = hidden: nothing moves (24 times)", "hidden S(0)"),
        *("· S(0)", "· @ head.1.weight = out: nothing moves (24 times)", "out S(0)", "loss P"),
        *("backward: the gradients (24 times)", *(f"{name}.grad B" for name in names)),
        "loss.numpy(): P -> B, all-reduce, 8 B in all by the formula",
    ]
    job = show("show", "mine.py", "--row", "x", script=WITH_MAIN, code=2)
    assert job.err == "launch.sh: mine.py: argument --rows: invalid int value: 'x'\n"


def test_run_that_wants_arguments_is_called_by_the_script_itself(show):
    job = show("show", "-n", 3, "mine.py", "6", script=WITH_RUN_OF_N)
    assert steps(job.out) == [
        *("x S(0)", "a call of Scaled: all-gather, 192 B in all by the formula"),
        *("scalar_mul -> output 0: S(0) -> B, all-gather, 192 B in all by the formula", "y B"),
    ]


def test_script_in_the_readme_is_drawn(show):
    job = show("show", "-n", 2, "mine.py", script=blocks(ENGLISH, "python")[0])
    assert steps(job.out) == ["x S(0)", "w B", "x @ w = out: nothing moves", "out S(0)"]


def test_show_draws_a_mesh_as_a_mesh(show):
    job = show("show", "recipes/layouts/two_d_sbp.py", "--graph")
    assert drawn(job.out)["out"] == [
        ["rank 0 (2, 4) rows 0-1, columns 0-3", "rank 1 (2, 4) rows 0-1, columns 4-7"],
        ["rank 2 (2, 4) rows 2-3, columns 0-3", "rank 3 (2, 4) rows 2-3, columns 4-7"],
    ]
    assert "all-reduce along axis 0" in job.out and "↓ a call of LayerGraph: " in job.out


def test_bytes_lists_every_step():
    sizes = ("--batch", 768, "--in-features", 64, "--out-features", 1024)
    job = launch("bytes", "-n", 3, "recipes/row_parallel.py", *sizes)
    assert job.code == 0, job.err
    [row] = [line for line in job.out.splitlines() if "all-reduce" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    text = (ROOT / "recipes" / "row_parallel.py").read_text().splitlines()[int(cells[0]) - 1]
    assert "partial.to_global(" in text
    assert cells[1:3] == ["partial -> out (P -> B)", "all-reduce"]
    *sent, total, formula = (int(cell.replace(",", "")) for cell in cells[3:8])
    assert formula == 2 * 2 * 768 * 1024 * 4 and sum(sent) == total and 1 <= total / formula < 1.02
    assert cells[8] == f"{total / formula:.3f}"
    assert "between the steps" in job.out and "\x1b" not in job.out


def test_bytes_that_messages_drown_are_marked_and_larger_ones_are_shown(show):
    job = show("bytes", "recipes/row_parallel.py")
    [row] = [line for line in job.out.splitlines() if "all-reduce" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert all(re.fullmatch(r"~[\d,]+", cell) for cell in cells[3:6]) and cells[6:8] == ["256", ""]
    assert "Tensors under 1 MB: what was measured is marked with ~" in job.out
    job = show("show", "recipes/row_parallel.py", "--batch", 512, "--out-features", 512)
    assert re.search(r"all-reduce, 2.1 MB in all by the formula, sent by rank: 1.05 MB, 1.05 MB\n", job.out), job.err
    assert "Tensors under 1 MB" not in job.out


def test_both_take_a_script_of_the_user_anywhere(show):
    job = show("bytes", "-n", 3, "mine.py", "--rows", 900, "--scale", 2.5, script=OWN)
    assert re.search(r"9 +│ · @ w = y \(w S\(1\) -> B: all-gather\)", job.out) or "w S(1) -> B: all-gather" in job.out
    job = show("show", "-n", 3, "mine.py", script=OWN)
    assert list(drawn(job.out)) == ["tensor", "x", "w", "y"]


def test_matmul_that_transposes_w_is_told_from_one_that_moves_it():
    """nn.Linear has w as (out, in): S(0) there splits the columns of the product, and nothing moves."""
    x, w = ({"sbp": sbp, "ranks": [0, 1], "shape": (4, 4), "item": 4} for sbp in ("B", "S(0)"))
    assert matmul_boxings([x, w], {"sbp": "S(1)"}, (False, True)) == []
    assert [name for name, _ in matmul_boxings([x, w], {"sbp": "S(1)"})] == ["w"]
    assert matmul_boxings([w, w], {"sbp": "S(0)"}, (False, True)) is None


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


def test_script_without_global_tensors_is_told_so(show):
    job = show("show", "-n", 1, "mine.py", "--a", 2, script="def run(a=1): return 5")
    assert job.out == "mine.py --a 2 on 1 ranks\n\nIt makes no global tensor.\n"


def test_recipe_of_which_a_rank_would_hold_nothing_is_refused(show):
    job = show("show", "recipes/data_parallel.py", "--batch", 1, code=2)
    text = (ROOT / "recipes" / "data_parallel.py").read_text().splitlines()
    [line] = [number for number, words in enumerate(text, 1) if "x = flow.tensor(" in words]
    words = (
        "a tensor of shape (1, 5) cannot be split(0) over 2 ranks: a rank would hold nothing; make that size 2 or more"
    )
    assert (job.out, job.err) == ("", f"launch.sh: data_parallel.py:{line}: {words}\n")
    job = show("bytes", "recipes/model_parallel.py", "--out-features", 1, "--graph", code=2)
    assert "a tensor of shape (5, 1) cannot be split(1) over 2 ranks" in job.err


@pytest.mark.parametrize(
    "line, words",
    [
        ("flow.randn(1, 5, placement=ranks, sbp=S(0))", "a tensor of shape (1, 5) cannot be split(0) over 2 ranks"),
        ("flow.full((8, 1), 1.0, placement=ranks, sbp=[S(1)])", "a tensor of shape (8, 1) cannot be split(1) over 2"),
        ("flow.ones(2, placement=ranks, sbp=B).sum(0, keepdim=True).to_global(sbp=S(0))", "a tensor of shape (1,)"),
    ],
)
def test_line_that_would_leave_a_rank_with_nothing_is_refused(show, line, words):
    setting = 'ranks, B, S = flow.placement("cpu", [0, 1]), flow.sbp.broadcast, flow.sbp.split'
    job = show("show", "mine.py", script=f"import oneflow as flow\n{setting}\nx = {line}\n", code=2)
    assert not job.out and job.err.startswith(f"launch.sh: mine.py:3: {words}"), job.err
    assert job.err.count("\n") == 1


def test_what_is_not_there_is_refused(show):
    assert "no_such.py: no such file" in show("show", "no_such.py", code=2).err
    assert "name a Python script" in show("show", code=2).err


@pytest.mark.parametrize(
    "text, words",
    [
        ("def run(a=1): raise ValueError('boom')", "ValueError: boom"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("import sys; sys.exit('no luck')", "the script called sys.exit('no luck')"),
    ],
)
def test_error_of_a_rank_is_shown_and_nothing_is_left(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    job = launch("show", "-n", 2, "mine.py", cwd=tmp_path)
    assert job.code == 1 and words in job.err and job.all_gone()
    assert re.match(r"launch.sh: rank [01] of 2 failed:\n", job.err)


def on_a_terminal(columns, seconds=300, **variables):
    """What show writes to a terminal with so many columns."""
    outer, inner = pty.openpty()
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "COLUMNS": str(columns), **variables}
    command = [LAUNCH, "show", "-n", "3", "recipes/data_parallel.py"]
    job = subprocess.Popen(command, stdout=inner, env=environment, cwd=ROOT)
    os.close(inner)
    text, deadline = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([outer], [], [], max(0, deadline - time.monotonic()))[0]:
            text += os.read(outer, 65536)
    assert job.wait(60) == 0, text
    return text.decode()


def test_terminal_gets_colour_and_narrow_ones_wrap_and_old_ones_get_ascii():
    wide = on_a_terminal(120, LANG="C.UTF-8", PYTHONUTF8="1")
    assert "\x1b[" in wide and re.search(r"x .*\(4, 5\).*\(2, 5\) rows 0-1.*\(1, 5\) row 3", wide) and "↓" in wide
    plain = on_a_terminal(40, NO_COLOR="1", PYTHONUTF8="1")
    assert "\x1b[3" not in plain
    plain = re.sub(r"\x1b\[[\d;]*m", "", plain)
    assert re.search(r"\nx \(4, 5\) S\(0\)\s+rank 0 \(2, 5\) rows 0-1", plain)
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 40
    assert on_a_terminal(80, PYTHONIOENCODING="ascii").isascii()


SLEEPER = "import time\ndef run(a=1):\n    print('here', flush=True)\n    while True: time.sleep(60)"


def test_time_limit_shows_where_every_rank_is(tmp_path):
    (tmp_path / "mine.py").write_text(SLEEPER)
    for seconds in (5, 60):  # a busy machine may need longer until the ranks are there
        job = Run(LAUNCH, "show", "-n", 2, "--timeout", seconds, "mine.py", cwd=tmp_path).wait(timeout=600)
        assert job.code == 124 and f"gave no answer in {seconds} s" in job.err and job.all_gone()
        if job.err.count('mine.py", line 4 in run') == 2:
            return
    raise AssertionError(f"the line of a rank is missing: {job.err}")


def test_ctrl_c_ends_every_rank(tmp_path):
    (tmp_path / "mine.py").write_text(SLEEPER)
    job = Run(LAUNCH, "bytes", "-n", 2, "mine.py", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(job.ranks()) < 2:
        assert time.monotonic() < deadline, "two ranks did not start within 120 s"
        time.sleep(0.05)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait().code == 128 + signal.SIGINT and job.all_gone()
