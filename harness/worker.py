"""The script that a pool's ranks run: takes calls from the pool, answers each with a result or a traceback."""

import contextlib
import os
import socket
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import pool, recipe  # noqa: E402


def busiest(work, apart=()):
    """The number of the thread, of those that OneFlow has started, that runs longest while work() does.

    None where Linux does not say how long each thread has run. apart: threads that are not meant.
    """

    def times():
        found = {}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
        return found

    before = times()
    work()
    after = times()
    for task in (os.getpid(), *apart):
        after.pop(task, None)
    return max(after, key=lambda task: after[task] - before.get(task, 0), default=None)


def many_operations():
    import oneflow as flow

    x = flow.ones(64)
    for _ in range(300):
        x = x + 1
    x.numpy()


def keep_graphs(graph_class):
    """Hold every graph that is called until the process ends: OneFlow 0.9.0 aborts or hangs where one is freed."""
    kept, call = [], graph_class.__call__

    def keeping_call(graph, *arguments, **named):
        kept.append(graph)
        return call(graph, *arguments, **named)

    graph_class.__call__ = keeping_call


def main():
    crowded = bool(os.environ.pop("HARNESS_CROWDED", ""))
    if crowded:  # without a thread between, an eager case of small tensors takes a third of the time
        os.environ.setdefault("ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD", "0")
    connection = socket.socket(fileno=int(os.environ.pop("HARNESS_POOL")))
    import oneflow  # all ranks meet here, before the first case is timed

    keep_graphs(oneflow.nn.Graph)

    # The thread that schedules eager operations, and here computes them, yields and never sleeps while anything is
    # under way, a graph's step included. With more ranks than cores these threads take the time of those that work,
    # unless they all have one core: a graph's step on 4 ranks and 2 cores took 0.1 s, and 0.015 s with that.
    cores = sorted(os.sched_getaffinity(0))
    if crowded and 1 < len(cores) <= int(os.environ["WORLD_SIZE"]):
        thread = busiest(many_operations)
        if thread:
            os.sched_setaffinity(thread, cores[-1:])
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
