"""What launch.sh calls once the environment is there: `python harness ARGUMENT ...`."""

import os
import signal
import sys
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so early there is nothing to end, and nothing to say

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of harness/ itself, which Python puts there

from harness.start import job, output  # noqa: E402

COMMANDS = {  # programs of their own
    "test": [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"],
    "bench": [sys.executable, str(ROOT / "benchmarks" / "bench.py")],
    "faults": [sys.executable, str(ROOT / "benchmarks" / "faults.py")],
    "mutate": [sys.executable, str(ROOT / "benchmarks" / "mutate.py")],
}


def selected(arguments):
    """pytest's arguments for `launch.sh test`: without --all, -k or a file's name it leaves out what is slow."""
    words = [os.path.abspath(word) if os.path.exists(word.split("::")[0]) else word for word in arguments]
    rest = [word for word in words if word != "--all"]
    chosen = words != arguments or any(word.startswith(("-k", "/")) for word in rest)
    return rest if chosen or len(rest) < len(words) else [*rest, "--ignore=tests/slow", "-m", "not slow"]


def main():
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        command, arguments = COMMANDS[arguments[0]], arguments[1:]
        if "pytest" in command:
            arguments = selected(arguments)
        os.chdir(ROOT)
        os.execv(sys.executable, command + arguments)
    if arguments and arguments[0] in ("show", "bytes", "docs") and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments and arguments[0] in ("show", "bytes"):
        from harness.report import show

        return show.main(*arguments[:1], arguments[1:])
    if arguments[:1] == ["docs"]:
        if arguments[1:]:
            output.say("docs takes no arguments: type ./launch.sh docs")
            return job.BAD_INPUT
        from harness.report import pages

        return pages.main()
    return job.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
