"""launch.sh: what it prints, how it refuses, and that nothing hangs or is left behind, whatever a rank does."""

import ast
import os
import re
import shutil
import signal
import socket
import sys
import time

import pytest

from harness.start.recipe import RECIPES, all_paths, path_of
from tests.jobs import LAUNCH, Run, free_port, launch

HEAD = "import os, signal, sys, time\nimport oneflow as flow\nrank = flow.env.get_rank()\nflow.comm.barrier()\n"
PLAIN = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"  # where OneFlow makes no difference


@pytest.fixture
def script(tmp_path):
    """A function that writes a script of a user's, somewhere on disk; its ranks have met once before its lines run."""

    def write(lines, head=HEAD, name="mine.py"):
        path = tmp_path / name
        path.write_text(head + lines + "\n")
        return path

    return write


@pytest.mark.parametrize("name", ["single_device", "sbp_conversions", "hybrid_parallel"])  # on 1, 2 and 4 ranks
def test_recipe_copied_alone_into_an_empty_folder_runs(name, tmp_path):
    shutil.copy(path_of(name), tmp_path)
    job = launch(f"{name}.py", "--graph", cwd=tmp_path, ONEFLOW_LIBIBVERBS_PATH="/nowhere")  # as where there is none
    assert (job.code, job.err) == (0, "")
    assert "on a single device" in job.out.splitlines()[-1]
    assert job.all_gone()
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.py"]


def test_lines_are_marked_with_the_rank():
    job = launch("-n", 4, "row_parallel")
    lines = job.out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["[0]", name] for name in ("x", "w", "partial", "out")]
    assert lines[0] == "[0] x        (4, 5)  oneflow.sbp.split(dim=1)  local shapes (4, 2) (4, 1) (4, 1) (4, 1)"
    assert lines[-1] == "[0] out equals x @ w on a single device"


@pytest.mark.parametrize("name", ["two_d_sbp", "two_d_sbp.py", "recipes/layouts/two_d_sbp.py"])
def test_recipe_is_found_by_its_path_and_by_its_bare_name(name):
    job = launch(name)
    assert (job.code, job.err) == (0, "") and job.out.startswith("[0] x ")


def test_without_arguments_every_recipe_is_listed_by_chapter():
    job = launch()
    assert (job.code, job.err) == (0, "")
    for path in all_paths():
        first = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
        assert re.search(rf"^  {path.stem} +{re.escape(first)}$", job.out, flags=re.MULTILINE), path
    chapters = [f"recipes/{path.name}/" for path in sorted(RECIPES.iterdir()) if path.is_dir() and path.name[0] != "_"]
    found = [line for line in job.out.splitlines() if line.startswith("recipes/")]
    assert sorted(found) == sorted(["recipes/", *chapters])


def test_script_of_the_user_anywhere_with_its_arguments(script, tmp_path):
    shown = "sys.argv, __name__, os.getcwd(), helper.x, flow.env.get_world_size()"
    path = script(f"import helper\nsys.stdout.buffer.write(b'')\nprint({shown})")
    (tmp_path / "helper.py").write_text("x = 'beside'\n")
    job = launch("-n", 2, path, "-n", "7", "--graph", "a b", cwd="/")
    assert job.code == 0, job.err
    expected = f"{[str(path), '-n', '7', '--graph', 'a b']} __main__ / beside 2"
    assert sorted(job.out.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)]


def test_last_line_of_standard_error_without_an_end_is_shown(script):
    job = launch("-n", 2, script("if rank == 1: sys.stderr.write('almost')", PLAIN))
    assert (job.code, job.err) == (0, "[1] almost\n")


def test_each_rank_keeps_to_its_cores(script):
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // 2)
    job = launch("-n", 2, script("print(sorted(os.sched_getaffinity(0)))", PLAIN))
    wanted = [cores[:each], cores[each : 2 * each] or cores[:each]]  # if there is but one, both have it
    assert sorted(job.out.splitlines()) == [f"[{rank}] {wanted[rank]}" for rank in range(2)]


def test_help():
    job = launch("--help")
    assert (job.code, job.err) == (0, "") and "--timeout SECONDS" in job.out


# What a rank does to itself -> the exit code of the job and what standard error holds exactly once.
FAULTS = {
    "all raise": ("raise ValueError('boom')", 1, "ValueError: boom"),
    "exits": ("if rank == 1: sys.exit(3)", 3, "rank 1 of 2 failed: exit code 3"),
    "raises a long text": ("if rank == 1: raise ValueError('\\u00e9' * 100000 + 'boom')", 1, "boom"),
    "exits with a text": ("if rank == 1: sys.exit('no data')", 1, "no data"),
    "is killed": ("if rank == 1: os.kill(os.getpid(), 9)", 137, "rank 1 of 2 failed: killed by signal 9, SIGKILL"),
    "aborts": ("if rank == 1: os.abort()", 134, "rank 1 of 2 failed: killed by signal 6, SIGABRT"),
}
FAULTS_WHILE_ONEFLOW_WAITS = {
    "rank 0 raises": ("if rank == 0: raise ValueError('boom')", 1, "ValueError: boom"),
    "rank 0 is killed": (
        "if rank == 0: os.kill(os.getpid(), 9)",
        137,
        "rank 0 of 2 failed: killed by signal 9, SIGKILL",
    ),
    "OneFlow aborts": ("if rank == 1: flow.placement('cpu', [0, 0])", 134, "Check failed"),
}


@pytest.mark.parametrize("fault", [*FAULTS, *FAULTS_WHILE_ONEFLOW_WAITS])
def test_one_rank_that_fails_ends_the_job(script, fault):
    line, code, text = {**FAULTS, **FAULTS_WHILE_ONEFLOW_WAITS}[fault]
    head, barrier = (PLAIN, "") if fault in FAULTS else (HEAD, "flow.comm.barrier()\n")
    job = launch("-n", 2, script(f"{line}\n{barrier}time.sleep(60)", head))
    assert (job.code, job.err.count(text)) == (code, 1), job.err
    assert job.seconds < 50
    assert job.all_gone(within=0.5)


def test_traceback_shows_the_users_lines_only_and_children_of_ranks_end_too(script):
    path = script(
        "def f():\n    return 1 / 0\nos.system('trap \"\" TERM; sleep 1000 &')\nif rank == 1: f()\ntime.sleep(60)"
    )
    job = launch("-n", 2, path)
    assert job.err.splitlines() == [
        "[1] Traceback (most recent call last):",
        f'[1]   File "{path}", line 8, in <module>',
        "[1]     if rank == 1: f()",
        f'[1]   File "{path}", line 6, in f',
        "[1]     return 1 / 0",
        "[1] ZeroDivisionError: division by zero",
        "launch.sh: rank 1 of 2 failed: exit code 1; every rank is ended",
    ]
    assert job.all_gone(within=0.5)


WAITS_PLAIN = "print('ready', flush=True)\ntime.sleep(1000)"
ENDLESS = "while True: sys.stderr.write('x' * 99 + '\\n')"
WAITS = "print('ready', flush=True)\ntime.sleep(1000) if rank else flow.comm.barrier()"


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_ending_the_launcher_ends_every_rank(script, number):
    waits = (WAITS, HEAD) if number in (signal.SIGINT, signal.SIGKILL) else (WAITS_PLAIN, PLAIN)
    job = Run(LAUNCH, "-n", 2, script(*waits))
    job.until("ready")
    assert len(job.alive()) == 3
    os.kill(job.process.pid, number)
    assert job.all_gone(within=5)
    job.wait()
    assert job.code == (-9 if number == signal.SIGKILL else 128 + number)


def test_signal_to_the_launcher_shows_where_each_rank_is_and_the_job_goes_on(script, tmp_path):
    waits = "print('ready', flush=True); [time.sleep(0.01) for _ in iter(lambda: os.path.exists('go'), True)]"
    path = script(f"{waits}\nprint('done')", PLAIN)
    job = Run(LAUNCH, "-n", 2, path, cwd=tmp_path)
    job.until("ready", times=2)
    os.kill(job.process.pid, signal.SIGUSR1)
    for rank in (0, 1):
        job.until(f'[{rank}]   File "{path}", line 3 in <module>', stream="stderr")
    (tmp_path / "go").touch()
    job.wait()
    assert job.code == 0 and job.out.count("done") == 2


def test_signal_to_the_launcher_does_no_harm_to_what_ranks_have_started(script, tmp_path):
    """SIGUSR1 ends a process that does not expect it; so would one to a rank that has only just been started."""
    lines = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '2'])\n"
        "print('ready', flush=True); sys.exit(child.wait())"
    )
    job = Run(LAUNCH, "-n", 2, script(lines, PLAIN))
    while len(job.ranks()) < 2:
        os.kill(job.process.pid, signal.SIGUSR1) if job.ranks() else None
    job.until("ready", times=2)
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.wait().code == 0 and "line 5 in <module>" in job.err, job.err


def test_last_words_of_ranks_that_are_asked_to_end_are_shown(script):
    lines = "import logging\nsignal.signal(signal.SIGTERM, lambda number, frame: logging.warning(f'saved {rank}'))\n"
    job = Run(LAUNCH, "-n", 2, script(lines + WAITS_PLAIN, PLAIN))
    job.until("ready", times=2)
    os.kill(job.process.pid, signal.SIGTERM)
    job.wait()
    assert job.code == 128 + signal.SIGTERM
    assert sorted(job.err.splitlines())[:2] == [f"[{rank}] WARNING:root:saved {rank}" for rank in (0, 1)], job.err


def test_signal_that_comes_when_all_is_over_does_not_change_the_exit_code(script):
    """As from srun, which ends the other tasks when one has failed."""
    job = Run(LAUNCH, "-n", 1, script("sys.exit(3)", PLAIN))
    for line in job.process.stderr:
        if "every rank is ended" in line:
            break
    while job.process.poll() is None:
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert job.process.returncode == 3


def test_child_of_a_rank_in_a_session_of_its_own_ends_too(script):
    path = script("import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)", PLAIN)
    job = launch("-n", 2, path)
    assert job.code == 0 and job.all_gone(within=0.5)


def test_child_that_the_starter_ignores_has_its_exit_code(script):
    """An ignored SIGCHLD is inherited, and the exit codes of children are lost then."""
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    job = Run(sys.executable, "-c", ignoring, LAUNCH, "-n", 1, script("sys.exit(3)", PLAIN)).wait()
    assert job.code == 3 and "rank 0 of 1 failed: exit code 3" in job.err


def test_rank_that_dies_of_sigpipe_says_so(script):
    path = script("signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nos.kill(os.getpid(), signal.SIGPIPE)", PLAIN)
    job = launch("-n", 1, path)
    words = "launch.sh: rank 0 of 1 failed: killed by signal 13, SIGPIPE; every rank is ended\n"
    assert (job.code, job.err) == (141, words)


def test_stopped_rank_is_ended_too(script):
    job = Run(LAUNCH, "-n", 2, script("print('ready', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)", PLAIN))
    job.until("ready")
    os.kill(job.process.pid, signal.SIGINT)
    assert job.all_gone(within=5)
    job.wait()


def test_time_limit_shows_where_each_rank_is(script):
    path = script(
        "t = flow.ones(2, placement=flow.placement.all('cpu'), sbp=flow.sbp.partial_sum)\nif rank == 0: t.numpy()"
    )
    for limit in (3, 20):  # the second where the machine is too busy to come so far in the first
        job = launch("-n", 2, "--timeout", limit, path)
        assert job.code == 124
        assert f"launch.sh: time limit of {limit} s reached" in job.err
        if f'[0]   File "{path}", line 6' in job.err:
            break
    else:
        raise AssertionError(job.err)
    assert "rank 0 of 2 is running" in job.err and "rank 1 of 2 has run to its end" in job.err
    assert job.all_gone(within=0.5)


def test_rank_that_is_stopped_in_its_exit_is_said_to_be(script):
    path = script("import atexit\natexit.register(lambda: os.kill(os.getpid(), signal.SIGSTOP))", PLAIN)
    jobs = (launch("-n", 1, "--timeout", limit, path) for limit in (2, 20))  # as above
    job = next(job for job in jobs if "rank 0 of 1 is stopped" in job.err)
    assert job.code == 124 and job.all_gone(within=0.5), job.err


def test_reader_that_has_enough_before_the_last_word(script):
    lines = "import atexit\nprint('first', flush=True)\natexit.register(lambda: (time.sleep(1), print('last')))"
    job = Run("bash", "-c", f"{LAUNCH} -n 1 {script(lines, PLAIN)} | head -n 1; exit ${{PIPESTATUS[0]}}").wait()
    assert (job.out, job.err, job.code) == ("first\n", "", 141)


def test_reader_that_has_enough(script):
    path = script("for i in range(10**6): print('line', i)", PLAIN)
    job = Run("bash", "-c", f"{LAUNCH} -n 2 {path} | head -n 1; exit ${{PIPESTATUS[0]}}").wait()
    assert (job.out.count("\n"), job.err, job.code) == (1, "", 141)
    assert job.all_gone()


def test_port_of_another_program_is_refused():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        job = launch("--master_port", port, "recipes/data_parallel.py")
    assert (job.code, job.err) == (
        2,
        f"launch.sh: port {port}: Address already in use; leave out --master_port to get a free one\n",
    )


def test_port_of_another_job_is_refused(script):
    port = free_port()
    first = Run(LAUNCH, "-n", 2, "--master_port", port, script(WAITS_PLAIN, PLAIN))
    first.until("ready")
    second = launch("--master_port", port, "recipes/data_parallel.py")
    first.process.terminate()
    assert second.code == 2 and f"port {port}: Address already in use" in second.err
    first.wait()


def test_jobs_at_once_do_not_disturb_each_other():
    jobs = [Run(LAUNCH, f"recipes/{name}_parallel.py").wait for name in ("data", "row")]
    data, row = (wait() for wait in jobs)
    assert (data.code, row.code) == (0, 0)
    assert len(data.out.splitlines()) == 4 and len(row.out.splitlines()) == 5


def test_proxy_in_the_environment_does_no_harm(script):
    proxy = "http://127.0.0.1:9"
    job = launch("-n", 2, "--timeout", 20, script("print('met')"), http_proxy=proxy, https_proxy=proxy)
    assert (job.code, job.err, job.out.count("met")) == (0, "", 2)


# Bad input -> what the one line on standard error holds. Exit code 2, at once, and no rank was left waiting.
BAD_INPUT = {
    "-n 1 recipes/data_parallel.py": "data_parallel.py runs on 2 to 64 ranks, not on 1: type -n 2",
    "-n 3 recipes/hybrid_parallel.py": "hybrid_parallel.py runs on 4 ranks, not on 3: type -n 4",
    "-n 5 recipes/hybrid_parallel.py": "hybrid_parallel.py runs on 4 ranks, not on 5: type -n 4",
    "-n 2 recipes/single_device.py": "single_device.py runs on 1 ranks, not on 2: type -n 1",
    "-n 0 recipes/data_parallel.py": "-n must be 1 or more, got 0",
    "-n two recipes/data_parallel.py": "argument -n/--nproc_per_node: invalid int value: 'two'",
    "--nproc 2 recipes/data_parallel.py": "unrecognized arguments: --nproc; see ./launch.sh --help",
    "-n 2": "name a Python script, such as recipes/data_parallel.py",
    "--timeout -1 recipes/data_parallel.py": "--timeout must be a number of seconds, or 0 for no limit, got -1",
    "--progress -1 recipes/data_parallel.py": "--progress must be a number of seconds, or 0 for never, got -1",
    "--log-dir /dev/null recipes/data_parallel.py": "--log-dir /dev/null: File exists: name another folder",
    "--master_port 80 recipes/data_parallel.py": "--master_port must be from 1024 to 65535, got 80",
    "recipes/data_paralel.py": "recipes/data_paralel.py: no such file and no recipe: ./launch.sh lists the recipes",
    "recipes": "recipes: no such file and no recipe: ./launch.sh lists the recipes",
    "launch.sh": "launch.sh: not a Python script: line",
    "recipes/data_parallel.py --graf": "data_parallel.py: error: unrecognized arguments: --graf",
    "recipes/data_parallel.py --device tpu": "argument --device: invalid choice: 'tpu' (choose from 'cpu', 'cuda')",
    "recipes/data_parallel.py --device cuda": "a GPU of compute capability 6.0 to 8.9, got 0 for 2: type --device cpu",
}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(line):
    job = launch(*line.split())
    assert job.code == 2
    assert BAD_INPUT[line] in job.err
    assert len(job.err.splitlines()) == 1, job.err
    assert job.out == "" and job.all_gone(within=0.5)


@pytest.mark.parametrize(
    "text, words",
    [
        ("WORLD_SIZES = (2, 4)", "mine.py runs on 2 or 4 ranks, not on 3: type -n 2"),
        ("WORLD_SIZES = ()", "mine.py: WORLD_SIZES must be range(first, last + 1) or a tuple of numbers of ranks"),
        ("WORLD_SIZES = range(0, 3)", "mine.py: WORLD_SIZES must be range(first, last + 1) or a tuple"),
        ("WORLD_SIZES = sizes()", "mine.py: WORLD_SIZES must be range(first, last + 1) or a tuple"),
        ("x = '\0'", "mine.py: "),
    ],
)
def test_script_whose_world_sizes_do_not_fit(script, text, words):
    job = launch("-n", 3, script(text, head=""))
    assert (job.code, job.out) == (2, "") and words in job.err and len(job.err.splitlines()) == 1, job.err


@pytest.mark.parametrize(
    "gpus, usable", [("8.0", 1), ("9.0\\n9.0", 0), ("8.0\\n12.0", 1), ("5.2\\n5.2", 0), ("8.9\\n7.0", None)]
)
def test_gpus_are_refused_where_a_rank_has_none_that_works(tmp_path, script, gpus, usable):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpus}\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = script("WORLD_SIZES = (2,)\nprint('started')", PLAIN)
    job = launch(path, "--device", "cuda", PATH=f"{tmp_path}:{os.environ['PATH']}")
    if usable is None:
        assert (job.code, job.out.count("started")) == (0, 2), job.err
    else:
        assert (job.code, job.out) == (2, "") and f"got {usable} for 2: type --device cpu" in job.err


def test_no_launch_stalls_for_ten_seconds(script):
    """A rank that looks for rank 0 too early sleeps 10 s inside OneFlow; here rank 0 is late on purpose."""
    path = script("print('met')", head="import os, time\nif os.environ['RANK'] == '0': time.sleep(1)\n" + HEAD)
    job = launch("-n", 2, path, GLOG_minloglevel="1")  # with the warning that OneFlow gives when it sleeps
    assert job.code == 0 and "LoadServer" not in job.err, job.err


def logs(folder):
    return {path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())}


def test_logs_have_all_of_each_rank_and_the_terminal_that_of_the_first(script, tmp_path):
    lines = "for i in range(1000): print('out', rank, i)\nsys.stderr.write(f'err {rank}\\n')\nprint('end', end='')"
    job = launch("-n", 3, "--log-dir", tmp_path / "new" / "logs", script(lines, PLAIN), "-x", 7)
    assert (job.code, job.err) == (0, "[0] err 0\n")
    assert job.out.splitlines() == [f"[0] out 0 {i}" for i in range(1000)] + ["[0] end"]
    for rank in range(3):
        begin, *written, end = logs(tmp_path / "new" / "logs")[f"rank_{rank}.log"]
        assert begin.endswith(f"one of 3 ranks of {tmp_path / 'mine.py'} -x 7") and end == "launch.sh: ended well"
        assert sorted(written) == sorted([f"out {rank} {i}" for i in range(1000)] + [f"err {rank}", "end"])


def test_logs_of_a_failure_and_of_the_job_after_it(script, tmp_path):
    path = script("print('met', flush=True)\nflow.comm.barrier()\nif rank == 1: 1 / 0\nflow.comm.barrier()")
    jobs = [launch("-n", 2, "--log-dir", tmp_path / "logs", *more, path) for more in ((), ("--max-restarts", 1))]
    assert [job.code for job in jobs] == [1, 1] and jobs[0].out == "[0] met\n"
    assert "[1] ZeroDivisionError: division by zero" in jobs[0].err.splitlines()  # not only in its log
    found = logs(tmp_path / "logs")
    for rank in (0, 1):
        lines = found[f"rank_{rank}.log"]
        own = [line for line in lines if line.startswith("launch.sh: ")]
        failed = "launch.sh: rank 1 of 2 failed: exit code 1; every rank is ended"
        assert own[1] == failed and own[3:] == [failed, "launch.sh: restart 1 of 1", failed] and lines[-1] == failed
        assert lines.count("met") == 3 and lines.count("ZeroDivisionError: division by zero") == 3 * rank


def test_part_of_a_line_that_was_flushed_is_in_the_log(script, tmp_path):
    lines = "print('loading ...', end=' ', flush=True)\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    job = launch("-n", 2, "--log-dir", tmp_path / "logs", script(lines, PLAIN))
    assert job.code == 137 and "loading ..." in "".join(logs(tmp_path / "logs")["rank_1.log"])


# What a script does to its output, which is the same in plain Python -> what the first of two ranks shows.
OUTPUTS = {
    "puts another standard output there": "sys.stdout = open(os.devnull, 'w')\nprint('nothing')",
    "puts Python's own back": "sys.stdout = open(os.devnull, 'w')\nsys.stdout = sys.__stdout__\nprint('met')",
    "wants it line by line": "sys.stdout.reconfigure(line_buffering=True)\nprint('met')",
    "has none": "print('met')\nsys.stdout = sys.stderr = None",
    "forks": "print('met', flush=True)\nif os.fork() == 0: sys.exit(0)\nos.wait()",
    "forks and runs on": "print('met', flush=True)\npid = os.fork()\nif pid: os.wait()",
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_script_that_does_things_to_its_output_ends_well(script, what):
    job = launch("-n", 2, "--timeout", 30, script(OUTPUTS[what], PLAIN))
    assert (job.code, job.err) == (0, "")
    assert sorted(job.out.splitlines()) == ([] if "another" in what else ["[0] met", "[1] met"])


def test_long_prints_of_many_ranks_do_not_mix(script):
    lines = "for _ in range(20): print('\\n'.join(f'{rank}' * 99 for _ in range(200)))"
    job = launch("-n", 4, script(lines, PLAIN))
    wanted = [f"[{rank}] {str(rank) * 99}" for rank in range(4)]
    assert job.code == 0 and len(job.out.splitlines()) == 16000 and set(job.out.splitlines()) == set(wanted)


@pytest.mark.parametrize("more", [(), ("--log-dir", "logs")], ids=["terminal", "logs"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_progress_bar_is_shown_while_it_grows(script, tmp_path, stream, more):
    """A line that has no end yet, only a carriage return."""
    bar = "[print(f'\\r{i} of 20000', end='', flush=True) for i in range(20001)]\n"
    lines = f"{bar}time.sleep(2)\nprint(', done')"
    job = Run(LAUNCH, "-n", 2, *more, script(lines, f"{PLAIN}sys.stdout = sys.{stream}\n"), cwd=tmp_path)
    seen = {}  # line -> when it first came
    # Our reader takes a carriage return for the end of a line, too, if it is not the last.
    for line in getattr(job.process, stream):
        seen.setdefault(line, time.monotonic())
    assert job.wait().code == 0
    for rank in (0,) if more else (0, 1):
        bar, end = (seen[f"[{rank}] {text}\n"] for text in ("19998 of 20000", "20000 of 20000, done"))
        assert end - bar > 1.5


def test_part_of_a_line_with_a_carriage_return_behind_it_is_shown_at_once(script):
    job = Run(LAUNCH, "-n", 2, script("print('half\\r', end='', flush=True)\ntime.sleep(1000)", PLAIN))
    job.until("half", times=2)
    os.kill(job.process.pid, signal.SIGTERM)
    job.wait()


def test_lines_of_errors_and_of_output_do_not_mix(script):
    lines = "for i in range(3000): sys.stderr.write(f'{rank}' * 99 + '\\n'); print(f'{rank}' * 90)"
    job = Run("bash", "-c", f"{LAUNCH} -n 4 {script(lines, PLAIN)} 2>&1 | cat").wait()
    wanted = {f"[{rank}] {str(rank) * length}" for rank in range(4) for length in (90, 99)}
    assert len(job.out.splitlines()) == 24000 and set(job.out.splitlines()) == wanted


def test_output_that_is_no_text_is_an_error_of_the_script(script):
    job = launch("-n", 2, "--timeout", 30, script("if rank == 1: sys.stdout.write(1.5)\nflow.comm.barrier()"))
    assert job.code == 1 and "[1] TypeError: write() argument must be str, not float" in job.err.splitlines(), job.err
    assert job.err.count("rank 1 of 2 failed: exit code 1") == 1 and 'mine.py", line 5, in <module>' in job.err


def test_full_disk_ends_the_job_with_an_error(script):
    job = Run("bash", "-c", f"{LAUNCH} -n 1 {script('print(1)', PLAIN)} > /dev/full").wait()
    assert (job.code, job.err) == (1, "launch.sh: [Errno 28] No space left on device: every rank is ended\n")


def test_script_is_found_as_by_python_itself(script, tmp_path):
    """By its whole path, and a link to it leads to the modules beside the script, not beside the link."""
    (tmp_path / "links").mkdir()
    (tmp_path / "beside.py").write_text("x = 'beside'\n")
    lines = "import beside\nos.chdir('/')\nprint(os.path.isabs(__file__), beside.x)"
    (tmp_path / "links" / "linked.py").symlink_to(script(lines, PLAIN))
    for command in ([LAUNCH, "-n", 1], [sys.executable]):
        job = Run(*command, "linked.py", cwd=tmp_path / "links", RANK="0").wait()
        assert (job.code, job.out) == (0, "True beside\n"), job.err


def test_line_that_only_looks_like_an_abort_is_shown(script):
    lines = ["F20261122 alike", "F20261122 06:00:00.123456 17 some.cpp:7] Check failed: of a child", "and more"]
    job = launch("-n", 2, script(f"if rank: sys.stderr.write({chr(10).join(lines) + chr(10)!r})", PLAIN))
    assert (job.code, job.err.splitlines()) == (0, [f"[1] {line}" for line in lines])


def test_rank_that_makes_a_job_of_its_own_does_not_wait_for_rank_0(script):
    alone = f"os.environ.update(WORLD_SIZE='1', RANK='0', MASTER_PORT='{free_port()}')"
    path = script(f"if rank:\n    {alone}\n    import oneflow as flow\n    print('alone')", PLAIN)
    job = launch("-n", 2, "--timeout", 30, path)
    assert (job.code, job.out) == (0, "[1] alone\n"), job.err


@pytest.mark.parametrize("more", [(), ("--log-dir", "logs")], ids=["errors", "output"])
def test_rank_that_writes_without_end_is_ended_in_time(script, tmp_path, more):
    stream = "stdout" if more else "stderr"
    path = script(f"while rank == 1: sys.{stream}.write('x\\n' * 100000)\ntime.sleep(60)", PLAIN)
    job = Run("bash", "-c", f"{LAUNCH} -n 2 --timeout 3 {' '.join(more)} {path} 2>&1 | tail -c 2000", cwd=tmp_path)
    job.wait(30)
    assert "rank 1 of 2 is running" in job.out and job.all_gone() and job.seconds < 28, job.out


def test_message_that_is_no_text_is_shown(script, tmp_path):
    """Such as the name of a file in another encoding."""
    path = script("raise RuntimeError('cannot read \\udce9t\\udce9')", PLAIN)
    job = Run(LAUNCH, "-n", 1, "--log-dir", tmp_path / "logs", path, b"\xe9".decode(errors="surrogateescape")).wait()
    assert job.code == 1 and "RuntimeError: cannot read \\udce9t\\udce9" in job.err.splitlines(), job.err
    assert "RuntimeError: cannot read \\udce9t\\udce9" in logs(tmp_path / "logs")["rank_0.log"]


def test_nohup_goes_on_without_its_terminal(script):
    job = Run("nohup", LAUNCH, "-n", 1, script("print('met', flush=True)\ntime.sleep(2)", PLAIN))
    job.until("met")
    os.killpg(job.process.pid, signal.SIGHUP)
    assert job.wait().code == 0


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
    job = Run(LAUNCH, "-n", 2, script(GRAPH_OF_A_FUNCTION.replace("WRONG", wrong))).wait()
    assert job.code == code and f"rank 1 of 2 failed: exit code {code}" in job.err and job.all_gone(), job.err
