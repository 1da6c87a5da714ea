"""What OneFlow 0.9.0 refuses of the ready-made layers: the error, and what is used instead, for docs/layers.md."""

import re
from typing import NamedTuple

from harness.pool import PoolError
from harness.report.layers import ROUNDING
from harness.start.recipe import HARNESS

ON_RANK = HARNESS / "measure" / "layers_refused.py"


class Refused(NamedTuple):
    """What OneFlow refuses: a function of measure/layers_refused.py and its arguments, for each of `kinds`.

    why: a sentence for the page. hangs: whether one rank raises and the others wait. runs: what is used instead, for
    each of `kinds` again.
    """

    what: str
    function: str
    arguments: dict
    instead: str
    runs: tuple = None
    kinds: tuple = ("LSTM", "GRU", "RNN")
    hangs: bool = False
    why: str = ""


RECURRENT, CELLS = "nn.LSTM, nn.GRU, nn.RNN", ("LSTMCell", "GRUCell", "RNNCell")
REFUSED = [
    Refused(
        f"{RECURRENT} with batch_first=True, x S(0) and no h0",
        "forward",
        {"sbp": "S(0)", "batch_first": True},
        "h0 (and c0) in S(1), the dimension of their batch",
        ("recurrent_with_h0", {"sbp": "S(0)", "batch_first": True}, [False]),
        why="OneFlow splits h0 by layers then, and there are fewer layers than ranks.",
    ),
    Refused(
        f"{RECURRENT} in an nn.Graph with a split batch, with or without h0",
        "forward",
        {"sbp": "S(1)", "graph": True},
        "a loop over nn.LSTMCell, nn.GRUCell or nn.RNNCell with x and h0 in S(0)",
        ("cell_in_a_loop", {}, [False, True]),
        hangs=True,
        why="One rank raises this, and the other ranks hang.",
    ),
    Refused(
        f"{RECURRENT} on local tensors of a rank above 0",
        "local",
        {},
        "global tensors, with x and h0 in S(1)",
        ("recurrent_with_h0", {"sbp": "S(1)"}, [False]),
        why="DistributedDataParallel has such tensors.",
    ),
    Refused(
        "nn.LSTMCell, nn.GRUCell, nn.RNNCell without h0",
        "cell",
        {},
        "h0 (and c0) in S(0), as x",
        ("cell_in_a_loop", {}, [False, True]),
        CELLS,
        why="This also fails on a single device.",
    ),
    Refused(
        "nn.SyncBatchNorm on the CPU",
        "sync_batch_norm",
        {},
        "[batch_norm.py](../recipes/data_and_state/batch_norm.py)",
        kinds=(None,),
    ),
    Refused(
        "nn.MultiheadAttention",
        "missing",
        {"name": "MultiheadAttention"},
        "[transformer_block.py](../recipes/transformer/transformer_block.py)",
        kinds=(None,),
    ),
]


def measured_on(pool):
    """(the last line of the error, whether what is used instead is right) of each."""
    return [(last_line(pool, one), is_right(pool, one)) for one in REFUSED]


def last_line(pool, refused):
    """Of the error, which is the same for all its kinds."""
    lines = {one_last_line(pool, refused, kind) for kind in refused.kinds}
    assert len(lines) == 1, (refused.what, lines)
    return lines.pop()


def one_last_line(pool, refused, kind):
    given = {**refused.arguments, **({"kind": kind} if kind else {})}
    if not refused.hangs:
        lines = pool.call(f"{ON_RANK}:error", what=refused.function, **given)
        return next((line for line in lines if line), "nothing")
    try:
        pool.call(f"{ON_RANK}:{refused.function}", **given)
    except PoolError as error:
        return re.sub(r"\x1b\[[\d;]*m", "", str(error).strip().splitlines()[-1]).strip()
    return "nothing"


def is_right(pool, refused):
    """Whether what is used instead gives the values of a single device; None if it is a recipe, which has its tests."""
    if not refused.runs:
        return None
    function, given, graphs = refused.runs
    kinds = [f"{kind.replace('Cell', '')}{'Cell' * ('cell' in function)}" for kind in refused.kinds]
    runs = [{"kind": kind, "graph": graph, **given} for kind in kinds for graph in graphs]
    return all(max(pool.call(f"{ON_RANK}:{function}", **run)) <= ROUNDING for run in runs)
