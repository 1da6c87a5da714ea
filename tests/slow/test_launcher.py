"""launch.sh: what it prints, how it refuses, and that nothing hangs or is left behind, whatever a rank does."""

import ast
import os
import re
import shutil
import signal
import time

import pytest

from harness.start.cores import available
from harness.start.ranks import RankAssignment, cores_of
from harness.start.recipe import RECIPES, path_of
from tests.jobs import LAUNCH, MET, PLAIN, SLEEPS, Run, ended, free_port, launch, wait_until
from tests.markdown import GALLERY, sections

UNTIL_GO = "while not os.path.exists('go'): time.sleep(0.01)"  # the test makes the file


def test_recipe_copied_alone_into_an_empty_folder_runs(tmp_path):
    """Each line of its output has the rank in front."""
    shutil.copy(path_of("row_parallel"), tmp_path)
    no_libibverbs = {"ONEFLOW_LIBIBVERBS_PATH": "/nowhere"}
    job = launch("-n", 4, "row_parallel.py", "--graph", cwd=tmp_path, **no_libibverbs)
    assert (job.code, job.err) == (0, "")
    *held, last = job.out.splitlines()
    shapes = {"x": ["(4, 2)", "(4, 1)", "(4, 1)", "(4, 1)"], "w": ["(2, 8)", "(1, 8)", "(1, 8)", "(1, 8)"]}
    whole = {"x": "(4, 5)", "w": "(5, 8)"}
    wanted = [f"[{k}] {name} {shapes[name][k]} of {whole[name]}" for name in shapes for k in range(4)]
    assert sorted(held) == sorted([*wanted, *[f"[{k}] out (4, 8) of (4, 8)" for k in range(4)]])
    assert last == "[0] out is oneflow.sbp.broadcast and equals x @ w on a single device"
    assert [path.name for path in tmp_path.iterdir()] == ["row_parallel.py"]


@pytest.mark.parametrize("command", [(), ("list",)], ids=["no arguments", "list"])
def test_every_recipe_is_listed_in_the_order_of_the_guide(command):
    job = launch(*command)
    assert (job.code, job.err) == (0, "")
    lines, folder = [], None
    for path in (section.path for section in sections(GALLERY)):
        if path.parent != folder:
            folder = path.parent
            lines.append(f"{folder.relative_to(RECIPES.parent)}/")
        lines.append(f"  {path.stem:25} {ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]}")
    assert [line for line in job.out.splitlines()[1:-1] if line] == lines


def test_script_of_the_user_anywhere_with_its_arguments(script, tmp_path):
    """As by Python itself: a link to a script leads to the modules beside the script."""
    shown = "sys.argv, __name__, os.getcwd(), helper.x, os.environ['WORLD_SIZE']"
    (tmp_path / "links").mkdir()
    path = tmp_path / "links" / "linked.py"
    path.symlink_to(script(f"import helper\nprint({shown})"))
    (tmp_path / "helper.py").write_text("x = 'beside'\n")
    job = launch("-n", 2, path, "-n", "7", "--graph", "a b", cwd="/")
    assert job.code == 0, job.err
    expected = f"{[str(path), '-n', '7', '--graph', 'a b']} __main__ / beside 2"
    assert sorted(job.out.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)]


def test_module_runs_as_by_python_itself(tmp_path):
    """Its package is imported, relative imports work, and its traceback has the user's lines only."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("x = 'in the package'\n")
    shown = "print(__name__, __package__, sys.argv, sys.path[0], x, sys.modules['__main__'].x)"
    path = tmp_path / "package" / "train.py"
    path.write_text(f"import sys\nfrom . import x\n{shown}\nif sys.argv[1:] == ['raise']: 1 / 0\n")
    job = launch("-n", 2, "--log-dir", "logs", "-m", "package.train", "-n", "7", cwd=tmp_path)
    expected = f"__main__ package {[str(path), '-n', '7']} {tmp_path} in the package in the package"
    assert (job.code, job.err, job.out) == (0, "", f"[0] {expected}\n")
    begin, written, _ = logs(tmp_path / "logs")["rank_1.log"]
    assert begin.endswith("one of 2 ranks of package/train.py -n 7") and written == expected
    job = launch("-n", 1, "--max-restarts", 1, "-m", "package.train", "raise", cwd=tmp_path)
    lines = [
        "Traceback (most recent call last):",
        f'  File "{path}", line 4, in <module>',
        "    if sys.argv[1:] == ['raise']: 1 / 0",
        "ZeroDivisionError: division by zero",
        "launch.sh: rank 0 of 1 failed: exit code 1; every rank is ended",
    ]
    assert (job.code, job.err.splitlines()) == (1, [*lines, "launch.sh: restart 1 of 1", *lines])


HELP = """
import argparse, contextlib, io

class Own(argparse.ArgumentParser):
    def _print_message(self, message, file=None):
        print(message.strip())

parser = argparse.ArgumentParser("prog", description="my program")
for show in (parser.print_help, parser.print_usage):
    file = io.StringIO()
    show(file=file)
    assert "usage: prog" in file.getvalue()
    with contextlib.redirect_stdout(io.StringIO()) as file:
        show()
    assert "usage: prog" in file.getvalue()
Own("own", usage="mine").print_usage()
parser.exit(0, "the end\\n")
"""


def test_what_argparse_prints_to_a_file_is_in_the_file(script):
    """What it prints to standard output or error is shown once, not by each rank."""
    job = launch("-n", 2, script(HELP))
    *own, last = job.out.splitlines()
    assert (job.code, job.err, sorted(own), last) == (0, "", ["[0] usage: mine", "[1] usage: mine"], "the end")


def test_threads_that_the_user_has_set_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert RankAssignment(2, port=1).environment(0)["OMP_NUM_THREADS"] == "3"


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


def test_each_rank_keeps_to_its_cores(script):
    cores = available()
    each = max(1, len(cores) // 2)
    job = launch("-n", 2, script("print(sorted(os.sched_getaffinity(0)))"))
    wanted = [cores[:each], cores[each : 2 * each] or cores[:each]]  # if there is but one, both have it
    assert sorted(job.out.splitlines()) == [f"[{rank}] {wanted[rank]}" for rank in range(2)]


def test_jobs_at_once_do_not_disturb_each_other():
    data, row = ended([Run(LAUNCH, f"recipes/{name}_parallel.py") for name in ("data", "row")])
    assert (data.code, row.code) == (0, 0)
    assert len(data.out.splitlines()) == len(row.out.splitlines()) == 2 * 3 + 1


def test_rank_0_that_comes_late_is_waited_for(script):
    """A rank that looks for rank 0 too early would sleep 10 s inside OneFlow, which warns of it."""
    late = "import os, time\nif os.environ['RANK'] == '0': time.sleep(1)\n"
    job = launch("-n", 2, script("print('met')", late + MET), GLOG_minloglevel="1")
    assert job.code == 0 and "LoadServer" not in job.err, job.err


# What a rank does -> the head of the script, its next line, the job's exit code, and what stands in its errors once.
FAULTS = {
    "all raise": (PLAIN, "raise ValueError('boom')", 1, "ValueError: boom"),
    "exits with a text": (PLAIN, "if rank == 1: sys.exit('no data')", 1, "no data"),
    "long text, not UTF-8": (PLAIN, "if rank == 1: raise ValueError('\\u00e9' * 100000 + '\\udce9!')", 1, "\\udce9!"),
    "raises while OneFlow waits": (MET, "if rank == 0: raise ValueError('boom')", 1, "ValueError: boom"),
    "is killed while OneFlow waits": (MET, "if rank == 0: os.kill(os.getpid(), 9)", 137, "killed by signal 9, SIGKILL"),
    "is aborted by OneFlow": (MET, "if rank == 1: flow.placement('cpu', [0, 0])", 134, "Check failed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_that_fails_ends_the_job(script, fault):
    head, line, code, text = FAULTS[fault]
    waits = SLEEPS if head == PLAIN else "flow.comm.barrier()"
    job = launch("-n", 2, script(f"{line}\n{waits}", head))
    assert (job.code, job.err.count(text)) == (code, 1), job.err


GRAPH_OF_A_FUNCTION = """
class Gather(flow.nn.Graph):
    def build(self, x):
        return x.to_global(sbp=flow.sbp.broadcast) + 1


def train():
    ranks, graph = flow.placement("cpu", [0, 1]), Gather()
    for step in range(100000):
        graph(flow.ones(8, placement=ranks, sbp=flow.sbp.split(0))).numpy()
        if step == 3 and rank == 1:
            WRONG


train()
"""


@pytest.mark.parametrize("wrong, code", [("1 / 0", 1), ("sys.exit(3)", 3)])
def test_rank_that_raises_where_a_graph_is_local_ends_the_job(script, wrong, code):
    """The graph must not be freed on the way out: OneFlow 0.9.0 would wait for the other ranks, or abort."""
    [job] = ended([Run(LAUNCH, "-n", 2, script(GRAPH_OF_A_FUNCTION.replace("WRONG", wrong), MET))])
    assert job.code == code and f"rank 1 of 2 failed: exit code {code}" in job.err, job.err


def test_traceback_shows_the_users_lines_only(script):
    path = script(f"def f():\n    return 1 / 0\nif rank == 1: f()\n{SLEEPS}")
    assert launch("-n", 2, path).err.splitlines() == [
        "[1] Traceback (most recent call last):",
        f'[1]   File "{path}", line 5, in <module>',
        "[1]     if rank == 1: f()",
        f'[1]   File "{path}", line 4, in f',
        "[1]     return 1 / 0",
        "[1] ZeroDivisionError: division by zero",
        "launch.sh: rank 1 of 2 failed: exit code 1; every rank is ended",
    ]


@pytest.mark.parametrize("code", [0, 3])
def test_children_of_ranks_end_too(script, code):
    """One that ignores SIGTERM, and one in a session of its own."""
    path = script(
        "import subprocess\nos.system('trap \"\" TERM; sleep 1000 &')\n"
        f"subprocess.Popen(['sleep', '1000'], start_new_session=True)\nsys.exit({code})"
    )
    assert launch("-n", 2, path).code == code  # which waits until nothing is left


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_ending_the_launcher_ends_every_rank_while_oneflow_waits(script, number):
    path = script("print('ready', flush=True)\ntime.sleep(1000) if rank else flow.comm.barrier()", MET)
    job = Run(LAUNCH, "-n", 2, path).until("ready")
    assert len(job.alive()) == 3
    ended([job.signal(number)])
    assert job.code == (-9 if number == signal.SIGKILL else 128 + number)
    assert job.err == ("" if number == signal.SIGKILL else f"launch.sh: {number.name}: every rank is ended\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_rank_is_ended_too(script, number):
    job = Run(LAUNCH, "-n", 2, script("print('ready', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"))
    ended([job.until("ready").signal(number)])
    assert job.err == f"launch.sh: {number.name}: every rank is ended\n"


# At SIGTERM rank 0 saves: it waits for the test, or for ever. Rank 1 ends. Both have children, as of a DataLoader.
SAVES = """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
def save(number, frame):
    print("saves", flush=True)
    while not os.path.exists("go"): time.sleep(0.01)
    print("x" * 200000, "saved", child.poll(), flush=True)
    sys.exit(WITH)
if rank == 0: signal.signal(signal.SIGTERM, save)
"""


@pytest.mark.parametrize("text, code", [("0", 0), ("'no space left'", 1)])
def test_rank_that_saves_a_checkpoint_at_sigterm_has_the_time(script, tmp_path, text, code):
    """Of any length up to --grace; what it prints is shown, and its child does not end before it does."""
    path = script(SAVES.replace("WITH", text) + SLEEPS)
    job = Run(LAUNCH, "-n", 2, "--grace", 1000, path, cwd=tmp_path).until("ready", times=2).signal(signal.SIGTERM)
    job.until("[0] saves")
    wait_until(lambda: len(job.ranks()) == 1, "the end of rank 1, which does not save")
    time.sleep(2)  # ranks of a job that has failed have 1 s
    (tmp_path / "go").touch()
    ended([job])
    assert job.code == 128 + signal.SIGTERM and "x saved None\n" in job.out, job.out[-200:]
    assert job.err == "launch.sh: SIGTERM: every rank is ended\n" + "[0] no space left\n" * code


@pytest.mark.parametrize("grace, number", [(1, None), (1000, signal.SIGINT)])
def test_wait_for_a_checkpoint_ends_after_grace_or_at_ctrl_c(script, tmp_path, grace, number):
    path = script(SAVES.replace("WITH", "0") + SLEEPS)
    job = Run(LAUNCH, "-n", 2, "--grace", grace, path, cwd=tmp_path).until("ready", times=2).signal(signal.SIGTERM)
    job.until("[0] saves").signal(signal.SIGTERM)  # a scheduler may send it twice
    [job] = ended([job.signal(number) if number else job])
    killed = "" if number else "launch.sh: --grace, 1 s, is over, and these ranks are killed: 0\n"
    assert (job.code, job.err) == (143, f"launch.sh: SIGTERM: every rank is ended\n{killed}")


def test_rank_that_fails_leaves_the_others_no_time_for_a_checkpoint(script):
    lines = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 1: 1 / 0\n"
    assert launch("-n", 2, "--grace", 1000, script(lines + SLEEPS)).code == 1


def test_signal_that_comes_when_all_is_over_does_not_change_the_exit_code(script):
    """As from srun, which ends the other tasks when one has failed."""
    job = Run(LAUNCH, "-n", 1, script("sys.exit(3)")).until("every rank is ended", stream="stderr")
    wait_until(lambda: job.signal(signal.SIGTERM).process.poll() is not None, "the launcher's end", pause=0.001)
    assert job.wait().code == 3


def test_nohup_goes_on_without_its_terminal(script, tmp_path):
    job = Run("nohup", LAUNCH, "-n", 1, script(f"print('met', flush=True)\n{UNTIL_GO}"), cwd=tmp_path).until("met")
    os.killpg(job.process.pid, signal.SIGHUP)
    (tmp_path / "go").touch()
    assert job.wait().code == 0


def test_rank_that_writes_without_end_is_ended_by_the_time_limit(script):
    path = script(f"while rank == 1: sys.stderr.write('x\\n' * 100000)\n{SLEEPS}")
    [job] = ended([Run("bash", "-c", f"{LAUNCH} -n 2 --timeout 2 {path} 2>&1 | tail -c 2000")])
    assert "rank 1 of 2 is running" in job.out, job.out


def test_silent_job_is_shown_where_it_is_and_continues(script, tmp_path):
    """Its own handler of SIGUSR1, such as one that saves a checkpoint and exits, is not called."""
    own = "signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(9))\nprint('ready', flush=True)\n"
    path = script(f"{own}{UNTIL_GO}\nprint('done')")
    job = Run(LAUNCH, "-n", 2, "--silent", 1, path, cwd=tmp_path).until("ready", times=2)
    job.until(f'File "{path}", line 5 in <module>', times=2, stream="stderr")
    job.until("launch.sh: the job continues; to end it, press Ctrl-C, ", stream="stderr")
    (tmp_path / "go").touch()
    ended([job])
    assert (job.code, sorted(job.out.splitlines())) == (0, [f"[{k}] {w}" for k in (0, 1) for w in ("done", "ready")])
    seconds = re.findall(r"^launch.sh: no rank has printed for (\d+) s: ", job.err, flags=re.MULTILINE)
    assert seconds in (["1"], ["1", "2"])  # of the start, on a busy machine, and of the script


NEVER_ANSWERED = "launch.sh: every rank has run to its end, but a collective was never answered"
ONE_LESS = {  # what rank 0 alone calls, or once more than rank 1 -> what is said of it, behind "flow.comm."
    "flow.comm.all_reduce(x)": "all_reduce at mine.py:6 was called 1 time by rank 0; 0 times by rank 1",
    "flow.comm.barrier()": "barrier at mine.py:6 was called 1 time by rank 0; 0 times by rank 1",
    "y = flow.comm.recv(1, (4,), flow.float32, 'cpu')": "send to rank 0 was called 0 times by rank 1; "
    "flow.comm.recv from rank 1 1 time at mine.py:6 by rank 0",
    "y = t.to_global(sbp=flow.sbp.broadcast)": None,  # only calls of flow.comm are counted
}


@pytest.mark.parametrize("call", ONE_LESS)
def test_collective_that_one_rank_calls_more_than_the_other(script, call):
    t = "flow.ones(4, placement=flow.placement.all('cpu'), sbp=flow.sbp.split(0))"
    head = f"{MET}x, t = flow.ones(4), {t}\n"
    path = script(f"if rank == 0: {call}\nprint('end', flush=True)", head)
    job = Run(LAUNCH, "-n", 2, "--silent", 2, path).until("end", times=2)
    job.until(NEVER_ANSWERED, stream="stderr")
    ended([job.signal(signal.SIGINT)])
    said = [line for line in job.err.splitlines() if line.startswith("launch.sh: flow.comm.")]
    assert said == ([f"launch.sh: flow.comm.{ONE_LESS[call]}"] if ONE_LESS[call] else []), job.err


def test_rank_whose_thread_runs_has_not_run_to_its_end(script):
    path = script("import threading\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nprint('ready')")
    job = launch("-n", 1, "--timeout", 4, path)
    assert job.out == "ready\n" and "launch.sh: rank 0 of 1 is running" in job.err, job.err
    assert NEVER_ANSWERED not in job.err


def test_collective_that_refuses_its_argument_shows_the_lines_of_the_user_and_of_oneflow(script):
    path = script("if rank == 1: flow.comm.all_reduce(7)\nflow.comm.barrier()", MET)
    job = launch("-n", 2, path)
    assert f'[1]   File "{path}", line 5, in <module>' in job.err and "in all_reduce" in job.err, job.err
    assert "rank.py" not in job.err


def test_port_of_another_job_is_refused(script):
    port = free_port()
    first = Run(LAUNCH, "-n", 2, "--master_port", port, script(SLEEPS)).until("ready")
    second = launch("--master_port", port, "recipes/data_parallel.py")
    ended([first.signal(signal.SIGTERM)])
    words = f"launch.sh: port {port}: Address already in use; leave out --master_port to get a free one\n"
    assert (second.code, second.err) == (2, words)


def test_rank_that_is_asked_where_it_is_before_it_can_answer_continues(script, tmp_path):
    """It gets SIGUSR1 while Python starts, before it has a handler, and shows its line when it has one."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif 'HARNESS_JOB' in os.environ:\n    os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    job = Run(LAUNCH, "-n", 2, script("print('met')"), PYTHONPATH=str(tmp_path)).wait()
    assert (job.code, job.out.count("met")) == (0, 2) and job.err.count("(most recent call first)") == 2, job.err


def test_limit_of_addresses_is_refused():
    """OneFlow itself would end with an error that names no limit."""
    job = Run("bash", "-c", f"ulimit -v 3000000 && exec {LAUNCH} data_parallel").wait()
    assert job.code == 2 and job.err.startswith("launch.sh: ulimit -v allows 3000 MB of addresses"), job.err


def test_limit_of_open_files_is_refused():
    """With so few, .venv looks broken: it must not be set up again."""
    job = Run("bash", "-c", f"ulimit -n 10 && exec {LAUNCH} data_parallel").wait()
    assert (job.code, job.out) == (2, "")
    assert job.err == "launch.sh: ulimit -n allows 10 open files, and a rank needs 64: type ulimit -n 1024\n"


# What the launcher, its ranks and argparse in them refuse -> the one line on standard error; see test_options.py too.
REFUSED = {
    "-n 0 recipes/data_parallel.py": "launch.sh: -n must be 1 or more, got 0",
    "--log-dir /dev/null recipes/data_parallel.py": "--log-dir /dev/null: File exists: name another folder",
    "list data_parallel": "launch.sh: list takes no arguments, got data_parallel",
    "docs --short": "launch.sh: docs takes no arguments, got --short",
    "meshes 2": "launch.sh: meshes takes no arguments, got 2",
    "recipes/data_parallel.py --graf": "data_parallel.py: error: unrecognized arguments: --graf",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_refused_in_one_line(line):
    job = launch(*line.split())
    assert (job.code, job.out, job.err.count("\n")) == (2, "", 1) and REFUSED[line] in job.err, job.err


def logs(folder):
    return {path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())}


def test_logs_have_all_of_each_rank_and_the_terminal_that_of_the_first(script, tmp_path):
    lines = "for i in range(1000): print('out', rank, i)\nsys.stderr.write(f'err {rank}\\n')\nprint('end', end='')"
    job = launch("-n", 3, "--log-dir", tmp_path / "new" / "logs", script(lines), "-x", 7)
    assert (job.code, job.err) == (0, "[0] err 0\n")
    assert job.out.splitlines() == [f"[0] out 0 {i}" for i in range(1000)] + ["[0] end"]
    for rank in range(3):
        begin, *written, end = logs(tmp_path / "new" / "logs")[f"rank_{rank}.log"]
        assert begin.endswith(f"one of 3 ranks of {tmp_path / 'mine.py'} -x 7") and end == "launch.sh: ended well"
        assert sorted(written) == sorted([f"out {rank} {i}" for i in range(1000)] + [f"err {rank}", "end"])


def test_logs_of_a_failure_and_of_the_restart_behind_those_of_an_earlier_job(script, tmp_path):
    path = script("print('met', flush=True)\nflow.comm.barrier()\nif rank == 1: 1 / 0\nflow.comm.barrier()", MET)
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank_{rank}.log").write_text("earlier\n")
    job = launch("-n", 2, "--log-dir", tmp_path / "logs", "--max-restarts", 1, path)
    assert (job.code, job.out) == (1, "[0] met\n" * 2)
    assert "[1] ZeroDivisionError: division by zero" in job.err.splitlines()  # not only in its log
    failed = "launch.sh: rank 1 of 2 failed: exit code 1; every rank is ended"
    for rank in (0, 1):
        first, begin, *lines = logs(tmp_path / "logs")[f"rank_{rank}.log"]
        assert first == "earlier" and begin.endswith(f"one of 2 ranks of {path}") and lines[-1] == failed
        own = [line for line in lines if line.startswith("launch.sh: ")]
        assert own == [failed, "launch.sh: restart 1 of 1", failed]
        assert lines.count("met") == 2 and lines.count("ZeroDivisionError: division by zero") == 2 * rank


def test_part_of_a_line_that_was_flushed_is_in_the_log(script, tmp_path):
    lines = f"print('loading ...', end=' ', flush=True)\nif rank == 1: os.kill(os.getpid(), 9)\n{SLEEPS}"
    job = launch("-n", 2, "--log-dir", tmp_path / "logs", script(lines))
    assert job.code == 137 and "loading ..." in "".join(logs(tmp_path / "logs")["rank_1.log"])


def test_reader_that_has_enough_ends_the_job(script):
    path = script("for i in range(10**6): print('line')")
    [job] = ended([Run("bash", "-c", f"{LAUNCH} -n 2 {path} | head -n 1; exit ${{PIPESTATUS[0]}}")])
    assert (re.sub(r"\[\d] ", "", job.out), job.err, job.code) == ("line\n", "", 141)


def test_script_that_forks_ends_well(script):
    job = launch("-n", 2, script("print('met', flush=True)\nchild = os.fork()\nif child: os.wait()"))
    assert (job.code, sorted(job.out.splitlines()), job.err) == (0, ["[0] met", "[1] met"], "")


def test_lines_of_many_ranks_do_not_mix(script):
    lines = "for i in range(3000): sys.stderr.write(f'{rank}' * 99 + '\\n'); print(f'{rank}' * 90)"
    job = Run("bash", "-c", f"{LAUNCH} -n 4 {script(lines)} 2>&1 | cat").wait()
    wanted = {f"[{rank}] {str(rank) * length}" for rank in range(4) for length in (90, 99)}
    assert len(job.out.splitlines()) == 4 * 6000 and set(job.out.splitlines()) == wanted


@pytest.mark.parametrize(
    "stream, more, begin, end",
    [("stderr", (), "\\r", ""), ("stdout", (), "", "\\r"), ("stderr", ("--log-dir", "logs"), "\\r", "")],
    ids=["return first", "return last", "logs"],
)
def test_progress_bar_is_shown_while_it_grows(script, tmp_path, stream, more, begin, end):
    """A line that has no end yet, only a carriage return before or behind each number."""
    bar = f"[print(f'{begin}{{i}} of 2000{end}', end='', flush=True) for i in range(2001)]"
    path = script(f"sys.stdout = sys.{stream}\n{bar}\n{UNTIL_GO}\nprint('{begin}done')")
    job = Run(LAUNCH, "-n", 2, *more, path, cwd=tmp_path)
    shown = (0,) if more else (0, 1)
    for rank in shown:
        job.until(f"[{rank}] {1999 if begin else 2000} of 2000", stream=stream)
    (tmp_path / "go").touch()
    assert job.wait().code == 0
    lines = (job.out if stream == "stdout" else job.err).splitlines()
    for rank in shown:
        assert f"[{rank}] 2000 of 2000" in lines and f"[{rank}] done" in lines


def test_full_disk_ends_the_job_with_an_error(script):
    job = Run("bash", "-c", f"{LAUNCH} -n 1 {script('print(1)')} > /dev/full").wait()
    assert (job.code, job.err) == (1, "launch.sh: [Errno 28] No space left on device: every rank is ended\n")
