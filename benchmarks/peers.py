"""PyTorch and JAX in processes that wait for orders, so that their steps and ours take turns on the same cores."""

import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path

from oneflow_cookbook.start.cores import cores_of
from oneflow_cookbook.start.ranks import reserve_port

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
REQUIREMENTS = (HERE / "requirements-peers.txt").read_text().splitlines()
HOW_TO_MAKE = REQUIREMENTS[1].lstrip("# ")


TIMEOUT = 120  # seconds for an answer


class PeerError(Exception):
    """A process of a peer ended or gave no answer; the text has the last line that it wrote."""


class Peer:
    """Ranks of a framework, "torch" or "jax" (all in a single process). A context manager that ends them."""

    def __init__(self, framework, ranks):
        port = reserve_port(0)
        number = str(port.getsockname()[1])
        port.close()
        self.processes, self.log = [], tempfile.TemporaryFile("w+")  # noqa: SIM115
        for rank in range(ranks if framework == "torch" else 1):
            variables = {
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number},
                "OMP_NUM_THREADS": str(len(cores_of(rank, ranks))),
            }
            command = [str(PYTHON), str(HERE / f"peer_{framework}.py")]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
            self.processes.append(subprocess.Popen(command, env=variables, text=True, **pipes))
            if framework == "torch":  # bound, as launch.sh binds ours
                os.sched_setaffinity(self.processes[-1].pid, cores_of(rank, ranks))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self.log.close()

    def call(self, function, **arguments):
        """Call a function of peer_FRAMEWORK.py; returns what it returns, by rank.

        Raises PeerError if a process ends or gives no answer.
        """
        try:
            for process in self.processes:
                process.stdin.write(json.dumps({"function": function, **arguments}) + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            raise self.error("ended") from None
        answers, deadline = [], time.monotonic() + TIMEOUT
        for process in self.processes:
            ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise self.error(f"gave no answer in {TIMEOUT} s")
            answers.append(process.stdout.readline())  # each answer is a line, written at once
            if not answers[-1]:
                raise self.error("ended")
        return [json.loads(answer) for answer in answers]

    def error(self, what):
        self.log.seek(0)
        last = [line for line in self.log.read().splitlines() if line.strip()][-1:]
        return PeerError(f"{Path(self.processes[0].args[1]).name} {what}: {' '.join(last)}")
