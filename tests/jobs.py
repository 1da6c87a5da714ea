"""Start whole jobs as a user does, read what they print, and look at the processes that they leave."""

import atexit
import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from oneflow_cookbook.start.recipe import ROOT, copied_with

LAUNCH = str(ROOT / "launch.sh")
QUOTED = shlex.quote(LAUNCH)  # in a command of a shell
LONG = 300  # seconds for what takes few: only what hangs, or is left behind, takes longer
LIMIT = 2 * LONG  # of launch.sh, so that a job ends too when the process that waits for it has been killed
NO_JOB = ("list", "show", "bytes", "verify", "shell", "plan", "test", "docs", "bench", "meshes", "mutate", "--help")
MARK = "COOKBOOK_TEST_JOB"
SESSION = f"{uuid.uuid4().hex}-"  # how the marks of all jobs of this process begin
NO_LIBIBVERBS = "libibverbs not available, ibv_fork_init skipped"
WAITS = re.compile(r"^launch\.sh: waiting for .*\n", flags=re.MULTILINE)
FOR_TESTS = ("PYTEST_", "OMP_", "GLOG_", "SLURM_", "OMPI_")  # variables of pytest's own job; the jobs must not see them
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(FOR_TESTS)}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[>=]|\x07|\r")

# The first lines of a script: ranks that have met; ranks without OneFlow, for tests that do not need it.
MET = "import os, signal, sys, time\nimport oneflow as flow\nrank = flow.env.get_rank()\nflow.comm.barrier()\n"
PLAIN = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
SLEEPS = "print('ready', flush=True)\ntime.sleep(1000)"  # its last ones: a job that does not end by itself
EQUAL = " on a single device"  # how the last line of a recipe ends
ELASTIC = "recipes/starting/elastic_training.py"
PRINTED = {  # recipe -> what each of its ranks prints, in either mode, and then rank 0
    "hybrid_parallel": (
        *2 * (["w0 (5, 8) of (5, 8)", "x0 (2, 5) of (4, 5)"],),
        *(["out1 (4, 2) of (4, 3)", "w1 (8, 2) of (8, 3)"], ["out1 (4, 1) of (4, 3)", "w1 (8, 1) of (8, 3)"]),
        "out1 is oneflow.sbp.split(dim=1) on ranks 2 3 and equals x0 @ w0 @ w1 on a single device",
    ),
    "row_parallel": (
        ["out (4, 8) of (4, 8)", "w (3, 8) of (5, 8)", "x (4, 3) of (4, 5)"],
        ["out (4, 8) of (4, 8)", "w (2, 8) of (5, 8)", "x (4, 2) of (4, 5)"],
        "out is oneflow.sbp.broadcast and equals x @ w on a single device",
    ),
}


def wait_until(condition, what, seconds=LONG, pause=0.02):
    """Wait until condition() holds. AssertionError with `what` if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds} s, waiting for {what}"
        time.sleep(pause)


def marked(mark, command=b""):
    """The processes (no zombies) with this mark in their environment and these bytes in their command line."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended in between
            if mark.encode() in (process / "environ").read_bytes() and command in (process / "cmdline").read_bytes():
                pids.append(int(process.name))
    return pids


def gone(mark, within=60):
    """Whether all processes with this mark end in time."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not marked(mark), "the end of all processes", within)
    return not marked(mark)


def kill_marked(mark):
    """Kill all processes with this mark, also those that are started meanwhile."""
    for _ in range(100):
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):  # it has ended in between
                os.kill(pid, signal.SIGKILL)
        if gone(mark, within=0.1):
            break


atexit.register(kill_marked, f"{MARK}={SESSION}")  # a test that fails leaves its jobs running


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Run:
    """A job in a session of its own. Each of its processes has a mark in its environment, by which it is found.

    variables: changes of the environment; None removes a variable.
    """

    def __init__(self, *command, cwd=ROOT, **variables):
        mark = SESSION + uuid.uuid4().hex
        self.mark, self.cwd = f"{MARK}={mark}", Path(cwd)
        environment = {**CLEAN, MARK: mark, **variables}
        self.read = {"stdout": b"", "stderr": b""}  # by until()
        command = [str(part) for part in command]
        where = command.index(LAUNCH) + 1 if LAUNCH in command else len(command)
        if command[where:] and command[where] not in NO_JOB:
            command[where:where] = ["--timeout", str(LIMIT)]  # if there is another one, the last counts
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout=LONG):
        """Wait for the end; set out, err, waited and code; return self. AssertionError, all killed, if it hangs.

        waited: the lines by which a launcher says for what it waits, where that takes long. out, err: without these
        (over ssh they are on standard output); err: without the line that OneFlow writes on a host that has no
        libibverbs; launch.sh leaves it out itself.
        """
        if hasattr(self, "code"):
            return self
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            self.kill()
            printed = (self.read["stderr"] + (error.stderr or b"")).decode(errors="replace")
            raise AssertionError(f"{' '.join(self.process.args)} did not end in {timeout} s:\n{printed}") from None
        self.out, err = WAITS.sub("", self._text("stdout") + out), self._text("stderr") + err
        self.waited = "".join(WAITS.findall(err))
        self.err = re.sub(f"^{NO_LIBIBVERBS}\n", "", WAITS.sub("", err), flags=re.MULTILINE)
        self.code = self.process.returncode
        return self

    def _text(self, stream):
        return self.read[stream].decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")

    def until(self, text, times=1, stream="stdout"):
        """Read until `times` lines hold `text`; return self. AssertionError if they do not come."""
        descriptor, deadline = getattr(self.process, stream).fileno(), time.monotonic() + LONG
        while sum(text in line for line in self._text(stream).splitlines(True) if line.endswith("\n")) < times:
            if not select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0]:
                self.kill()
                raise AssertionError(f"{text!r} did not come in {LONG} s: {self.wait().out}{self.err}")
            data = os.read(descriptor, 65536)
            assert data, f"{text!r} never came: {self.wait().out}{self.err}"
            self.read[stream] += data
        return self

    def signal(self, number):
        """Send a signal to the process that was started; return self."""
        self.process.send_signal(number)
        return self

    def alive(self, command=b""):
        """The running processes of this job with these bytes in their command line."""
        return marked(self.mark, command)

    def ranks(self):
        return self.alive(b"harness/oneflow_cookbook/start/rank.py")

    def kill(self):
        kill_marked(self.mark)

    def all_gone(self, within=60):
        """Whether all processes of the job end in time."""
        return gone(self.mark, within)


class Terminal:
    """./launch.sh with these arguments in a terminal of its own; a context manager that leaves nothing running."""

    def __init__(self, *arguments, **variables):
        mark = SESSION + uuid.uuid4().hex
        self.mark = f"{MARK}={mark}"
        environment = {**CLEAN, "TERM": "xterm", "COLUMNS": "120", **variables, MARK: mark}
        self.shown, self.code = "", None
        self.pid, self.end = pty.fork()
        if not self.pid:
            os.execve(LAUNCH, [LAUNCH, *map(str, arguments)], environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hang_up()
        kill_marked(self.mark)
        self.wait()

    def read(self, seconds=0.05):
        """Read what has appeared; returns False if the program has closed the terminal."""
        while self.end is not None and select.select([self.end], [], [], seconds)[0]:
            try:
                data = os.read(self.end, 65536)
            except OSError:
                return False
            if not data:
                return False
            self.shown += ESCAPES.sub("", data.decode(errors="replace"))
        return True

    def until(self, text, after=0):
        """Wait until a text appears after this position of `shown`; returns the position after it."""
        deadline = time.monotonic() + LONG
        while text not in self.shown[after:]:
            assert self.read() or text in self.shown[after:], f"ended without {text!r}:\n{self.shown}"
            assert time.monotonic() < deadline, f"{text!r} did not come in {LONG} s:\n{self.shown}"
        return self.shown.index(text, after) + len(text)

    def type(self, text):
        """Type a line at the prompt, and wait for the next prompt; returns what appeared in between."""
        here = len(self.shown)
        self.press(text + "\n")
        end = self.until(">>> ", here)
        return self.shown[here : end - len(">>> ")].partition("\n")[2]

    def press(self, keys):
        os.write(self.end, keys.encode())

    def hang_up(self):
        """Close the terminal, as a user who closes its window."""
        if self.end is not None:
            os.close(self.end)
            self.end = None

    def wait(self):
        """Wait for the end of the program; returns its exit code."""
        if self.code is None:

            def ended():
                self.read(0)
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
                return pid

            wait_until(ended, "the end of launch.sh")
        return self.code

    def processes(self, command=b""):
        """The running processes of this job with these bytes in their command line."""
        return marked(self.mark, command)

    def leaves_nothing(self):
        return gone(self.mark)


def piped(text, *arguments, **variables):
    """Run launch.sh with this text as its input, to the end; nothing is left."""
    mark = SESSION + uuid.uuid4().hex
    command = [LAUNCH, *map(str, arguments)]
    environment = {**CLEAN, **variables, MARK: mark}
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=LONG)
    assert gone(f"{MARK}={mark}")
    return done


def ended(runs):
    """Wait for the end of these jobs, and assert that they leave nothing; returns them."""
    runs = list(runs)
    for run in runs:
        run.wait()
    assert all(run.all_gone() for run in runs)
    return runs


repeated = []  # the commands that were run a second time, because OneFlow died of SIGSEGV, or hung as it exited


def launch(*arguments, **options):
    """Run ./launch.sh with these arguments to the end; once more if OneFlow died of SIGSEGV."""
    [job] = ended([Run(LAUNCH, *arguments, **options)])
    if job.code == 128 + signal.SIGSEGV:
        repeated.append(" ".join(str(argument) for argument in arguments))
        [job] = ended([Run(LAUNCH, *arguments, **options)])
    return job


def has_printed(recipe, lines, ranks=None):
    """Whether these lines are those of PRINTED, and rank 0 ends with its result; ranks: those on this node.

    The lines of different ranks may come in any order: srun reads the output of each host by itself.
    """
    *shards, result = PRINTED[recipe]
    ranks = range(len(shards)) if ranks is None else ranks
    wanted = [f"[{rank}] {line}" for rank in ranks for line in shards[rank]]
    last = [f"[0] {result}"] if 0 in ranks else []
    of_rank_0 = [line for line in lines if line.startswith("[0] ")]
    return sorted(lines) == sorted(wanted + last) and of_rank_0[-1:] == last


def official(n, *arguments, **options):
    """Start a script with OneFlow's own launcher, on a port of its own; returns at once."""
    command = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", n, "--master_port", free_port()]
    return Run(*command, *arguments, **options)


def start(hosts, *arguments, only=(0, 1), port=None, where=(0, 1), **more):
    """Start these launchers of a job; returns at once. where: the host of each; hosts None: all on this one."""
    port, address, runs = port or free_port(), hosts.addresses[0] if hosts else "127.0.0.1", []
    for launcher in only:
        common = ["--nnodes", len(where), "--node_rank", launcher, "--master_addr", address, "--master_port", port]
        runs.append(Run(*(hosts.on(where[launcher]) if hosts else []), LAUNCH, *common, *arguments, **more))
    return runs


def changed(path, folder, *changes):
    """A copy of a recipe, in a folder, with each of these (old text, new text) replaced."""
    text = (ROOT / path).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    for file in copied_with(ROOT / path):
        shutil.copy(file, folder)
    copy = folder / path.rpartition("/")[2]
    copy.write_text(text)
    return copy


def steps_in(folder):
    """The steps of the checkpoints in a folder."""
    return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())


def saved(folder):
    """The step of the newest checkpoint in a folder, and the bytes of its tensors."""
    step = steps_in(folder)[-1]
    return step, sorted(file.read_bytes() for file in (folder / str(step)).glob("*/out"))


def train(folder, *more, n=2, options=(), script=ELASTIC, code=0):
    """Run elastic training on the checkpoints in a folder; again, from a copy, if OneFlow died of SIGSEGV."""
    command = [LAUNCH, "-n", n, *options, script, "--checkpoint-dir", folder, *more]
    before = folder.with_suffix(".before")
    if folder.exists():
        shutil.copytree(folder, before, dirs_exist_ok=True)
    [run] = ended([Run(*command)])
    if run.code == 128 + signal.SIGSEGV:
        repeated.append(" ".join(map(str, command)))
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            before.rename(folder)
        [run] = ended([Run(*command)])
    shutil.rmtree(before, ignore_errors=True)
    assert run.code == code and (code or "equal those of a single device" in run.out), run.err
    return run


def undisturbed(folder):
    """The checkpoint after step 6 of a training in which no rank dies."""
    assert "[0] starts with step 1: no checkpoint\n" in train(folder, "--steps", 6).out
    step, tensors = saved(folder)
    assert step == 6 and len(tensors) >= 2  # weight and momentum
    return step, tensors
