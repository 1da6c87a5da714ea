"""launch.sh shell as a whole: on a terminal, from a pipe, with a script, and every way in which it can fail."""

import os
import signal
import subprocess
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


@pytest.fixture
def terminal(tmp_path):
    """A shell on two ranks, at its first prompt, with the names of BEGIN."""
    with Terminal("shell", "-n", 2, HOME=str(tmp_path), TMPDIR=str(tmp_path)) as terminal:
        terminal.until(">>> ")
        for line in BEGIN.splitlines():
            terminal.type(line)
        yield terminal
        assert terminal.leaves_nothing()


def after(*lines, timeout=60):
    """What these statements show behind those of BEGIN; the shell must run on to the end."""
    text = "\n".join([*lines, "", "print('behind it')", ""])
    done = piped(BEGIN + text, "shell", "-n", 2, "--timeout", timeout)
    assert (done.returncode, done.stderr) == (0, "")
    shown, end, rest = done.stdout.partition("[all] behind it\n")
    assert end and not rest, done.stdout
    return shown


def test_piped_statements_run_without_prompts():
    done = piped(BEGIN + "rank\nx.sbp\n", "shell", "-n", 2)
    assert done.stdout == "[0] 0\n[1] 1\n[all] (oneflow.sbp.split(dim=0),)\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_echo_shows_a_session_as_a_terminal_does():
    text = "a = 3\nfor i in range(2):\n    print(a + i)\n\n(a,\n a)\n"
    shown = ">>> a = 3\n>>> for i in range(2):\n...     print(a + i)\n...\n[all] 3\n[all] 4\n"
    assert piped(text, "shell", "-n", 1, "--echo").stdout == f"{shown}>>> (a,\n...  a)\n[all] (3, 3)\n"


def test_exit_code_is_that_of_exit():
    assert piped("exit(7)\n", "shell", "-n", 2).returncode == 7


def test_help_needs_no_ranks():
    done = piped("", "shell", "--help")
    assert done.returncode == 0 and done.stdout.startswith("Type Python statements") and not done.stderr


@pytest.mark.parametrize("name", ["train.py", "-m harness.train"])
def test_script_whose_package_is_named_like_ours(tmp_path, monkeypatch, name):
    """Its modules stay from one statement to the next."""
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").touch()
    (tmp_path / "harness" / "model.py").write_text("numbers = []\n")
    (tmp_path / "train.py").write_text("from harness.model import numbers\n")
    (tmp_path / "harness" / "train.py").write_text("from .model import numbers\n")
    monkeypatch.chdir(tmp_path)
    text = "numbers.append(3)\nfrom harness import model\nmodel.numbers, __name__\nfrom pool import x\n"
    done = piped(text, "shell", "-n", 2, *name.split())
    shown = "[all] ([3], '__main__')\n"
    assert done.stdout.startswith(shown) and "No module named 'pool'" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("-n", "0"), ("-n", "x"), ("--color",), ("nowhere.py",)])
def test_bad_input_is_one_line(arguments):
    done = piped("1\n", "shell", *arguments)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("launch.sh: ")


@pytest.mark.parametrize(
    "statement, what",
    [
        ("os._exit(3)", "Rank 1 of 2 died (exit code 3)."),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Rank 1 of 2 died (SIGKILL)."),
    ],
)
def test_rank_that_dies(statement, what):
    assert after(f"if rank == 1: {statement}") == f"{what}\n{LOST}\n"


def test_rank_that_dies_while_others_wait_for_it():
    assert after("if rank == 1: os._exit(3)", "x.numpy()").startswith("Rank 1 of 2 died (exit code 3).\n")


def test_ranks_that_wait_for_each_other():
    shown = after("if rank == 0: y = x.numpy()", timeout=5)
    lines = shown.splitlines()
    assert lines[0] == "Rank 0 did not finish this statement in 5 s; rank 1 did. It is here:"
    assert lines[1:3] == ['[0]   File "<shell>", line 4, in <module>', "[0]     if rank == 0: y = x.numpy()"]
    assert lines[-1] == LOST


def test_ranks_that_wait_after_the_statement():
    shown = after("if rank == 1: y = x.to_global(sbp=flow.sbp.broadcast)", timeout=5)
    first = "Rank 1 did not finish this statement in 5 s; rank 0 did. It is here:\n"
    assert shown == f"{first}[1] at the end of the statement: it waits for other ranks\n{LOST}\n"


def test_rank_that_raises_while_others_wait():
    """The others get 5 s, not the hour of this time limit."""
    shown = after("if rank == 0: raise KeyError('k')", "else: x.numpy()", timeout=3600).splitlines()
    assert shown[0] == "[0] Traceback (most recent call last):" and shown[3] == "[0] KeyError: 'k'"
    assert shown[4] == "Rank 0 raised KeyError; rank 1 did not finish this statement. It is here:"
    assert "[1]     else: x.numpy()" in shown and shown[-1] == LOST


def test_output_without_end():
    lines = after("while True: print('again')", timeout=3).splitlines()
    assert lines[:1000] == ["[all] again"] * 1000 and "not shown" in lines[1000]
    assert lines[1001] == "Ranks 0, 1 did not finish this statement in 3 s. They are here:" and lines[-1] == LOST


def test_output_of_a_long_statement_is_shown_while_it_runs(terminal):
    terminal.press("print('first'); time.sleep(1000)\n")
    terminal.until("[all] first")
    terminal.press("\x03")
    terminal.until(">>> ", terminal.until(LOST))
    terminal.press("\x04")


def test_script_runs_first_and_its_names_stay(script):
    done = piped("double(3)\n__name__\n", "shell", script)
    assert (done.stdout, done.returncode) == ("[all] script of 2\n[all] 6\n[all] '__main__'\n", 0)


def test_script_runs_again_on_new_ranks(script):
    text = "mine = 1\nif flow.env.get_rank() == 1: raise ValueError\n\ndouble(4)\nmine\n"
    lines = piped(text, "shell", "-n", 3, script).stdout.splitlines()
    lost = f"New ranks start: the names are lost that were typed after {script}, which runs again."
    place = lines.index(lost)
    assert lines[place + 1 : place + 3] == ["[all] script of 3", "[all] 8"] and "NameError" in lines[-1]


def test_script_that_raises_leaves_what_it_had(script):
    script.write_text(f"{SCRIPT}\nranks.no_such_name\n")
    done = piped("double(5)\n", "shell", script)
    assert done.stdout.startswith("[all] script of 2\n[all] Traceback (most recent call last):\n")
    assert done.stdout.endswith("[all] 10\n") and "harness" not in done.stdout and done.returncode == 0


def test_script_on_which_ranks_part_is_not_run_again(script):
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
    terminal.press("\x04")
    assert terminal.wait() == 0


def test_ctrl_c_ends_a_statement_and_says_where_it_was(terminal):
    here = len(terminal.shown)
    terminal.press("print('begun'); time.sleep(1000)\n")
    terminal.until("[all] begun")
    terminal.press("\x03")
    terminal.until(">>> ", terminal.until(LOST, here))
    shown = terminal.shown[here:]
    assert "Interrupted: ranks 0, 1 did not finish this statement. They are here:" in shown
    assert "[all]     print('begun'); time.sleep(1000)" in shown
    assert "[all] 2" in terminal.type("1 + 1")
    terminal.press("\x04")
    assert terminal.wait() == 0


def test_somebody_who_waits_is_told_that_only_some_ranks_have_finished(terminal):
    terminal.press("if rank == 0: y = x.numpy()\n\n")
    terminal.until("(1 of 2 ranks have finished this statement; Ctrl-C ends it and shows where the others are)")
    terminal.press("\x03")
    terminal.until(">>> ", terminal.until("Interrupted: rank 0 did not finish this statement; rank 1 did. It is here:"))
    terminal.press("\x04")
    assert terminal.wait() == 0


def test_ctrl_c_at_the_prompt_loses_nothing(terminal):
    terminal.press("for i in range(3):\n    print(")
    here = terminal.until("print(")
    terminal.press("\x03")
    terminal.until(">>> ", terminal.until("KeyboardInterrupt", here))
    assert "[1] 1" in terminal.type("rank")
    terminal.press("\x04")


def test_tab_completes_and_lines_are_remembered(terminal, tmp_path):
    terminal.press("x.to_gl\t")
    terminal.until("x.to_global")
    terminal.press("(sbp=flow.sbp.broadc\t")
    terminal.until("flow.sbp.broadcast")
    assert "(2, 2) float32, B on ranks [0, 1]" in terminal.type(")")
    terminal.press("\x04")
    assert terminal.wait() == 0
    history = (tmp_path / ".oneflow_cookbook_history").read_text()
    assert "x.to_global(sbp=flow.sbp.broadcast)\n" in history


def test_home_that_cannot_be_written_is_no_error():
    with Terminal("shell", "-n", 1, HOME="/dev/null") as terminal:
        terminal.until(">>> ")
        assert "[all] 2" in terminal.type("1 + 1")
        terminal.press("\x04")
        assert terminal.wait() == 0 and "rror" not in terminal.shown


@pytest.mark.parametrize("busy", [False, True])
def test_closed_terminal_ends_all(terminal, tmp_path, busy):
    if busy:
        terminal.press("print('begun'); time.sleep(1000)\n")
        terminal.until("[all] begun")
    assert list(tmp_path.glob("cookbook-shell-*"))
    terminal.hang_up()
    assert terminal.leaves_nothing()
    assert not list(tmp_path.glob("cookbook-shell-*"))
    assert "import os, signal" in (tmp_path / ".oneflow_cookbook_history").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_shell_leaves_nothing(terminal, number):
    os.kill(terminal.pid, number)
    assert terminal.leaves_nothing()


def test_reader_that_closes_the_output_ends_all():
    with subprocess.Popen(
        [LAUNCH, "shell", "-n", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**CLEAN, MARK: "closed-output"},
    ) as job:
        job.stdin.write(b"1 + 1\n")
        job.stdin.flush()
        assert job.stdout.readline() == b"[all] 2\n"
        job.stdout.close()
        job.stdin.write(b"1 + 1\n" * 100)
        job.stdin.flush()
        assert job.wait(LONG) == 128 + signal.SIGPIPE
        assert job.stderr.read() == b""
    wait_until(lambda: not marked(f"{MARK}=closed-output"), "the end of all processes", 60)
