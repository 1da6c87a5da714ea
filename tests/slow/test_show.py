"""`launch.sh show` and `launch.sh bytes`, on our recipes and on a user's own script, on terminals of any kind."""

import os
import pty
import re
import signal
import subprocess
import time

import pytest

from harness.picture import rebox
from tests.cases import ROOT
from tests.jobs import LAUNCH, Run, launch

OWN = """
import numpy as np
import oneflow as flow

def run(rows=4, graph=False, scale=1.0):
    ranks = flow.placement("cpu", [0, 1, 2])
    x = flow.tensor(np.ones((rows, 6), dtype=np.float32), placement=ranks, sbp=flow.sbp.split(0))
    w = flow.tensor(np.ones((6, 6), dtype=np.float32), placement=ranks, sbp=flow.sbp.split(1))
    return {"x": x, "w": w, "y": (x * scale) @ w}
"""


def drawn(out):
    """The rows of pictures, as lists of cells, by tensor."""
    found, name = {}, None
    for line in out.splitlines():
        head = re.match(r"(\S.*?)  [\dx ]+  \S", line)
        name = head.group(1) if head else name
        if name and re.fullmatch(r"  [█▒·# .%]+", line):
            found.setdefault(name, []).append(line.split())
    return found


def test_show_draws_each_tensor_with_what_moves_between():
    job = launch("show", "recipes/row_parallel.py", "--batch", 4, "--in-features", 4)
    assert job.code == 0, job.err
    full, left, right = "████████", "██··", "··██"
    pictures = drawn(job.out)
    assert pictures["x"] == [[left, right]] * 4
    assert pictures["w"] == [[full, "········"]] * 2 + [["········", full]] * 2
    assert pictures["partial"] == [["▒▒▒▒▒▒▒▒"] * 2] * 4 and pictures["out"] == [[full, full]] * 4
    order = [job.out.index(f"\n{name}  ") for name in ("x", "w", "partial", "out")]
    order.insert(2, job.out.index("↓ x @ w = partial: nothing moves"))
    order.insert(4, job.out.index("↓ partial -> out: P -> B, all-reduce, 256 B in all by the formula, sent by rank: "))
    assert order == sorted(order)


def test_show_draws_a_mesh_line_by_line():
    job = launch("show", "recipes/layouts/two_d_sbp.py", "--graph")
    assert job.code == 0, job.err
    assert drawn(job.out)["out"][:4] == [["████····", "····████"]] * 2 + [["········"] * 2] * 2
    assert "all-reduce along axis 0" in job.out and "↓ a call of TwoDSbpGraph: " in job.out


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
    assert "between the steps" in job.out and "\x1b" not in job.out and "Tensors under 1 MB" not in job.out


def test_both_take_a_script_of_the_user_anywhere(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    job = launch("bytes", "-n", 3, "mine.py", "--rows", 900, "--scale", 2.5, cwd=tmp_path)
    assert job.code == 0, job.err
    assert re.search(r"9 +│ · @ w = y \(w S\(1\) -> B: all-gather\)", job.out) or "w S(1) -> B: all-gather" in job.out
    job = launch("show", "-n", 3, "mine.py", cwd=tmp_path)
    assert job.code == 0 and list(drawn(job.out)) == ["x", "w", "y"], job.err


def test_matmul_that_transposes_w_is_told_from_one_that_moves_it():
    """nn.Linear has w as (out, in): S(0) there splits the columns of the product, and nothing moves."""
    x, w = ({"sbp": sbp, "ranks": [0, 1], "shape": (4, 4), "item": 4} for sbp in ("B", "S(0)"))
    assert rebox([x, w], {"sbp": "S(1)"}, (False, True)) == []
    assert [name for name, _ in rebox([x, w], {"sbp": "S(1)"})] == ["w"]
    assert rebox([w, w], {"sbp": "S(0)"}, (False, True)) is None


@pytest.mark.parametrize(
    "text, arguments, words",
    [
        ("print(1)", "", "it has no entry: add a function such as `def run(graph=False): ...; return {"),
        ("def run(a, b=1): pass", "", "its function run must have a default for each parameter: give a one"),
        ("def run(a=f()): pass", "", "the defaults of its function run must be numbers, texts, True or False"),
        ("def run(a=1): return 5", "", "its function run must return a dict of tensors by name, and returned 5"),
        ("def run(a=1): return {}", "--b 2", "unrecognized arguments: --b 2; the parameters of its run are --a"),
        ("def run(a=1): return {}", "--a x", "argument --a: invalid int value: 'x'; the parameters of its run are --a"),
        ("def run(:", "", "not a Python script: line 1"),
    ],
)
def test_script_without_an_entry_is_told_what_to_add(tmp_path, text, arguments, words):
    (tmp_path / "mine.py").write_text(text)
    job = launch("bytes", "-n", 1, "mine.py", *arguments.split(), cwd=tmp_path)
    assert (job.code, job.out) == (2, "")
    assert job.err.startswith("launch.sh: mine.py: ") and words in job.err and job.err.count("\n") == 1


def test_what_a_recipe_refuses_and_what_is_not_there_is_refused():
    job = launch("bytes", "recipes/data_parallel.py", "--batch", 1)
    assert job.code == 2 and "--batch 1 does not fit on 2 ranks: type --batch 2" in job.err
    job = launch("show", "recipes/data_paralel.py")
    assert job.code == 2 and "did you mean recipes/data_parallel.py?" in job.err
    job = launch("docs", "recipes/row_parallel.py")
    assert (job.code, job.err) == (2, "launch.sh: docs takes no arguments: type ./launch.sh docs\n")
    job = launch("show")
    assert job.code == 2 and "name a Python script" in job.err


def test_error_of_a_rank_is_shown_and_nothing_is_left(tmp_path):
    (tmp_path / "mine.py").write_text("def run(a=1): raise ValueError('boom')")
    job = launch("show", "-n", 2, "mine.py", cwd=tmp_path)
    assert job.code == 1 and "ValueError: boom" in job.err and job.all_gone()


def test_terminal_gets_colour_and_narrow_ones_wrap_and_old_ones_get_ascii():
    def on_a_terminal(columns, **variables):
        outer, inner = pty.openpty()
        environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "COLUMNS": str(columns), **variables}
        job = subprocess.Popen(
            [LAUNCH, "show", "-n", "3", "recipes/data_parallel.py"], stdout=inner, env=environment, cwd=ROOT
        )
        os.close(inner)
        text = b""
        while True:
            try:
                part = os.read(outer, 65536)
            except OSError:
                break
            if not part:
                break
            text += part
        assert job.wait() == 0
        return text.decode()

    wide = on_a_terminal(120, LANG="C.UTF-8", PYTHONUTF8="1")
    assert "\x1b[" in wide and "█" in wide
    plain = on_a_terminal(40, NO_COLOR="1", PYTHONUTF8="1")
    assert "\x1b[3" not in plain
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line).rstrip()) for line in plain.splitlines()) <= 40
    assert "█" not in on_a_terminal(80, PYTHONIOENCODING="ascii")


def test_time_limit_and_ctrl_c_end_every_rank(tmp_path):
    (tmp_path / "mine.py").write_text("import time\ndef run(a=1):\n    print('here', flush=True); time.sleep(60)")
    job = launch("show", "-n", 2, "--timeout", 4, "mine.py", cwd=tmp_path)
    assert job.code == 124 and "gave no answer in 4 s" in job.err and 'mine.py", line 3 in run' in job.err
    job = Run(LAUNCH, "bytes", "-n", 2, "mine.py", cwd=tmp_path)
    while len(job.ranks()) < 2:
        time.sleep(0.05)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait().code == 128 + signal.SIGINT and job.all_gone()
