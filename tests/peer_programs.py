"""Run programs of another Python in forked processes, as PyTorch takes longer to import than most programs to run.

python tests/peer_programs.py MODULE ...    imports the modules, and then runs a program for each line of its input
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback

LIMIT = 600  # seconds for a program; on two cores that 20 others wanted, PyTorch's ranks took 60 to start and import


class Forked:
    """A process that has imported modules, and forks the ranks of programs. A context manager."""

    def __init__(self, python, modules, folder, **variables):
        """python: the interpreter; folder: where programs run; variables: the environment."""
        command = [str(python), __file__, *modules]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": folder, "env": variables}
        self.process = subprocess.Popen(command, start_new_session=True, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def run(self, n, *arguments):
        """What a program prints on n ranks, which find their number as under torchrun. AssertionError if it fails."""
        words = [str(word) for word in arguments]
        self.process.stdin.write(json.dumps([n, words]) + "\n")
        self.process.stdin.flush()
        ready = select.select([self.process.stdout], [], [], 2 * LIMIT)[0]
        answer = self.process.stdout.readline() if ready else ""
        assert answer, "the process that forks has died, or does not answer"
        codes, out, err = json.loads(answer)
        assert not any(codes), f"{' '.join(words)} on {n} ranks: {codes}\n{out}{err[-9000:]}"
        return out


def serve(modules):
    """Import the modules, and answer each job [ranks, arguments] with [exit codes, output, errors]."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints at its import
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        n, arguments = json.loads(line)
        with socket.socket() as probe, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            sys.stdout.flush()
            pids = [forked(rank, n, port, arguments, out, err, answers) for rank in range(n)]
            codes = codes_of(pids)
            for file in (out, err):
                file.seek(0)
            print(json.dumps([codes, out.read(), err.read()]), file=answers, flush=True)


def forked(rank, n, port, arguments, out, err, answers):
    """The id of a process that runs a program as one of n ranks."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(LIMIT)
    os.close(answers.fileno())
    for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), out.fileno(), err.fileno()]):
        os.dup2(descriptor, number)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv, sys.path[0], code = arguments, os.path.dirname(os.path.abspath(arguments[0])), 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def codes_of(pids):
    """The exit codes of these processes; once one fails, the others are killed."""
    codes = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        if pid not in pids:  # of an imported module
            continue
        codes[pid] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        if codes[pid]:
            for other in set(pids) - set(codes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    serve(sys.argv[1:])
