"""PyTorch and JAX as processes that wait for orders, so that their steps and ours can take turns on the same cores."""

import json
import os
import subprocess
from pathlib import Path

from harness.ranks import reserve_port

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
REQUIREMENTS = (HERE / "requirements-peers.txt").read_text().splitlines()
HOW_TO_MAKE = REQUIREMENTS[1].lstrip("# ")


class Peer:
    """`ranks` ranks of a framework, "torch" or "jax"; JAX has them in one process. Use it as a context manager."""

    def __init__(self, framework, ranks):
        port = reserve_port(0)
        number = str(port.getsockname()[1])
        port.close()
        self.processes = []
        for rank in range(ranks if framework == "torch" else 1):
            variables = {
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number},
                "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
            }
            command = [str(PYTHON), str(HERE / f"peer_{framework}.py")]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.processes.append(subprocess.Popen(command, env=variables, text=True, **pipes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def step_times(self, **given):
        """The seconds of each step but the first, by rank. Raises RuntimeError if a process is gone."""
        for process in self.processes:
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.processes]
        if not all(answers):
            raise RuntimeError(f"{self.processes[0].args[1]} ended; run it by hand to see why")
        return [json.loads(answer) for answer in answers]
