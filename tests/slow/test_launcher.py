"""launch.sh: what it prints, what it refuses, and that nothing hangs or is left behind, whatever a rank does."""

import ast
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from oneflow_cookbook.start.cores import available, cores_of
from oneflow_cookbook.start.recipe import path_of
from tests.jobs import (
    LAUNCH,
    MET,
    PLAIN,
    QUOTED,
    SLEEPS,
    Run,
    Terminal,
    ended,
    free_port,
    has_printed,
    launch,
    piped,
    wait_until,
)
from tests.markdown import CHAPTERS, INDEX, headings, sections

UNTIL_GO = "while not os.path.exists('go'): time.sleep(0.01)"  # the test makes the file


def test_recipe_copied_alone_into_an_empty_folder_runs(tmp_path):
    """Each line of its output has the rank in front."""
    shutil.copy(path_of("row_parallel"), tmp_path)
    no_libibverbs = {"ONEFLOW_LIBIBVERBS_PATH": "/nowhere"}
    job = launch("row_parallel.py", "--graph", cwd=tmp_path, **no_libibverbs)
    assert (job.code, job.err) == (0, "")
    assert has_printed("row_parallel", job.out.splitlines()), job.out
    assert [path.name for path in tmp_path.iterdir()] == ["row_parallel.py"]


@pytest.mark.parametrize("command", [(), ("list",)], ids=["no arguments", "list"])
def test_every_recipe_is_listed_in_the_order_of_the_chapters(command):
    job = launch(*command)
    assert (job.code, job.err) == (0, "")
    lines = []
    for page in CHAPTERS:
        lines.append(headings(page)[0] if page != INDEX else "1 Global tensors")
        for path in (section.path for section in sections(page)):
            lines.append(f"  {path.stem:25} {ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]}")
    assert [line for line in job.out.splitlines()[1:-1] if line] == lines


def test_script_of_the_user_anywhere_with_its_arguments(script, tmp_path):
    """As by Python itself: a link to a script leads to the modules beside the script."""
    printed = "sys.argv, __name__, os.getcwd(), helper.x, os.environ['WORLD_SIZE']"
    (tmp_path / "links").mkdir()
    path = tmp_path / "links" / "linked.py"
    path.symlink_to(script(f"import helper\nprint({printed})"))
    (tmp_path / "helper.py").write_text("x = 'beside'\n")
    job = launch("-n", 2, path, "-n", "7", "--graph", "a b", cwd="/")
    assert job.code == 0, job.err
    expected = f"{[str(path), '-n', '7', '--graph', 'a b']} __main__ / beside 2"
    assert sorted(job.out.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)]


def test_module_runs_as_by_python_itself(tmp_path):
    """Its package is imported, relative imports work, and its traceback has the user's lines only."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("x = 'in the package'\n")
    prints = "print(__name__, __package__, sys.argv, sys.path[0], x, sys.modules['__main__'].x)"
    path = tmp_path / "package" / "train.py"
    path.write_text(f"import sys\nfrom . import x\n{prints}\nif sys.argv[1:] == ['raise']: 1 / 0\n")
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

parser = argparse.ArgumentParser("prog", usage="mine")
file = io.StringIO()
parser.print_usage(file=file)
assert file.getvalue() == "usage: mine\\n"
with contextlib.redirect_stdout(io.StringIO()) as file:
    parser.print_help()
assert "usage: mine" in file.getvalue()
parser.exit(0, "the end\\n")
"""


def test_what_argparse_prints_to_a_file_is_in_the_file(script):
    """What it prints to standard output or error is shown once, not by each rank."""
    job = launch("-n", 2, script(HELP))
    assert (job.code, job.err, job.out) == (0, "", "the end\n")


@pytest.mark.parametrize(
    "cores, n, wanted",
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1], 4, [[0], [1], [0], [1]]),
        ([2, 3, 5, 7, 8], 2, [[2, 3], [5, 7]]),
        ([4], 1, [[4]]),
    ],
)
def test_ranks_share_the_cores(cores, n, wanted):
    assert [cores_of(rank, n, cores) for rank in range(n)] == wanted


SET = ("OMP_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT", "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD")


def test_each_rank_keeps_to_its_cores_and_to_what_the_user_has_set(script):
    path = script(f"print(sorted(os.sched_getaffinity(0)), [os.environ.get(name) for name in {SET}])")
    job, alone = launch("-n", 2, path, OMP_NUM_THREADS="3"), launch("-n", 1, path, OPENBLAS_THREAD_TIMEOUT="20")
    cores = available()
    expected = [f"[{rank}] {cores_of(rank, 2, cores)} ['3', '18', None]" for rank in range(2)]
    assert sorted(job.out.splitlines()) == expected
    assert alone.out == f"{cores_of(0, 1, cores)} ['{len(cores_of(0, 1, cores))}', '20', '0']\n"


def test_rank_0_that_comes_late_is_waited_for(script):
    """A rank that looks for rank 0 too early would sleep for 10 s inside OneFlow, which logs a warning."""
    late = "import os, time\nif os.environ['RANK'] == '0': time.sleep(1)\n"
    job = launch("-n", 2, script("print('met')", late + MET), GLOG_minloglevel="1")
    assert job.code == 0 and "LoadServer" not in job.err, job.err


# What a rank does -> head of the script, its next line, the job's exit code, what standard error has exactly once.
FAULTS = {
    "all raise": (PLAIN, "raise ValueError('boom')", 1, "ValueError: boom"),
    "exits with a text": (PLAIN, "if rank == 1: sys.exit('no data')", 1, "no data"),
    "long text, not UTF-8": (PLAIN, "if rank == 1: raise ValueError('\\u00e9' * 100000 + '\\udce9!')", 1, "\\udce9!"),
    "is killed while OneFlow waits": (MET, "if rank == 0: os.kill(os.getpid(), 9)", 137, "killed by signal 9, SIGKILL"),
    "crashes": (MET, "if rank == 1: os.kill(os.getpid(), signal.SIGBUS)", 135, "line 5 in <module>"),
    "is aborted by OneFlow": (MET, "if rank == 1: flow.placement('cpu', [0, 0])", 134, "Check failed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_that_fails_ends_the_job(script, fault):
    head, line, code, text = FAULTS[fault]
    waits = SLEEPS if head == PLAIN else "flow.comm.barrier()"
    path = script(f"{line}\n{waits}", head)
    job = launch("-n", 2, path)
    assert (job.code, job.err.count(text)) == (code, 1), job.err
    assert "rank.py" not in job.err and ("Traceback" not in job.err or f'File "{path}", line' in job.err), job.err


GRAPH_OF_A_FUNCTION = """
class Gather(flow.nn.Graph):
    def build(self, x):
        return x.to_global(sbp=flow.sbp.broadcast) + 1


def train():
    ranks, graph = flow.placement("cpu", [0, 1]), Gather()
    for step in range(100000):
        graph(flow.ones(8, placement=ranks, sbp=flow.sbp.split(0))).numpy()
        if step == 3 and rank == 1:
            1 / 0


train()
"""


def test_rank_that_raises_where_a_graph_is_local_ends_the_job(script):
    """The graph must not be freed on the way out: OneFlow 0.9.0 would wait for the other ranks, or abort."""
    [job] = ended([Run(LAUNCH, "-n", 2, script(GRAPH_OF_A_FUNCTION, MET))])
    assert job.code == 1 and "rank 1 of 2 failed: exit code 1" in job.err, job.err


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_ending_the_launcher_ends_a_rank_that_waits_in_oneflow_and_one_that_is_stopped(script, number):
    stops = "os.kill(os.getpid(), signal.SIGSTOP) if rank else flow.comm.barrier()"
    job = Run(LAUNCH, "-n", 2, script(f"print('ready', flush=True)\n{stops}", MET)).until("ready", times=2)
    assert len(job.alive()) == 3
    ended([job.signal(number)])
    assert job.code == (-9 if number == signal.SIGKILL else 128 + number)
    assert job.err == ("" if number == signal.SIGKILL else f"launch.sh: {number.name}: every rank is ended\n")


# At SIGTERM rank 0 saves until the test makes the file `go`, and rank 1 ends. Both have a child, as with a DataLoader.
SAVES = """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
def save(number, frame):
    print("saves", flush=True)
    while not os.path.exists("go"): time.sleep(0.01)
    print("x" * 200000, "saved", child.poll(), flush=True)
    sys.exit("no space left")
if rank == 0: signal.signal(signal.SIGTERM, save)
"""


def saving_at_sigterm(script, tmp_path, grace):
    """A job whose rank 0 has begun to save."""
    job = Run(LAUNCH, "-n", 2, "--grace", grace, script(SAVES + SLEEPS), cwd=tmp_path).until("ready", times=2)
    return job.signal(signal.SIGTERM).until("[0] saves")


def test_rank_that_saves_a_checkpoint_at_sigterm_has_time_up_to_grace(script, tmp_path):
    """What it prints meanwhile is shown, and its child does not end before it does."""
    job = saving_at_sigterm(script, tmp_path, grace=1000)
    wait_until(lambda: len(job.ranks()) == 1, "the end of rank 1, which does not save")
    time.sleep(2)  # ranks of a job that has failed have 1 s
    (tmp_path / "go").touch()
    ended([job])
    assert job.code == 128 + signal.SIGTERM and "x saved None\n" in job.out, job.out[-200:]
    assert job.err == "launch.sh: SIGTERM: every rank is ended\n[0] no space left\n"


@pytest.mark.parametrize("grace, number", [(1, None), (1000, signal.SIGINT)])
def test_wait_for_a_checkpoint_ends_after_grace_or_at_ctrl_c(script, tmp_path, grace, number):
    job = saving_at_sigterm(script, tmp_path, grace).signal(signal.SIGTERM)  # a scheduler may send it twice
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


# A script under each command, and a test file: it shows that it runs by the file `begun`, and waits for the file `go`.
HANGS_UP = f"""
is_rank = "RANK" in os.environ
import oneflow as flow

def test_it():
    x = flow.ones(4, 4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    os.chdir("{{folder}}")
    open("begun", "w").close()
    {UNTIL_GO}
    y = flow.matmul(x, x)

if is_rank:
    test_it()
"""
HELD = ("-n 2", "show -n 2", "bytes -n 2", "verify -n 2", "shell -n 2", "test")


@pytest.fixture
def held(script, tmp_path):
    """A function from a command, and words before it, to its job, which waits for the file `go`."""

    def start(command, *before):
        job = Run(
            *before,
            LAUNCH,
            *command.split(),
            script(HANGS_UP.format(folder=tmp_path), "import os, time\n"),
            cwd=tmp_path,
        )
        wait_until((tmp_path / "begun").exists, "the script to begin")
        os.killpg(job.process.pid, signal.SIGHUP)
        return job

    return start


@pytest.mark.parametrize("command", HELD)
def test_nohup_goes_on_without_its_terminal(held, tmp_path, command):
    job = held(command, "nohup")
    (tmp_path / "go").touch()
    assert ended([job]) and job.code == 0, job.err


@pytest.mark.parametrize("command", HELD)
def test_terminal_that_is_closed_ends_every_rank(held, command):
    job = held(command)
    assert ended([job]) and job.code == 128 + signal.SIGHUP
    said = re.findall(r".*SIGHUP: every rank is ended.*", job.out if command == "test" else job.err)
    assert len(said) == 1 and "Traceback" not in job.err, job.err


DEBUGGED = "x = 41\nbreakpoint()\nprint('x', x + int(input('add? ')))"


def test_one_rank_can_be_debugged_in_the_terminal(script):
    """A prompt is shown, although it ends no line, and Ctrl-C ends the job."""
    with Terminal("-n", 1, script(DEBUGGED)) as terminal:
        here = terminal.until("(Pdb) ")
        terminal.press("x = 50\nc\n")
        here = terminal.until("add? ", here)
        terminal.press("2\n")
        terminal.until("x 52\n", here)
        assert terminal.wait() == 0
    with Terminal("-n", 1, script(DEBUGGED)) as terminal:
        terminal.until("(Pdb) ")
        terminal.press("\x03")
        terminal.until("launch.sh: SIGINT: every rank is ended")
        assert terminal.wait() == 130 and terminal.leaves_nothing()


def test_one_rank_reads_what_is_piped_to_launch(script):
    job = piped("x = 50\nc\n2\n", "-n", "1", script(DEBUGGED))
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "(Pdb) (Pdb) add? x 52"), job.stderr


NO_TERMINAL = "ranks share no terminal: debug one rank, with ./launch.sh -n 1, or type statements in ./launch.sh shell"
ASKS = (
    "breakpoint()\npass",
    "import pdb; pdb.set_trace()\npass",
    "import pdb; pdb.Pdb().set_trace()\npass",
    "import pdb\ntry: 1 / 0\nexcept ZeroDivisionError: pdb.post_mortem()",
    "input('go on? ')",
)


@pytest.mark.parametrize("line", ASKS)
def test_several_ranks_that_ask_for_input_say_what_to_do(script, line):
    job = launch("-n", 2, script(f"if rank == 0: time.sleep(1000)\n{line}"))
    *trace, error, failed = job.err.splitlines()
    assert (job.code, error) == (1, f"[1] EOFError: {NO_TERMINAL}") and "db.py" not in "".join(trace), job.err
    assert failed == "launch.sh: rank 1 of 2 failed: exit code 1; every rank is ended"


def test_rank_that_writes_without_end_is_ended_by_the_time_limit(script):
    path = script(f"while rank == 1: sys.stderr.write('x\\n' * 100000)\n{SLEEPS}")
    [job] = ended([Run("bash", "-c", f"{QUOTED} -n 2 --timeout 2 {path} 2>&1 | tail -c 2000")])
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
    words = [f"[{rank}] {word}" for rank in (0, 1) for word in ("done", "ready")]
    assert (job.code, sorted(job.out.splitlines())) == (0, words)
    assert "launch.sh: no rank has printed for 1 s: " in job.err


NEVER_ANSWERED = "launch.sh: every rank has run to its end, but a collective was never answered"


def test_collective_that_one_rank_calls_more_than_the_other(script):
    t = "flow.ones(4, placement=flow.placement.all('cpu'), sbp=flow.sbp.split(0))"
    path = script(f"t = {t}\nif rank == 0: y = t.to_global(sbp=flow.sbp.broadcast)\nprint('end', flush=True)", MET)
    # on a busy machine the import of OneFlow takes seconds without output
    job = Run(LAUNCH, "-n", 2, "--silent", 6, path).until("end", times=2)
    job.until(NEVER_ANSWERED, stream="stderr")
    ended([job.signal(signal.SIGINT)])
    assert job.err.count("in atexit_hook") == 2, job.err


LOADER = """
import oneflow as flow
from oneflow.utils.data import DataLoader, Dataset
class Samples(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {sample}
for batch in DataLoader(Samples(), num_workers=1, collate_fn=lambda samples: samples[0]):
    pass
"""
SMALL = 'mount -t tmpfs -o size=4m tmpfs /dev/shm || exit 77; exec "$@"'
UNSHARED = ["unshare", "--map-root-user", "--mount", "bash", "-c", SMALL, "bash"]
WAITS_FOR = (
    "launch.sh: a worker process of rank 0 could not send a batch, see its traceback above; the rank waits for it"
)
LOST = {  # what the worker returns -> (words before the command, how the line about it goes on)
    "lambda: 0": ([], ""),
    "flow.ones(2000000)": (
        UNSHARED,
        ". /dev/shm has 4 MiB, 4 of them free now: give a container more, such as --shm-size 2g, or load with "
        "num_workers=0",
    ),
}


@pytest.mark.parametrize("sample", LOST)
def test_rank_that_waits_for_a_batch_that_was_lost_is_shown_with_the_cause(script, sample):
    before, words = LOST[sample]
    if before and subprocess.call([*before, "true"]):
        pytest.skip("a /dev/shm of its own needs a mount namespace, which this machine does not give")
    job = Run(*before, LAUNCH, "-n", 1, "--silent", 2, script(LOADER.format(sample=sample), ""))
    job.until(f"{WAITS_FOR}{words}\n", stream="stderr")
    ended([job.signal(signal.SIGINT)])
    assert "dataloader.py" in job.err, job.err


THREAD = """
import threading
def run():
    threading.main_thread().join()
    print("ready", flush=True)
    time.sleep(1000)
threading.Thread(target=run).start()
"""


def test_rank_whose_thread_runs_has_not_run_to_its_end(script):
    job = Run(LAUNCH, "-n", 1, "--silent", 2, script(THREAD)).until("ready")
    job.until("launch.sh: rank 0 of 1 is running", stream="stderr")
    ended([job.signal(signal.SIGINT)])
    assert NEVER_ANSWERED not in job.err


def test_port_of_another_job_is_refused(script):
    port = free_port()
    first = Run(LAUNCH, "-n", 2, "--master_port", port, script(SLEEPS)).until("ready")
    second = launch("--master_port", port, "recipes/data_parallel.py")
    ended([first.signal(signal.SIGTERM)])
    words = f"launch.sh: port {port}: Address already in use; choose a different --master_port\n"
    assert (second.code, second.err) == (2, words)


def test_rank_that_is_asked_where_it_is_before_it_can_answer_continues(script, tmp_path):
    """It gets SIGUSR1 while Python starts, before it has a handler, and shows its line when it has one."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif 'HARNESS_JOB' in os.environ:\n    os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    job = Run(LAUNCH, "-n", 2, script("print('met')"), PYTHONPATH=str(tmp_path)).wait()
    assert (job.code, job.out.count("met")) == (0, 2) and job.err.count("(most recent call first)") == 2, job.err


LIMITS = {  # without the check OneFlow names no limit, and .venv looks broken and would be set up again
    "ulimit -v 3000000": "ulimit -v allows 3000 MB of addresses, and a rank needs 5000: type ulimit -v unlimited",
    "ulimit -n 10": "ulimit -n allows 10 open files, and a rank needs 64: type ulimit -n 1024",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limit_that_is_too_low_is_refused(limit):
    job = Run("bash", "-c", f"{limit} && exec {QUOTED} data_parallel").wait()
    assert (job.code, job.out, job.err) == (2, "", f"launch.sh: {LIMITS[limit]}\n")


# What the launcher, its ranks and argparse in them refuse -> the one line on standard error; see test_options.py too.
REFUSED = {
    "--log-dir /dev/null recipes/data_parallel.py": "--log-dir /dev/null: File exists: choose a different folder",
    "recipes/data_parallel.py --graf": "data_parallel.py: error: unrecognized arguments: --graf",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_refused_in_one_line(line):
    job = launch(*line.split())
    assert (job.code, job.out, job.err.count("\n")) == (2, "", 1) and REFUSED[line] in job.err, job.err


OWN_PARSER = """import argparse
class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(2)
"""
EXITS_WITH_2 = {  # what a rank does -> the message of the rank in one attempt; each of two attempts prints it
    "sys.exit(2)": "",
    "sys.exit(2) if rank else time.sleep(1000)": "",
    "os._exit(2)": "",
    "parser.print_usage()\nsys.exit(2)": "usage: mine.py [-h]",
    "if rank: parser.error('no file 1')\ntime.sleep(1000)": "mine.py: error: no file 1",
    "try: parser.error('bad')\nexcept SystemExit: pass\nsys.exit(2)": "mine.py: error: bad",
    "def main(parser): sys.exit(2)\nmain(parser)": "",
}


@pytest.mark.parametrize("lines", EXITS_WITH_2)
def test_exit_code_2_is_a_failure_like_any_other(script, lines):
    job = launch("-n", 2, "--max-restarts", 1, script(f"import argparse\nparser = argparse.ArgumentParser()\n{lines}"))
    assert job.code == 2
    shown, restart, again = job.err.partition("launch.sh: restart 1 of 1\n")
    message = EXITS_WITH_2[lines] and rf"\[\d\] {re.escape(EXITS_WITH_2[lines])}\n"
    for text in (shown, again):
        failed = r"launch\.sh: rank \d of 2 failed: exit code 2; every rank is ended\n"
        assert re.fullmatch(message + failed, text), job.err
    assert restart


REFUSALS = {  # how each rank refuses its arguments -> what is printed, once
    "argparse.ArgumentParser().parse_args()": "mine.py: error: unrecognized arguments: --typo",
    "argparse.ArgumentParser().exit(2, 'no\\n')": "no",
    "argparse.ArgumentParser().error(f'no file {rank}')": "mine.py: error: no file 0\nmine.py: error: no file 1",
    "Parser().parse_args()": "launch.sh: rank 0 of 2 failed: exit code 2; every rank is ended",
    "Parser().error('no')": "launch.sh: rank 0 of 2 failed: exit code 2; every rank is ended",
}


@pytest.mark.parametrize("line", REFUSALS)
def test_arguments_that_all_ranks_refuse_are_refused_once_and_not_tried_again(script, line):
    waits = "time.sleep(rank)\n"  # the ranks need not refuse at the same moment
    job = launch("-n", 2, "--max-restarts", 1, script(OWN_PARSER + waits + line), "--typo")
    assert (job.code, job.out, job.err) == (2, "", REFUSALS[line] + "\n")


def logs(folder):
    return {path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())}


def test_logs_have_all_of_each_rank_and_the_terminal_that_of_the_first(script, tmp_path):
    lines = "for i in range(1000): print('out', rank, i)\nsys.stderr.write(f'err {rank}\\n')\nprint('end', end='')"
    job = launch("-n", 3, "--log-dir", tmp_path / "new" / "logs", script(lines), "-x", 7)
    assert (job.code, job.err) == (0, "[0] err 0\n")
    assert job.out.splitlines() == [f"[0] out 0 {i}" for i in range(1000)] + ["[0] end"]
    for rank in range(3):
        begin, *written, end = logs(tmp_path / "new" / "logs")[f"rank_{rank}.log"]
        assert begin.endswith(f"one of 3 ranks of {tmp_path / 'mine.py'} -x 7") and end == "launch.sh: succeeded"
        assert sorted(written) == sorted([f"out {rank} {i}" for i in range(1000)] + [f"err {rank}", "end"])


def test_logs_of_a_failure_and_of_the_restart_behind_those_of_an_earlier_job(script, tmp_path):
    """Also a part of a line that was flushed."""
    waits = f"    {UNTIL_GO}\n    os.remove('go')\n    print('loading ...', end=' ', flush=True)\n"
    fails = f"if rank == 0: open('go', 'w')\nelse:\n{waits}    1 / 0\n"
    path = script(f"print('met', flush=True)\n{fails}{SLEEPS}")
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank_{rank}.log").write_text("earlier\n")
    job = launch("-n", 2, "--log-dir", "logs", "--max-restarts", 1, path, cwd=tmp_path)
    assert (job.code, job.out.count("[0] met\n")) == (1, 2) and "[1]" not in job.out
    assert "[1] ZeroDivisionError: division by zero" in job.err.splitlines()  # not only in its log
    failed = "launch.sh: rank 1 of 2 failed: exit code 1; every rank is ended"
    for rank in (0, 1):
        first, begin, *lines = logs(tmp_path / "logs")[f"rank_{rank}.log"]
        assert first == "earlier" and f" of 2 ranks of {path}" in begin and lines[-1] == failed
        own = [line for line in lines if line.startswith("launch.sh: ")]
        assert own == [failed, "launch.sh: restart 1 of 1", failed]
        assert lines.count("met") == 2 and lines.count("ZeroDivisionError: division by zero") == 2 * rank
        assert "".join(lines).count("loading ...") == 2 * rank


def test_reader_that_has_enough_ends_the_job(script):
    path = script("for i in range(10**6): print('line')")
    [job] = ended([Run("bash", "-c", f"{QUOTED} -n 2 {path} | head -n 1; exit ${{PIPESTATUS[0]}}")])
    assert (re.sub(r"\[\d] ", "", job.out), job.err, job.code) == ("line\n", "", 141)


@pytest.mark.parametrize("command", ["show -n 2 data_parallel", "list"])
def test_command_whose_output_nobody_reads_ends_quietly(command):
    """As in `./launch.sh show ... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    job = subprocess.run([LAUNCH, *command.split()], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert job.returncode in (141, -signal.SIGPIPE) and job.stderr == ""


def test_script_that_forks_ends_well(script):
    job = launch("-n", 2, script("print('met', flush=True)\nchild = os.fork()\nif child: os.wait()"))
    assert (job.code, sorted(job.out.splitlines()), job.err) == (0, ["[0] met", "[1] met"], "")


def test_lines_of_many_ranks_do_not_mix(script):
    lines = "for i in range(3000): sys.stderr.write(f'{rank}' * 99 + '\\n'); print(f'{rank}' * 90)"
    job = Run("bash", "-c", f"{QUOTED} -n 4 {script(lines)} 2>&1 | cat").wait()
    wanted = {f"[{rank}] {str(rank) * length}" for rank in range(4) for length in (90, 99)}
    assert len(job.out.splitlines()) == 4 * 6000 and set(job.out.splitlines()) == wanted


@pytest.mark.parametrize(
    "stream, more, begin, end",
    [("stdout", (), "", "\\r"), ("stderr", ("--log-dir", "logs"), "\\r", "")],
    ids=["return last", "return first, logs"],
)
def test_progress_bar_is_shown_while_it_grows(script, tmp_path, stream, more, begin, end):
    """A line that has no end yet, only a carriage return before or behind each number."""
    bar = f"[print(f'{begin}{{i}} of 2000{end}', end='', flush=True) for i in range(2001)]"
    path = script(f"sys.stdout = sys.{stream}\n{bar}\n{UNTIL_GO}\nprint('{begin}done')")
    job = Run(LAUNCH, "-n", 2, *more, path, cwd=tmp_path)
    ranks = (0,) if more else (0, 1)
    for rank in ranks:
        job.until(f"[{rank}] {1999 if begin else 2000} of 2000", stream=stream)
    (tmp_path / "go").touch()
    assert job.wait().code == 0
    lines = (job.out if stream == "stdout" else job.err).splitlines()
    for rank in ranks:
        assert f"[{rank}] 2000 of 2000" in lines and f"[{rank}] done" in lines


def test_full_disk_ends_the_job_with_an_error(script):
    job = Run("bash", "-c", f"{QUOTED} -n 1 {script('print(1)')} > /dev/full").wait()
    assert (job.code, job.err) == (1, "launch.sh: [Errno 28] No space left on device: every rank is ended\n")
