"""How long things take until they run: a launch beside torchrun, a fresh clone by phase, the test suite. Seconds."""

import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.peers import PYTHON, PeerError
from benchmarks.steps import compared

HERE = Path(__file__).resolve().parent
LIMIT = 600  # seconds after which a launch that hangs ends
STALL = 8.0  # a rank that looks for rank 0 too early sleeps for 10


def run(command, **given):
    """The standard output of a command that must succeed. Raises PeerError."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **given)
    if done.returncode:
        raise PeerError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr[-300:]}")
    return done.stdout


def timed(command):
    def once():
        begin = time.perf_counter()
        run(command)
        return time.perf_counter() - begin

    return once


def launches(turns, say, alone=50):
    """{"pairs": [{"ranks", "seconds": by side, "ratio"}], "alone": how many on 4 ranks, their "median", "longest" and
    "stalls"}; the job adds up one number on each rank."""
    rows = []
    for n in (2, 4):
        ours = [HERE.parent / "launch.sh", "-n", n, "--timeout", LIMIT, HERE / "trivial_oneflow.py"]
        torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n]
        pair = {"launch.sh": timed(ours), "torchrun": timed([*torchrun, HERE / "trivial_torch.py"])}
        rows.append({"ranks": n, **compared(2 * turns, pair)})
        say(rows[-1])
    times = [timed(ours)() for _ in range(alone)]
    stalls = sum(time > STALL for time in times)
    middle, longest = statistics.median(times), max(times)
    return {"pairs": rows, "alone": alone, "median": middle, "longest": longest, "stalls": stalls}


PHASES = {  # what is on the terminal when a phase ends -> the phase that ends
    "setting up .venv": "find uv and a Python",
    "Prepared ": "make .venv, and download",
    "Installed ": "install",
    "[0] ": "check .venv, and launch on 2 ranks",
}


def fresh_clone(_, say):
    """[{"phase", "seconds"}] from `git clone` to the first result of ./launch.sh recipes/data_parallel.py.

    The last row is another clone, which finds uv's cache as the first has left it.
    """
    rows, phases = [], dict(PHASES)
    with tempfile.TemporaryDirectory() as folder:
        last = begin = time.perf_counter()

        def ended(phase):
            nonlocal last
            now = time.perf_counter()
            rows.append({"phase": phase, "seconds": now - last})
            last = now
            say(rows[-1])

        run(["git", "clone", "--quiet", HERE.parent, f"{folder}/clone"])
        ended("clone")
        command = ["./launch.sh", "--timeout", str(LIMIT), "recipes/data_parallel.py"]
        cache = {**os.environ, "UV_CACHE_DIR": f"{folder}/cache"}
        together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": cache}
        with subprocess.Popen(command, cwd=f"{folder}/clone", **together) as job:
            for line in job.stdout:
                for sign in [sign for sign in phases if sign in line]:
                    ended(phases.pop(sign))
        if job.returncode:
            raise PeerError(f"./launch.sh in a fresh clone ended with {job.returncode}")
        last = begin
        ended("all of it")
        run(["git", "clone", "--quiet", HERE.parent, f"{folder}/another"])
        run(command, cwd=f"{folder}/another", env=cache)
        ended("another clone on this machine, all of it")
    return rows


def suite(_, say):
    """{"tests", "checks", "seconds"} of ./launch.sh test."""
    begin = time.perf_counter()
    text = run([HERE.parent / "launch.sh", "test", "-q"])
    seconds = time.perf_counter() - begin
    numbers = {word: int(re.search(rf"([\d,]+) {word}", text)[1].replace(",", "")) for word in ("passed", "checks")}
    say(numbers, f"{seconds:.0f} s")
    return {"tests": numbers["passed"], "checks": numbers["checks"], "seconds": seconds}
