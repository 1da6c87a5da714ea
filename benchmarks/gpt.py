"""A training step of recipes/transformer/gpt.py beside the same model in PyTorch and JAX. Seconds."""

import tempfile
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks.peers import Peer, PeerError
from benchmarks.steps import MODES, OURS, PEERS, STEPS, beside_peers, in_turns, slowest
from harness.pool import Pool
from harness.start import recipe
from tests.cases import reference_gpt

SIZES = {"batch_size": 8, "seq_len": 128, "num_layers": 4, "hidden_size": 512, "num_heads": 8}
KINDS = {  # strategy -> (kind of the peers, numbers of ranks)
    "one rank": ("data", (1,)),
    "data parallel": ("data", (2, 4)),
    "tensor parallel": ("tensor", (2, 4)),
    "fully sharded": ("sharded", (2, 4)),
}
TRAINED = STEPS + 2  # steps; the first and the last are not timed
SIDES = (*PEERS, *MODES)  # losses are compared with those of the first
ALIKE = 1e-4  # how far losses may differ: sums of float32 are added in other orders


def save_text_and_weights(file, batch_size, seq_len, num_layers, hidden_size, num_heads):
    """What the recipe begins with and trains on in TRAINED steps, for the peers; returns the size of the vocabulary."""
    vocab_size = reference_gpt.vocab_size_of(num_heads)
    weights = reference_gpt.new_weights(vocab_size, seq_len, num_layers, hidden_size)
    batches = [reference_gpt.batch_of(step, batch_size, seq_len) for step in range(1, TRAINED + 1)]
    rows = [np.concatenate((ids, targets[:, -1:]), 1) for ids, targets in batches]
    np.savez(file, rows=rows, **{name: weight.exact.astype(np.float32) for name, weight in weights.items()})
    return vocab_size


def matmuls(data, tensor, vocab_size, batch_size, seq_len, num_layers, hidden_size, num_heads):
    """The shapes of a rank's matmuls in a step: (..., rows, inner, columns)."""
    rows, part, head_size = batch_size // data, hidden_size // tensor, hidden_size // num_heads
    heads = (rows, num_heads // tensor)
    attention = [(*heads, seq_len, head_size, seq_len), (*heads, seq_len, seq_len, head_size)] * num_layers
    columns = [(hidden_size, 3 * part), (hidden_size, 4 * part)]
    weights = [*columns, (part, hidden_size), (4 * part, hidden_size)] * num_layers
    weights.append((hidden_size, vocab_size // tensor))
    forward = attention + [(rows * seq_len, *weight) for weight in weights]
    gradients = [[(*many, m, n, k), (*many, k, m, n)] for *many, m, k, n in forward]
    return [*forward, *sum(gradients, [])]


def compared(strategy, n, turns, say, file, vocab_size, sizes):
    """A row of `gpt`."""
    kind, _ = KINDS[strategy]
    options = {"tensor": n} if kind == "tensor" else {"shard_weights": kind == "sharded"}
    given = {"path": str(recipe.path_of("gpt")), "steps": TRAINED, **options, **sizes}
    answers, known, row = {}, [], {"difference": 0.0}
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(PEERS[name], n)) for name in PEERS}
        pool = stack.enter_context(Pool(n, timeout=300))  # new ranks for each row, as graphs are never freed

        def train(name):
            if name in peers:
                answers[name] = peers[name].step_times(kind=kind, file=file, heads=sizes["num_heads"])
            else:
                answers[name] = pool.call(f"{OURS}:losses_and_times", graph=name == "graph", **given)
            known.append(np.mean([one["losses"][:TRAINED] for one in answers[name]], 0))  # shards are equally long
            row["difference"] = max(row["difference"], np.abs(known[-1] - known[0]).max())
            if not np.allclose(known[-1], known[0], rtol=0, atol=ALIKE):
                one, other = (losses.round(6).tolist() for losses in (known[-1], known[0]))
                raise PeerError(f"gpt, {strategy}, {n} ranks: losses of {name} {one} are not those of PyTorch {other}")
            return slowest(one["seconds"] for one in answers[name])

        row.update(beside_peers(strategy, n, in_turns(turns, {name: partial(train, name) for name in SIDES}), say))
        if n <= 2:
            shapes = matmuls(1 if kind == "tensor" else n, n if kind == "tensor" else 1, vocab_size, **sizes)
            torch, [ours, *_] = answers["PyTorch"][0], pool.call(f"{OURS}:parts_of_step", **given)
            alone = {
                "OneFlow": slowest(pool.call(f"{OURS}:matmul_times", shapes=shapes, steps=STEPS)),
                "PyTorch": slowest(peers["PyTorch"].step_times(kind="matmuls", shapes=shapes, steps=STEPS)),
            }
            parts = {"OneFlow": ours, "PyTorch": torch}
            row["parts"] = {name: {"matmuls": alone[name], "update": parts[name]["update"]} for name in parts}
    return row


def gpt(turns, say, sizes=SIZES, ranks=(1, 2, 4)):
    """[{"strategy", "ranks", "seconds", "best", "ratios": as of steps.training, "difference": how far losses differ at
    most, and on up to 2 ranks "parts": seconds of {"matmuls": alone, "update"}, by framework}]

    Every time all sides begin with the same weights, and train on the same text. Raises PeerError if losses differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/given.npz"
        vocab_size = save_text_and_weights(file, **sizes)
        return [
            compared(strategy, n, turns // 2, say, file, vocab_size, sizes)
            for n in ranks
            for strategy, (_, ways) in KINDS.items()
            if n in ways
        ]
