"""Run the default suite and single launches again and again, and count what fails.

    python benchmarks/soak.py [--suites N] [--launches N]

A launch is a recipe, a number of ranks and a mode, drawn at random, beside processes that compute, as many at a time as
is drawn. Each outcome is appended at once to docs/soak.jsonl, so that the next call resumes there; docs/faults.md says
what came of it.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import faults  # noqa: E402
from benchmarks.faults_page import MOST, SOAK, read_soak  # noqa: E402
from tests.cases import ROOT, runs  # noqa: E402

LAUNCH = str(ROOT / "launch.sh")
HOLD = (0.5, 5.0)  # seconds for which their number stays
LIMIT = 300  # seconds that a launch may take beside them
SUITE_LIMIT = 3600  # and the default suite
BURN = "while True: pass"


class Load:
    """Processes that compute, as many at a time as is drawn, until the context ends."""

    def __init__(self, rng):
        self.rng, self.stop, self.processes = rng, threading.Event(), []
        self.thread = threading.Thread(target=self._vary)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def _vary(self):
        try:
            while not self.stop.wait(self.rng.uniform(*HOLD)):
                self._set(self.rng.randint(0, MOST))
        finally:
            self._set(0)

    def _set(self, number):
        while len(self.processes) < number:
            self.processes.append(subprocess.Popen([sys.executable, "-c", BURN]))
        while len(self.processes) > number:
            process = self.processes.pop()
            process.kill()
            process.wait()


def run(command, limit):
    """The exit code and the output of a command; 124, as of `timeout`, if it does not end in `limit` seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=limit, **pipes)
    except subprocess.TimeoutExpired as late:
        return 124, str(late)
    return done.returncode, done.stdout


def launch(command):
    """The outcome of one launch: its seconds, its exit code and, if it failed, the last lines."""
    begin = time.monotonic()
    code, out = run(command, 2 * LIMIT)
    seconds = round(time.monotonic() - begin, 2)
    return {"seconds": seconds, "code": code, "says": "\n".join(out.splitlines()[-20:]) if code else ""}


def command_of(i):
    """What launch i runs, counted from 1."""
    drawable = sorted({(name, n, graph) for name, n, graph, _ in runs() if n > 1})
    name, n, graph = random.Random(f"launch {i}").choice(drawable)
    optional = ["--graph"] if graph and (name, n, False) in drawable else []
    return [LAUNCH, "-n", str(n), "--timeout", str(LIMIT), name, *optional]


def suite():
    """The outcome of the default suite: as of a launch, and how many tests passed and calls were repeated."""
    code, out = run([LAUNCH, "test"], SUITE_LIMIT)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", out, re.M)
    numbers = {"passed": r"(\d+) passed", "repeated": r"(\d+) calls made once more"}
    found = {key: re.search(pattern, out) for key, pattern in numbers.items()}
    counts = {key: int(match.group(1)) if match else 0 for key, match in found.items()}
    return {"code": code, "says": "\n".join(failed), **counts}


def keep(outcome):
    """Append an outcome to the file, make the page again, and print it in a line."""
    with SOAK.open("a") as file:
        file.write(json.dumps(outcome) + "\n")
    faults.make_page()
    print(*(f"{key} {value}" for key, value in outcome.items() if value != ""), flush=True)


def number_of(what):
    """How many suites or launches are in the file."""
    return sum(one["what"] == what for one in read_soak(SOAK))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", type=int, default=10, help="how many times the default suite runs (default: 10)")
    parser.add_argument("--launches", type=int, default=500, help="how many launches there are (default: 500)")
    options = parser.parse_args(arguments)
    for _ in range(number_of("suite"), options.suites):
        keep({"what": "suite", **suite()})
    with Load(random.Random()):
        for i in range(number_of("launch") + 1, options.launches + 1):
            command = command_of(i)
            keep({"what": "launch", "command": " ".join(["./launch.sh", *command[1:]]), **launch(command)})


if __name__ == "__main__":
    main()
