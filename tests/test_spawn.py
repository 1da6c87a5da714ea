"""The ranks that spawn.py starts: how they multiply, which the program does not see, and how they end."""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import sys

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import load, path_of
from tests.cases import reference
from tests.cases.ladder import SCALE, Checks, assert_close

SPAWN = str(path_of("spawn"))
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def multiplied(path, x, w, graph):
    """On a rank: the recipe's shard of out, its matmuls (SBP, ranks, shape), and whether each is in a graph."""
    from tests.on_rank_recipe import RecipeRecorder

    recorder = RecipeRecorder(matmul_scale=SCALE)
    with recorder.recording():
        shard = load(path).multiply(x, w, graph, "cpu")
    return shard, recorder.matmuls, recorder.lazy


@MODES
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_spawned_ranks_multiply_in_data_parallel(pools, n, graph):
    values, ranks = reference.one_layer(batch=7), list(range(n))
    x, w, out = (values[name].exact for name in ("x", "w", "out"))
    inputs = {"x": x.astype(np.float32), "w": w.astype(np.float32)}
    results = pools(n).call(f"{__file__}:multiplied", path=SPAWN, graph=graph, **inputs)
    for rows, (shard, matmuls, lazy) in zip(reference.rows_of(7, n), results):
        assert_close(shard, (SCALE * values["out"])[rows], "shard of out, of matmuls that are scaled")
        layouts = [("S(0)", ranks, x.shape), ("B", ranks, w.shape), ("S(0)", ranks, out.shape)]
        Checks.equal((matmuls, lazy), ([layouts], [graph]), "matmuls")


def arguments_of_ranks(path, graph):
    """What `run` and `main` of spawn.py pass to the ranks besides x and w."""
    from oneflow_cookbook.measure.calls import replaced

    module, calls = load(path), []

    def on_ranks(n, x, w, *more):
        calls.append(more)
        raise InterruptedError

    command_line = [path, *["--graph"] * graph]
    with replaced({(module, "on_ranks"): on_ranks, (sys, "argv"): command_line}):
        for start in (lambda: module.run(graph=graph), module.main):
            with contextlib.suppress(InterruptedError):
                start()
    return calls


@MODES
def test_spawned_ranks_get_the_mode(pools, graph):
    assert pools(1).call(f"{__file__}:arguments_of_ranks", path=SPAWN, graph=graph) == [[(graph, "cpu")] * 2]


def errors_of_binding(path):
    """The errors (0: none) of others that bind the port of the ranks, without and with OneFlow's SO_REUSEPORT."""
    from oneflow_cookbook.measure.calls import replaced

    module, errors = load(path), []

    def start_rank(rank, n, address, port):
        for reuse in (0, 1):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
                try:
                    other.bind(("0.0.0.0", port))
                    errors.append(0)
                except OSError as error:
                    errors.append(error.errno)
        raise InterruptedError

    with replaced({(module, "start_rank"): start_rank}), contextlib.suppress(InterruptedError):
        module.run()
    return errors


def test_port_is_reserved_for_the_spawned_ranks(pools):
    assert pools(1).call(f"{__file__}:errors_of_binding", path=SPAWN) == [[errno.EADDRINUSE, 0]]


def end_of_rank_0(path):
    """What `run` raises when rank 1 raises and rank 0 works on; rank 0's exit code; is the environment as before?"""
    from oneflow_cookbook.measure.calls import replaced

    module, kind, started = load(path), multiprocessing.get_context("spawn").Process, []
    start, own_rank = kind.start, os.environ.pop("RANK")
    before = dict(os.environ)

    def recording_start(process):
        started.append(process)
        start(process)

    with replaced({(kind, "start"): recording_start}):
        try:
            module.run(ranks=2)
        except RuntimeError as error:
            message = str(error)
    started[0].join()
    is_as_before = os.environ == before
    os.environ["RANK"] = own_rank
    return message, started[0].exitcode, is_as_before


def test_program_whose_spawned_rank_raises_kills_the_others(pools, tmp_path):
    """OneFlow itself would end them only some 10 s later."""
    text, path = path_of("spawn").read_text(), tmp_path / "mine.py"
    line = "    out = model(x)\n"
    assert text.count(line) == 1
    path.write_text(text.replace(line, "    1 / (1 - flow.env.get_rank())\n    time.sleep(1000)\n"))
    expected = ("rank 1 of 2 died: exit code 1", -signal.SIGKILL, True)
    assert pools(1).call(f"{__file__}:end_of_rank_0", path=str(path)) == [expected]
