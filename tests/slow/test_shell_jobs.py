"""launch.sh shell as a whole: on a terminal, from a pipe, with a script, and every way in which it can fail."""

import contextlib
import os
import re
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.jobs import CLEAN, LAUNCH, LONG, MARK, Terminal, marked, piped, wait_until

BEGIN = """import os, signal, time, oneflow as flow
ranks, rank = flow.placement.all("cpu"), flow.env.get_rank()
x = flow.ones(2, 2, placement=ranks, sbp=flow.sbp.split(0))
"""
LOST = "New ranks start: all names are lost."
SCRIPT = """import oneflow as flow

WORLD_SIZES = (2, 3)


def double(x):
    return 2 * x


if __name__ == "__main__":
    print("the main started")
ranks = flow.placement.all("cpu")
print("script of", len(ranks.ranks))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


@contextlib.contextmanager
def shell_in(folder):
    """A shell on two ranks in a terminal, whose history and files are in this folder; in the end nothing is left."""
    with Terminal("shell", "-n", 2, HOME=str(folder), TMPDIR=str(folder)) as terminal:
        terminal.until(">>> ")
        yield begin(terminal)
        assert terminal.leaves_nothing()


def begin(terminal):
    for line in BEGIN.splitlines():
        terminal.type(line)
    return terminal


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A shell for all tests that leave it at its prompt; Ctrl-D ends it."""
    folder = tmp_path_factory.mktemp("shell")
    with shell_in(folder) as terminal:
        yield terminal
        terminal.press("\x04")
        assert terminal.wait() == 0
    assert "x.to_global(sbp=flow.sbp.broadcast)\n" in (folder / ".oneflow_cookbook_history").read_text()


@pytest.fixture
def terminal(shared):
    """That shell with the names of BEGIN."""
    return begin(shared)


def test_help_needs_no_ranks():
    done = piped("", "shell", "--help")
    assert done.returncode == 0 and done.stdout.startswith("Type Python statements") and not done.stderr


def test_module_whose_package_is_named_like_ours(tmp_path, monkeypatch):
    """Its modules stay from one statement to the next."""
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").touch()
    (tmp_path / "harness" / "model.py").write_text("numbers = []\n")
    (tmp_path / "harness" / "train.py").write_text("from .model import numbers\n")
    monkeypatch.chdir(tmp_path)
    text = "numbers.append(3)\nfrom harness import model\nmodel.numbers, __name__\nfrom pool import x\n"
    done = piped(text, "shell", "-n", 2, "-m", "harness.train")
    assert done.stdout.startswith("[all] ([3], '__main__')\n") and "No module named 'pool'" in done.stdout, (
        done.stdout + done.stderr
    )


def test_path_that_a_statement_adds_to_stays(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("NUMBER = 5\n")
    done = piped(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport helper_of_mine\n", "shell", "-n", 2)
    assert not done.stdout, done.stdout


def test_bad_input_is_refused_in_one_line():
    done = piped("1\n", "shell", "nowhere.py")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("launch.sh: ")


LOSSES = {  # what is typed -> patterns of the first lines that are shown; the last line is LOST
    "if rank == 1: os._exit(3)": [r"Rank 1 of 2 died \(exit code 3\)\."],
    "if rank == 0: y = x.numpy()": [
        "Rank 0 did not finish this statement in 3 s; rank 1 did. It is here:",
        r'\[0]   File "<shell>", line \d+, in <module>',
        r"\[0]     if rank == 0: y = x.numpy\(\)",
    ],
    "while True: print('again')": [
        *[r"\[all] again"] * 1000,
        ".*not shown.*",
        "Ranks 0, 1 did not finish this statement in 3 s. They are here:",
    ],
}


def test_statement_that_loses_the_ranks_says_why_and_the_shell_runs_on():
    """Piped: without prompts, and with the exit code of exit()."""
    text = "".join(f"{BEGIN}{statement}\n\nprint('behind it')\n" for statement in LOSSES) + "exit(7)\n"
    done = piped(text, "shell", "-n", 2, "--timeout", 3)
    assert (done.returncode, done.stderr) == (7, "")
    *losses, rest = done.stdout.split("[all] behind it\n")
    assert len(losses) == len(LOSSES) and not rest, done.stdout
    for patterns, shown in zip(LOSSES.values(), losses):
        lines = shown.splitlines()
        assert all(map(re.fullmatch, patterns, lines)) and lines[-1] == LOST, shown


def test_rank_that_raises_while_others_wait():
    """The others get 5 s, not the hour of this time limit."""
    text = f"{BEGIN}if rank == 0: raise KeyError('k')\nelse: x.numpy()\n\n"
    shown = piped(text, "shell", "-n", 2, "--timeout", 3600).stdout.splitlines()
    assert shown[0] == "[0] Traceback (most recent call last):" and shown[3] == "[0] KeyError: 'k'"
    assert shown[4] == "Rank 0 raised KeyError; rank 1 did not finish this statement. It is here:"
    assert "[1]     else: x.numpy()" in shown and shown[-1] == LOST


def test_script_runs_first_and_again_on_new_ranks(script):
    text = "double(3)\n__name__\nmine = 1\nif flow.env.get_rank() == 1: raise ValueError\n\ndouble(4)\nmine\n"
    done = piped(text, "shell", script)
    assert done.stdout.startswith("[all] script of 2\n[all] 6\n[all] '__main__'\n") and done.returncode == 0
    lines = done.stdout.splitlines()
    lost = f"New ranks start: the names are lost that were typed after {script}, which runs again."
    place = lines.index(lost)
    assert lines[place + 1 : place + 3] == ["[all] script of 2", "[all] 8"] and "NameError" in lines[-1]


def test_script_that_raises_leaves_what_it_had(script):
    script.write_text(f"{SCRIPT}\nranks.no_such_name\n")
    done = piped("double(5)\n", "shell", script)
    assert done.stdout.startswith("[all] script of 2\n[all] Traceback (most recent call last):\n")
    assert done.stdout.endswith("[all] 10\n") and "harness" not in done.stdout and done.returncode == 0


def test_script_that_raises_on_one_rank_is_not_run_again(script):
    script.write_text(f"{SCRIPT}\nif flow.env.get_rank() == 0:\n    raise ValueError('only here')\n")
    done = piped("1 + 1\n", "shell", script)
    assert done.stdout.count("script of 2") == 1 and done.stdout.endswith(f"{LOST}\n[all] 2\n"), done.stdout


def test_rank_that_dies_at_the_prompt(terminal):
    pid = terminal.processes(b"pool/worker.py")[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text(), "the end of the rank")
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) == 1, "the end of its threads")
    shown = terminal.type("rank")
    assert "ended while nothing ran (SIGKILL" in shown and LOST in shown and "NameError" in shown
    assert "[all] 2" in terminal.type("1 + 1")


def test_ctrl_c_ends_a_statement_and_says_where_it_was(terminal):
    """What the statement prints is shown while it runs, and that only some ranks have finished it."""
    begin = len(terminal.shown)
    terminal.press("print('begun'); y = rank or x.numpy()\n")
    words = "(1 of 2 ranks have finished this statement; Ctrl-C ends it and shows where the others are)"
    terminal.until(words, terminal.until("[all] begun", begin))
    terminal.press("\x03")
    terminal.until(">>> ", terminal.until(LOST, begin))
    shown = terminal.shown[begin:]
    assert "Interrupted: rank 0 did not finish this statement; rank 1 did. It is here:" in shown
    assert "[0]     print('begun'); y = rank or x.numpy()" in shown
    assert "[all] 2" in terminal.type("1 + 1")


def test_ctrl_c_at_the_prompt_loses_nothing(terminal):
    begin = len(terminal.shown)
    terminal.press("for i in range(3):\n    print(")
    end = terminal.until("print(", begin)
    terminal.press("\x03")
    terminal.until(">>> ", terminal.until("KeyboardInterrupt", end))
    assert "[1] 1" in terminal.type("rank")


def test_tab_completes(terminal):
    begin = len(terminal.shown)
    terminal.press("x.to_gl\t")
    terminal.until("x.to_global", begin)
    terminal.press("(sbp=flow.sbp.broadc\t")
    terminal.until("flow.sbp.broadcast", begin)
    assert "(2, 2) float32, B on ranks [0, 1]" in terminal.type(")")


def test_home_that_cannot_be_written_is_no_error():
    with Terminal("shell", "-n", 1, HOME="/dev/null") as terminal:
        terminal.until(">>> ")
        assert "[all] 2" in terminal.type("1 + 1")
        terminal.press("\x04")
        assert terminal.wait() == 0 and "rror" not in terminal.shown


def test_closed_terminal_ends_all(tmp_path):
    with shell_in(tmp_path) as terminal:
        terminal.press("print('begun'); time.sleep(1000)\n")
        terminal.until("[all] begun")
        assert list(tmp_path.glob("cookbook-shell-*"))
        terminal.hang_up()
        assert terminal.leaves_nothing()
    assert not list(tmp_path.glob("cookbook-shell-*"))
    assert "import os, signal" in (tmp_path / ".oneflow_cookbook_history").read_text()


def test_killed_shell_leaves_nothing(tmp_path):
    with shell_in(tmp_path) as terminal:
        os.kill(terminal.pid, signal.SIGKILL)


def test_reader_that_closes_the_output_ends_all():
    mark = uuid.uuid4().hex
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([LAUNCH, "shell", "-n", "2"], env={**CLEAN, MARK: mark}, **pipes) as job:
        job.stdin.write(b"1 + 1\n")
        job.stdin.flush()
        assert job.stdout.readline() == b"[all] 2\n"
        job.stdout.close()
        job.stdin.write(b"1 + 1\n" * 100)
        job.stdin.flush()
        assert job.wait(LONG) == 128 + signal.SIGPIPE
        assert job.stderr.read() == b""
    wait_until(lambda: not marked(f"{MARK}={mark}"), "the end of all processes", 60)
