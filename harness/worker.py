"""The script that a pool's ranks run: takes calls from the pool, answers each with a result or a traceback."""

import os
import socket
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import pool, recipe  # noqa: E402


def main():
    # Small tensors, and more ranks than cores: without a thread between, an eager case takes a third of the time.
    os.environ.setdefault("ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD", "0")
    connection = socket.socket(fileno=int(os.environ.pop("HARNESS_POOL")))
    import oneflow  # noqa: F401  # all ranks meet here, before the first case is timed

    modules = {}
    while True:
        try:
            function, arguments = pool.receive(connection)
        except EOFError:
            os._exit(0)
        try:
            path, _, name = function.rpartition(":")
            if path not in modules:
                modules[path] = recipe.load(path)
            answer = {"result": getattr(modules[path], name)(**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        sys.stdout.flush()
        pool.send(connection, answer)


if __name__ == "__main__":
    main()
