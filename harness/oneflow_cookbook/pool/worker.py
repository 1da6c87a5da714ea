"""The script of a pool's ranks: it runs the calls of the pool, and answers (result, None) or (None, traceback).

Its first answer, (None, None), says that all ranks are connected.
"""

import functools
import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":  # a process that a rank starts has the path of the rank
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the folder of our package, in place of this file's

from oneflow_cookbook.start import recipe  # noqa: E402


def keep_graphs(graph_class):
    """Keep every graph that is called, as OneFlow 0.9.0 may abort or hang when a graph is freed."""
    graphs, call = [], graph_class.__call__

    def keeping_call(graph, *arguments, **named):
        graphs.append(graph)
        return call(graph, *arguments, **named)

    graph_class.__call__ = keeping_call


def function_of(name):
    """The function "module:function", or "path/to/file.py:function", whose file is loaded once."""
    place, _, function = name.rpartition(":")
    return getattr(load(place) if place.endswith(".py") else importlib.import_module(place), function)


load = functools.lru_cache(maxsize=None)(recipe.load)


def main():
    connection = Connection(int(os.environ.pop("HARNESS_POOL")))
    import oneflow  # connects the ranks

    connection.send((None, None))
    keep_graphs(oneflow.nn.Graph)
    while True:
        try:
            function, arguments, sys.path[:] = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = function_of(function)(**arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)


if __name__ == "__main__":
    main()
