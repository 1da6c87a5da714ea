"""What launch.sh calls once the environment is there: `python harness ARGUMENT ...`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of harness/ itself, which Python puts there

from harness import launch  # noqa: E402

COMMANDS = {  # those of launch.COMMANDS
    "test": [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"],
    "bench": [sys.executable, str(ROOT / "benchmarks" / "bench.py")],
    "mutate": [sys.executable, str(ROOT / "tests" / "mutate.py")],
}


def main():
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        os.chdir(ROOT)
        os.execv(sys.executable, COMMANDS[arguments[0]] + arguments[1:])
    if arguments and arguments[0] in ("show", "bytes"):
        from harness import show

        return show.main(*arguments[:1], arguments[1:])
    if arguments[:1] == ["docs"]:
        if arguments[1:]:
            launch.say("docs takes no arguments: type ./launch.sh docs")
            return launch.BAD_INPUT
        from harness import pages

        return pages.main()
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
