"""The commands of launch.sh, which runs `python harness COMMAND [ARGUMENT ...]` once .venv is there."""

import errno
import os
import signal
import sys
from pathlib import Path

from oneflow_cookbook.start import job
from oneflow_cookbook.start.ending import BAD_INPUT, BROKEN_PIPE
from oneflow_cookbook.start.output import say

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", "-p", "oneflow_cookbook.testing"]
BENCHMARKS = ("bench", "meshes", "mutate")
VALUE_FOLLOWS = ("-c", "-k", "-m", "-o", "-p", "-r", "-W")  # options of pytest: the next word is no path


def pytest_arguments(arguments):
    """The arguments for pytest, which runs in ROOT: with absolute paths, and without --all.

    Without --all, -k or a path, the slow tests are left out.
    """
    words, paths, before = [], [], ""
    for word in arguments:
        if before not in VALUE_FOLLOWS and os.path.exists(word.split("::")[0]):
            word = os.path.abspath(word)
            paths.append(word)
        if word != "--all":
            words.append(word)
        before = word
    if paths or any(word.startswith(("--all", "-k")) for word in arguments):
        return words
    return [*words, "tests", "--ignore=tests/slow", "-m", "not slow"]


def main(command, *arguments):
    """Run a command of launch.sh; returns the exit code."""
    if command in ("docs", "meshes") and arguments:
        say(f"{command} takes no arguments, got {' '.join(arguments)}")
        return BAD_INPUT
    if command == "test":
        import pytest

        arguments = pytest_arguments(arguments)
        os.chdir(ROOT)
        return pytest.main([*PYTEST, *arguments])
    if command in BENCHMARKS:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, str(ROOT / "benchmarks" / f"{command}.py"), *arguments])
    if command in ("show", "bytes"):
        from oneflow_cookbook.report import show

        return show.main(command, arguments)
    if command == "verify":
        from oneflow_cookbook.verify import command as verify

        return verify.main(arguments)
    if command == "shell":
        from oneflow_cookbook.shell import program

        return program.main(arguments)
    if command == "docs":
        from oneflow_cookbook.explore import matmul_runs
        from oneflow_cookbook.start.signals import exit_at

        exit_at(signal.SIGTERM, signal.SIGHUP)
        return matmul_runs.main()
    return job.main([command, *arguments])


def quiet_main(arguments):
    """Run a command, and end it quietly if nobody reads its output, as in `./launch.sh show ... | head`."""
    try:
        code = main(*arguments)
        sys.stdout.flush()
        return code
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in its buffer
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(quiet_main(sys.argv[1:]))
