"""The commands of launch.sh, which runs `python harness COMMAND [ARGUMENT ...]` once .venv is there."""

import errno
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of harness/ itself, which Python puts there

from harness.start import job  # noqa: E402
from harness.start.ending import BAD_INPUT, BROKEN_PIPE  # noqa: E402
from harness.start.output import say  # noqa: E402

PROGRAMS = {
    "test": [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"],
    "bench": [sys.executable, str(ROOT / "benchmarks" / "bench.py")],
    "meshes": [sys.executable, str(ROOT / "benchmarks" / "meshes.py")],
    "mutate": [sys.executable, str(ROOT / "benchmarks" / "mutate.py")],
}
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
    if command in PROGRAMS:
        if command == "test":
            arguments = pytest_arguments(arguments)
        os.chdir(ROOT)
        os.execv(sys.executable, [*PROGRAMS[command], *arguments])
    if command in ("show", "bytes"):
        from harness.report import show

        return show.main(command, arguments)
    if command == "verify":
        from harness.verify import command as verify

        return verify.main(arguments)
    if command == "shell":
        from harness.shell import program

        return program.main(arguments)
    if command == "docs":
        from harness.explore import matmul_runs
        from harness.report import atlas_page
        from harness.start.signals import exit_at

        exit_at(signal.SIGTERM, signal.SIGHUP)
        return atlas_page.main() or matmul_runs.main()
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
