"""The shell: every rank runs what is typed, equal answers are shown once, and it says what moved."""

import contextlib
import io
import os
import re

import pytest
from rich.console import Console as RichConsole

from oneflow_cookbook.shell.console import Console, Piped
from oneflow_cookbook.shell.program import options_of
from oneflow_cookbook.shell.screen import Screen
from oneflow_cookbook.shell.session import Session
from oneflow_cookbook.start.errors import UsageError


class Shell:
    """A shell on this many ranks inside the process of the tests; a context manager."""

    def __init__(self, world_size, timeout=60):
        self.console = RichConsole(file=io.StringIO(), highlight=False)
        self.session = Session(world_size, timeout, Screen(self.console, world_size), script=None)

    def __enter__(self):
        self.session.start()
        return self

    def __exit__(self, *_):
        self.session.ranks.close()
        self.session.folder.cleanup()

    def type(self, text, echo=False):
        """Type these lines; returns what is shown."""
        self.console.file.seek(0)
        self.console.file.truncate()
        reading, writing = os.pipe()
        with contextlib.closing(os.fdopen(reading)):
            os.write(writing, text.encode())
            os.close(writing)
            self.code = Console(self.session, Piped(reading, echo)).loop()
        return self.console.file.getvalue()


BEGIN = """
import oneflow as flow
from oneflow import nn
ranks, rank = flow.placement.all("cpu"), flow.env.get_rank()
S, B, P = flow.sbp.split, flow.sbp.broadcast, flow.sbp.partial_sum
x = flow.arange(8, placement=ranks, sbp=B).reshape(2, 4).float().to_global(sbp=S(0))
w = flow.ones(4, 2, placement=ranks, sbp=B)
y, z = x.to_global(sbp=S(1)), w.to_global(sbp=S(0))
"""


@pytest.fixture(scope="module")
def ranks():
    with Shell(2) as shell:
        yield shell


@pytest.fixture
def shell(ranks):
    """A shell in which the names of BEGIN are there."""
    ranks.type(BEGIN)
    return ranks


def moves(text):
    return [line.strip("↓v ") for line in text.splitlines() if line.startswith("  ")]


def test_echo_shows_a_session_as_a_terminal_does(shell):
    shown = ">>> a = 3\n>>> for i in range(2):\n...     print(a + i)\n...\n[all] 3\n[all] 4\n"
    text = "a = 3\nfor i in range(2):\n    print(a + i)\n\n(a,\n a)\n"
    assert shell.type(text, echo=True) == f"{shown}>>> (a,\n...  a)\n[all] (3, 3)\n"


def test_equal_answers_are_shown_once_and_others_by_rank(shell):
    assert shell.type("1 + 1\nrank\nprint('a', rank)") == "[all] 2\n[0] 0\n[1] 1\n[0] a 0\n[1] a 1\n"
    assert shell.type("for i in range(2): print(i)\n\nif rank: print(7)\n") == "[all] 0\n[all] 1\n[1] 7\n"
    assert shell.type("_ * 10; object()") == "[0] 0\n[1] 10\n[all] <object object at 0x...>\n"


def test_a_tensor_is_shown_as_each_rank_holds_it(shell):
    rows = "[0] (1, 4) row 0  [[0., 1., 2., 3.]]\n[1] (1, 4) row 1  [[4., 5., 6., 7.]]\n"
    assert shell.type("x") == f"[all] (2, 4) float32, S(0) on ranks [0, 1]\n{rows}"
    partial = "[0] (2) addend  [1., 9.]\n[1] (2) addend  [ 5., 13.]\n"
    assert shell.type("flow.matmul(y, z[:, 0])") == f"[all] (2) float32, P on ranks [0, 1]\n{partial}"
    whole = "[all] (4, 2) float32, B on ranks [0, 1]\n[all] (4, 2) whole\n[all] [[1., 1.],\n"
    assert shell.type("w").startswith(whole)
    assert shell.type("flow.ones(9, 8, placement=flow.placement('cpu', [1]), sbp=B)").splitlines() == [
        "[all] (9, 8) float32, B on ranks [1]",
        "[0] nothing",
        "[1] (9, 8) whole, 72 values: see to_local()",  # too many numbers to show
    ]
    mesh = "flow.placement('cpu', [[0, 1]])"
    line = "[all] (2, 2) float32, (B, S(1)) on ranks [[0, 1]], requires_grad"
    text = shell.type(f"flow.ones(2, 2, placement={mesh}, sbp=[B, S(1)], requires_grad=True)")
    assert text.splitlines()[0] == line


@pytest.mark.parametrize(
    "statement, expected",
    [
        ("out = x @ w", []),
        ("p = y @ z", []),
        ("a = x.to_global(sbp=B)", ["x -> a: S(0) -> B, all-gather, 16 B from each rank by the formula"]),
        ("a = (y @ z).to_global(sbp=B)", ["· -> a: P -> B, all-reduce, 16 B from each rank by the formula"]),
        ("a = x @ z", ["x @ z = a: z S(0) -> B: all-gather, 16 B from each rank by the formula"]),
        ("a = w.to_global(sbp=S(0))", []),
        ("a = x.numpy()", ["x.numpy(): S(0) -> B, all-gather, 16 B from each rank by the formula"]),
        (
            "for i in range(3): a = x.sum().item()",
            ["·.item(): P -> B, all-reduce, 4 B from each rank by the formula (3 times)"],
        ),
    ],
)
def test_moves_are_shown(shell, statement, expected):
    assert moves(shell.type(statement)) == expected


@pytest.mark.parametrize("statement", ["a = x + y", "a = flow.relu(y @ z)"])
def test_what_oneflow_moves_by_itself_is_shown(shell, statement):
    [line] = moves(shell.type(statement))
    assert re.fullmatch("OneFlow's ranks exchanged .*B: messages of its own, or small parts of a tensor", line)


def test_values_of_a_local_tensor_that_are_lost_are_shown(shell):
    """Local to B takes those of rank 0."""
    shell.type("mine = flow.ones(2, 2) * flow.env.get_rank()")
    assert moves(shell.type("ours = mine.to_global(placement=ranks, sbp=B)")) == [
        "mine -> ours: local -> B, broadcast from rank 0"
    ]
    assert moves(shell.type("ours = mine.to_global(placement=ranks, sbp=S(0))")) == []


def test_communication_of_backward_is_shown(shell):
    shell.type("m = nn.Linear(4, 2).to_global(placement=ranks, sbp=B)\nloss = m(x).sum()")
    [line] = moves(shell.type("loss.backward()"))
    assert line.startswith("backward: the gradients, ")


def test_large_tensors_show_the_measured_bytes(shell):
    shell.type("large = flow.ones(1000, 1000, placement=ranks, sbp=S(0))")
    formula = "large: S(0) -> B, all-gather, 2 MB from each rank by the formula, sent by rank: 2 MB, 2 MB"
    assert moves(shell.type("large.to_global(sbp=B)")) == [formula]
    lines = moves(shell.type("a = large.to_global(sbp=S(1)); b = a.to_global(sbp=S(0))"))
    assert lines[2:] == ["in all, sent by rank: 2 MB, 2 MB"], lines


def test_exception_on_all_ranks_is_shown_once_and_loses_nothing(shell):
    text = shell.type("def f(a):\n    b = a\n\n    return b / 0\n\nf(rank)\nrank", echo=True)
    lines = "".join(
        f"\\[all\\] {line}\n"
        for line in (
            r"Traceback \(most recent call last\):",
            r"  File \"<shell>\", line \d+, in <module>",
            r"    f\(rank\)",
            r"  File \"<shell>\", line \d+, in f",
            r"    return b / 0",
            "ZeroDivisionError: division by zero",
        )
    )
    assert re.search(f">>> f\\(rank\\)\n{lines}>>> rank\n\\[0\\] 0\n\\[1\\] 1\n$", text), text


def test_exception_inside_oneflow_shows_no_frame_of_ours(shell):
    text = shell.type("x @ flow.ones(7, 7, placement=ranks, sbp=B)\nx @ 3")
    assert text.count("Traceback") == 2 and "harness" not in text and "[0]" not in text, text


def test_tensor_that_would_leave_a_rank_empty_is_refused(shell):
    assert "cannot be split(0) over 2 ranks" in shell.type("flow.ones(1, 2, placement=ranks, sbp=S(0))")
    assert shell.type("rank").startswith("[0] 0")


PASTED = """
from dataclasses import dataclass

@dataclass
class Pair:
    a: int

    def double(self):

        return 2 * self.a
pair = Pair(3)
if rank > 5:
    print("no")
else:
    print(pair.double())
class Graph(nn.Graph):
    def build(self, x, w):
        return (x @ w).to_global(sbp=B)

graph = Graph()
text = '''one

two'''
(text,
 1)
"""


def test_pasted_blocks_may_have_empty_lines_or_no_empty_line_after_them(shell):
    assert shell.type(PASTED) == "[all] 6\n[all] ('one\\n\\ntwo', 1)\n"
    out = shell.type("graph(x, w)")
    assert "[all] (2, 2) float32, B on ranks [0, 1]" in out
    assert any("S(0) -> B, all-gather, 8 B" in move for move in moves(out)), out


@pytest.mark.parametrize("wrong", ["1 +", "x = = 2", "for i in 3: pass; else", "  x", "'\\0' \0"])
def test_syntax_error_is_shown_and_the_next_statement_runs(shell, wrong):
    text = shell.type(f"{wrong}\n\nrank")
    assert ("Error: " in text) and text.endswith("[0] 0\n[1] 1\n"), text


def test_future_imports_stay(ranks):
    text = "from __future__ import annotations\ndef f(a: b): pass\n\nf.__annotations__"
    assert ranks.type(text) == "[all] {'a': 'b'}\n"


def test_output_is_capped(shell):
    lines = shell.type("for i in range(5000): print(7)\n").splitlines()
    assert lines.count("[all] 7") == 1000 and lines[-1] == "[all] (the rest of this statement's output is not shown)"
    text = shell.type("print('a' * 500_000)")
    assert 100_000 < len(text) < 101_000 and shell.type("3") == "[all] 3\n"


def test_completion_comes_from_the_ranks(shell):
    complete = shell.session.complete
    shell.type("class A: inner = 3\n\nlong_name = A()")
    assert complete("long_n") == ["long_name"] and "import" in complete("impo")
    assert complete("long_name.") == ["long_name.inner"] and complete("long_name.__cl") == ["long_name.__class__"]
    assert "x.to_global" in complete("x.to_") and complete("x.grad.to") == [] and complete("nothing.x") == []


def test_error_on_one_rank_starts_new_ranks(shell):
    text = shell.type("if rank == 1: raise ValueError('only here')\n")
    assert text.startswith("[1] Traceback") and text.endswith(
        "Rank 1 raised ValueError, and rank 0 did not, so the ranks no longer agree.\n"
        "New ranks start: all names are lost.\n"
    )
    assert "NameError" in shell.type("rank")


def test_exit_on_all_ranks_ends_the_shell(shell):
    text = shell.type("exit(3)\nprint('not shown')")
    assert (text, shell.code) == ("", 3)
    shell.session.exit_code = None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-n", "0"], "-n must be 1 or more, got 0"),
        (["-n", "x"], "argument -n: invalid int value: 'x'; see ./launch.sh shell --help"),
        (["--timeout", "-1"], "--timeout must be a number of seconds"),
        (["--color"], "unrecognized arguments: --color; see ./launch.sh shell --help"),
        (["nowhere.py"], "nowhere.py: no such file and no recipe"),
        (["-n", "3", "hybrid_parallel"], "hybrid_parallel.py runs on 4 ranks, not on 3: type -n 4"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        options_of(arguments)


def test_number_of_ranks_is_the_first_of_the_script():
    assert options_of(["hybrid_parallel"]).nproc_per_node == 4 and options_of([]).nproc_per_node == 2
