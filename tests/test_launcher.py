"""launch.sh: what it prints, how it refuses, and that nothing hangs or is left behind, whatever a rank does."""

import os
import shutil
import signal
import socket
import time

import pytest

from tests.cases import RECIPES
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
    shutil.copy(RECIPES / f"{name}.py", tmp_path)
    job = launch(f"{name}.py", "--graph", cwd=tmp_path)
    assert (job.code, job.err) == (0, "")
    assert "equal to the single-device values: largest difference " in job.out.splitlines()[-1]
    assert job.all_gone()
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.py"]


def test_lines_come_in_rank_order_marked_and_unmixed():
    job = launch("-n", 4, "recipes/row_parallel.py")
    lines = job.out.splitlines()
    names = ("x", "w", "partial", "out")
    assert [line.split()[:4] for line in lines[:-1]] == [
        [f"[{rank}]", "rank", f"{rank}:", name] for rank in range(4) for name in names
    ]
    assert lines[0] == "[0] rank 0: x        rows 0-3   columns 0-1    S(1) on ranks [0, 1, 2, 3]"
    assert lines[14] == "[3] rank 3: partial  rows 0-3   columns 0-7    P    on ranks [0, 1, 2, 3]"


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
    assert job.seconds < 20
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
WAITS = "print('ready', flush=True)\ntime.sleep(1000) if rank else flow.comm.barrier()"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ending_the_launcher_ends_every_rank(script, number):
    waits = (WAITS, HEAD) if number in (signal.SIGINT, signal.SIGKILL) else (WAITS_PLAIN, PLAIN)
    job = Run(LAUNCH, "-n", 2, script(*waits))
    job.until("ready")
    assert len(job.alive()) == 3
    os.kill(job.process.pid, number)
    assert job.all_gone(within=5)
    job.wait()
    assert job.code == (-9 if number == signal.SIGKILL else 128 + number)


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
    job = launch("-n", 2, "--timeout", 3, path)
    assert job.code == 124
    assert "launch.sh: time limit of 3 s reached" in job.err
    assert f'[0]   File "{path}", line 6' in job.err
    assert "rank 0 of 2 is running" in job.err and "rank 1 of 2 has run to its end" in job.err
    assert job.all_gone(within=0.5)


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
    jobs = [Run(LAUNCH, "recipes/data_parallel.py", "--seed", seed) for seed in range(2)]
    outputs = [job.wait().out for job in jobs]
    assert [job.code for job in jobs] == [0] * 2
    assert all(len(output.splitlines()) == 7 for output in outputs)


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
    "--master_port 80 recipes/data_parallel.py": "--master_port must be from 1024 to 65535, got 80",
    "recipes/data_paralel.py": "recipes/data_paralel.py: no such file; did you mean recipes/data_parallel.py?",
    "data_parallel": "data_parallel: no such file; did you mean recipes/data_parallel.py?",
    "tset": "tset: no such file; did you mean ./launch.sh test?",
    "recipes": "recipes: no such file; name a Python script, such as recipes/data_parallel.py",
    "launch.sh": "launch.sh: not a Python script: line",
    "recipes/data_parallel.py --graf": "data_parallel.py: error: unrecognized arguments: --graf",
    "recipes/data_parallel.py --device cuda": "each rank needs a GPU of compute capability 6.0 to 8.9, got 0",
}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(line):
    job = launch(*line.split(), CUDA_VISIBLE_DEVICES="")
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


def test_no_argument_shows_the_help():
    job = launch()
    assert (job.code, job.out) == (2, "") and "./launch.sh [option ...] SCRIPT" in job.err


def test_no_launch_stalls_for_ten_seconds(script):
    """A rank that looks for rank 0 too early sleeps 10 s inside OneFlow; here rank 0 is late on purpose."""
    path = script("print('met')", head="import os, time\nif os.environ['RANK'] == '0': time.sleep(1)\n" + HEAD)
    begin = time.monotonic()
    assert launch("-n", 2, path).code == 0
    assert time.monotonic() - begin < 9
