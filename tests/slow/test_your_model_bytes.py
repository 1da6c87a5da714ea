"""What the recipes on your own model claim beyond values and layouts: bytes, dropout, recurrent layers, memory."""

import pytest

from oneflow_cookbook.pool import Pool
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.cases.measuring import PER_STEP
from tests.jobs import changed

ON_RANK = str(ROOT / "tests" / "on_rank_your_model.py")
TENSOR_PARALLEL, WEIGHTS = str(path_of("tensor_parallel_module")), str(path_of("pytorch_weights"))


def test_tensor_parallel_module_sends_a_tenth_of_what_split_weights_alone_send(pools, tmp_path):
    """Without Column and Row, every layer stays an nn.Linear."""
    classes = "kind if original is nn.Linear else type(original.__name__, (original, kind), attributes)"
    weights_alone = str(changed(TENSOR_PARALLEL, tmp_path, (classes, "original")))
    paths = (TENSOR_PARALLEL, weights_alone)
    sent = [pools(2).call(PER_STEP, path=path, batch=256, hidden_size=512)[0] for path in paths]
    Checks.that(9.5 <= sent[1] / sent[0] <= 10.5, "split weights alone send", sent[1] / sent[0], "times as much")


@pytest.mark.parametrize("data, equal", [(1, True), (2, False)])
def test_dropout_of_tensor_parallel_module_differs_where_the_batch_is_split(pools, data, equal):
    """Else all ranks draw the mask that a single rank draws."""
    for losses, alone in pools(2).call(f"{ON_RANK}:losses_of", path=TENSOR_PARALLEL, data=data, dropout=0.1, steps=3):
        assert (abs(losses - alone).max() <= 2e-6) == equal


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_needs_no_initial_state_where_the_batch_is_whole(pools, kind):
    for alone, out in pools(2).call(f"{ON_RANK}:recurrent_outputs", path=TENSOR_PARALLEL, kind=kind):
        Checks.that(abs(alone).max() > 0.1 and abs(out - alone).max() <= 1e-6, kind, out, "alone", alone)


@pytest.mark.parametrize("n", [2, 4])
def test_pytorch_weights_sends_nothing_to_load_and_to_save_an_all_gather_of_what_is_split(pools, tmp_path, n):
    arguments = {"path": WEIGHTS, "hidden_size": 512, "target": str(tmp_path / "model.safetensors")}
    seen = pools(n).call(f"{ON_RANK}:bytes_to_load_and_save", **arguments)
    loading, saving = (sum(counts[i] for counts in seen) for i in (1, 2))
    Checks.that(loading <= 40_000 * n, "loading sends", loading)
    rows, columns = seen[0][0]["S(0)"], seen[0][0]["S(1)"]
    gathered = (n - 1) * (rows + columns) + (n - 1) / n * columns  # columns go by an all-to-all first, in eager mode
    Checks.that(abs(saving - gathered) <= 0.02 * gathered, "saving sends", saving, "and must", gathered)


def test_fully_sharded_module_has_at_most_one_whole_block_while_shards_are_made():
    layers, hidden_size = 8, 1024
    block = 4 * (8 * hidden_size**2 + 8 * hidden_size)  # bytes
    most = {}
    for at_once in (False, True):
        with Pool(4) as pool:  # OneFlow gives no memory back: only the first time in a process counts
            sizes = {"num_layers": layers, "hidden_size": hidden_size}
            seen = pool.call(f"{ON_RANK}:growth", path=str(path_of("fully_sharded_module")), at_once=at_once, **sizes)
        most[at_once] = max(peak - held for peak, held in seen)
    Checks.that(most[False] <= 2.5 * block, "besides the shards a rank had", most[False] / block, "blocks")
    Checks.that(most[True] >= (layers - 2) * block, "all at once it had", most[True] / block, "blocks")
