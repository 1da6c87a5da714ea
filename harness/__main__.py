"""What launch.sh runs once the environment is there: `python harness ARGUMENT ...`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of harness/ itself, which Python puts there

from harness.start import job  # noqa: E402
from harness.start.ending import BAD_INPUT  # noqa: E402
from harness.start.output import say  # noqa: E402

PROGRAMS = {
    "test": [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"],
    "bench": [sys.executable, str(ROOT / "benchmarks" / "bench.py")],
    "meshes": [sys.executable, str(ROOT / "benchmarks" / "meshes.py")],
    "mutate": [sys.executable, str(ROOT / "benchmarks" / "mutate.py")],
}


def pytest_arguments(arguments):
    """Without --all, -k or a file leave out what is slow; make paths absolute, as pytest runs in ROOT."""
    paths = [word for word in arguments if ("/" in word or ".py" in word) and os.path.exists(word.split("::")[0])]
    words = [os.path.abspath(word) if word in paths else word for word in arguments if word != "--all"]
    chosen = paths or any(word.startswith(("--all", "-k")) for word in arguments)
    return words if chosen else [*words, "tests", "--ignore=tests/slow", "-m", "not slow"]


def main(command, *arguments):
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
    if command == "shell":
        from harness.shell import program

        return program.main(arguments)
    if command == "docs":
        from harness.explore import matmul_runs
        from harness.report import atlas_page

        return atlas_page.main() or matmul_runs.main()
    return job.main([command, *arguments])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
