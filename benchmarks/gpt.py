"""A training step of recipes/transformer/gpt.py beside the same model in PyTorch and JAX. Seconds."""

import statistics
import tempfile
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks.peers import Peer, PeerError
from benchmarks.steps import MODES, OURS, PEERS, STEPS, beside_peers, in_turns, slowest
from harness.pool import Pool
from harness.start import recipe
from tests.cases import reference_gpt

SIZES = {"batch": 8, "length": 128, "layers": 4, "width": 512, "heads": 8}
KINDS = {  # strategy -> (kind of the peers, numbers of ranks)
    "one rank": ("data", (1,)),
    "data parallel": ("data", (2, 4)),
    "tensor parallel": ("tensor", (2, 4)),
    "fully sharded": ("sharded", (2, 4)),
}
TRAINED = STEPS + 2  # steps; the first two are not timed
SIDES = (*PEERS, *MODES)  # losses are compared with those of the first
ALIKE = 1e-4  # how far losses may differ: sums of float32 are added in other orders


def save_text_and_weights(file, batch, length, layers, width, heads):
    """What the recipe begins with and trains on in TRAINED steps, for the peers; returns the number of letters."""
    letters, numbers = reference_gpt.text()
    weights = reference_gpt.new_weights(-(-len(letters) // heads) * heads, length, layers, width)
    rows = [reference_gpt.batch_of(step, numbers, batch, length) for step in range(1, TRAINED + 1)]
    rows = [np.concatenate((ids, targets[:, -1:]), 1) for ids, targets in rows]
    np.savez(file, rows=rows, **{name: weight.astype(np.float32) for name, weight in weights.items()})
    return len(weights["embedding.tokens"])


def matmuls(data, tensor, letters, batch, length, layers, width, heads):
    """The shapes of a rank's matmuls in a step: (..., rows, inner, columns)."""
    rows, part, of_head = batch // data, width // tensor, width // heads
    attention = [(rows, heads // tensor, length, of_head, length), (rows, heads // tensor, length, length, of_head)]
    weights = [(width, 3 * part), (part, width), (width, 4 * part), (4 * part, width)] * layers
    weights.append((width, letters // tensor))
    forward = [*attention * layers, *((rows * length, *weight) for weight in weights)]
    gradients = [[(*many, m, n, k), (*many, k, m, n)] for *many, m, k, n in forward]
    return [*forward, *sum(gradients, [])]


def compared(strategy, n, turns, say, file, letters, sizes):
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
                answers[name] = peers[name].step_times(kind=kind, file=file, heads=sizes["heads"])
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
            shapes = matmuls(1 if kind == "tensor" else n, n if kind == "tensor" else 1, letters, **sizes)
            torch, [ours, *_] = answers["PyTorch"][0], pool.call(f"{OURS}:parts_of_step", **given)
            alone = {
                "OneFlow": slowest(pool.call(f"{OURS}:matmul_times", shapes=shapes, steps=STEPS)),
                "PyTorch": slowest(peers["PyTorch"].step_times(kind="matmuls", shapes=shapes, steps=STEPS)),
            }
            parts = {"OneFlow": ours, "PyTorch": {**torch, "step": statistics.median(torch["seconds"])}}
            row["parts"] = {
                name: {"matmuls": alone[name], **{part: parts[name][part] for part in ("backward", "update", "step")}}
                for name in parts
            }
    return row


def gpt(turns, say, sizes=SIZES, ranks=(1, 2, 4)):
    """[{"strategy", "ranks", "seconds", "best", "ratios": as of steps.training, "difference": how far losses differ at
    most, and on up to 2 ranks "parts": seconds of {"matmuls": alone, "backward", "update", "step"}, by framework}]

    Every time all sides begin with the same weights, and train on the same text. Raises PeerError if losses differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/given.npz"
        letters = save_text_and_weights(file, **sizes)
        return [
            compared(strategy, n, turns // 2, say, file, letters, sizes)
            for n in ranks
            for strategy, (_, ways) in KINDS.items()
            if n in ways
        ]
