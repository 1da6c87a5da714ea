"""How the ranks multiply that spawn.py starts: the program itself sees only what they return."""

import contextlib
import errno
import socket
import sys

import numpy as np
import pytest

from harness.start.recipe import load, path_of
from tests.cases import reference
from tests.cases.ladder import SCALE, Checks, assert_close


def multiplied(path, x, w, graph):
    """On a rank: the recipe's shard of out, the matmuls that it makes (SBP, ranks, shape), and whether in a graph."""
    from harness.measure.recorder import Recorder

    recorder = Recorder(SCALE)
    with recorder.recording():
        shard = load(path).multiply(x, w, graph, "cpu")
    return shard, recorder.matmuls, recorder.lazy


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("n", [2, 3])
def test_spawned_ranks_multiply_in_data_parallel(pools, n, graph):
    values, ranks = reference.one_layer(batch=7), list(range(n))
    x, w, out = (values[name].exact for name in ("x", "w", "out"))
    inputs = {"x": x.astype(np.float32), "w": w.astype(np.float32)}
    found = pools(n).call(f"{__file__}:multiplied", path=str(path_of("spawn")), graph=graph, **inputs)
    for rows, (shard, matmuls, lazy) in zip(reference.rows_of(7, n), found):
        assert_close(shard, (SCALE * values["out"])[rows], "shard of out, of matmuls that are scaled")
        layouts = [("S(0)", ranks, x.shape), ("B", ranks, w.shape), ("S(0)", ranks, out.shape)]
        Checks.equal((matmuls, lazy), ([layouts], [graph]), "matmuls")


def passed_on(path, graph):
    """What `run` and `main` of spawn.py give to the ranks besides x and w."""
    from harness.measure.calls import replaced

    module, found = load(path), []

    def on_ranks(n, x, w, *more):
        found.append(more)
        raise InterruptedError

    arguments = [path, *["--graph"] * graph]
    with replaced({(module, "on_ranks"): on_ranks, (sys, "argv"): arguments}):
        for start in (lambda: module.run(graph=graph), module.main):
            with contextlib.suppress(InterruptedError):
                start()
    return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_spawned_ranks_get_the_mode(pools, graph):
    assert pools(1).call(f"{__file__}:passed_on", path=str(path_of("spawn")), graph=graph) == [[(graph, "cpu")] * 2]


def binds(path):
    """What happens to others that bind the port of a job of spawn.py, without and with the option that OneFlow sets."""
    from harness.measure.calls import replaced

    module, found = load(path), []

    def start_rank(rank, n, address, port):
        for reuse in (0, 1):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
                try:
                    other.bind(("0.0.0.0", port))
                    found.append(0)
                except OSError as error:
                    found.append(error.errno)
        raise InterruptedError

    with replaced({(module, "start_rank"): start_rank}), contextlib.suppress(InterruptedError):
        module.run()
    return found


def test_port_is_kept_for_the_ranks(pools):
    assert pools(1).call(f"{__file__}:binds", path=str(path_of("spawn"))) == [[errno.EADDRINUSE, 0]]
