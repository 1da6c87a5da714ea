"""How the ranks multiply that spawn.py starts: the program itself sees only what they return."""

import numpy as np
import pytest

from harness.start.recipe import load, path_of
from tests.cases import reference
from tests.cases.ladder import Checks, assert_close


def multiplied(path, x, w, graph):
    """On a rank: the recipe's shard of out, the matmuls that it makes (SBP, ranks, shape), and whether in a graph."""
    from harness.measure.recorder import Recorder

    recorder = Recorder()
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
        assert_close(shard, values["out"][rows], "shard of out")
        layouts = [("S(0)", ranks, x.shape), ("B", ranks, w.shape), ("S(0)", ranks, out.shape)]
        Checks.equal((matmuls, lazy), ([layouts], [graph]), "matmuls")
