"""The script of a pool's ranks: it runs the calls of the pool, and answers (result, None) or (None, traceback).

Its first answer, (None, None), says that all ranks are connected.
"""

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if __name__ == "__main__":
    sys.path[0] = ROOT  # instead of the folder of this file
else:  # in a process that the script started, the path is the script's
    sys.path.insert(0, ROOT)

from harness.start import recipe  # noqa: E402
from harness.start.isolation import Isolation  # noqa: E402

if __name__ != "__main__":  # this process only needs the import hook of `recipe`
    Isolation(sys.path[1:]).swap()


def keep_graphs(graph_class):
    """Keep every graph that is called, as OneFlow 0.9.0 may abort or hang when a graph is freed."""
    graphs, call = [], graph_class.__call__

    def keeping_call(graph, *arguments, **named):
        graphs.append(graph)
        return call(graph, *arguments, **named)

    graph_class.__call__ = keeping_call


def main():
    connection = Connection(int(os.environ.pop("HARNESS_POOL")))
    import oneflow  # connects the ranks

    connection.send((None, None))
    keep_graphs(oneflow.nn.Graph)
    modules = {}
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            path, _, name = function.rpartition(":")
            if path not in modules:
                modules[path] = recipe.load(path)
            answer = getattr(modules[path], name)(**arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)


if __name__ == "__main__":
    main()
