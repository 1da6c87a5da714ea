"""The values of the chapter on your own model: an Embedding, blocks of LayerNorm, Linear and GELU, a Linear head."""

import math

import numpy as np

from tests.cases import reference
from tests.cases.reference import Value
from tests.cases.reference_transformer import cross_entropy, norm

VOCAB_SIZE, SEQ_LEN, NUM_CLASSES = 12, 4, 5
erf = np.vectorize(math.erf)


def shapes(hidden_size=8, num_layers=2):
    """{name of a parameter: shape}, as nn.Module.named_parameters orders them."""
    by_name = {"embedding.weight": (VOCAB_SIZE, hidden_size)}
    for i in range(num_layers):
        by_name.update({f"blocks.{i}.norm.weight": (hidden_size,), f"blocks.{i}.norm.bias": (hidden_size,)})
        by_name.update({f"blocks.{i}.up.weight": (4 * hidden_size, hidden_size)})
        by_name.update({f"blocks.{i}.up.bias": (4 * hidden_size,)})
        by_name.update({f"blocks.{i}.down.weight": (hidden_size, 4 * hidden_size)})
        by_name.update({f"blocks.{i}.down.bias": (hidden_size,)})
    return {**by_name, "head.weight": (NUM_CLASSES, hidden_size), "head.bias": (NUM_CLASSES,)}


def gelu(x):
    """x times the probability that a normal number is below x: D. Hendrycks and K. Gimpel, arXiv:1606.08415."""
    below = (1 + erf(x.exact / math.sqrt(2))) / 2
    density = np.exp(-(x.exact**2) / 2) / math.sqrt(2 * math.pi)
    return Value(x.exact * below, (x, lambda g: g * (below + x.exact * density)))


def linear(x, w, layer, matmul_scale):
    return matmul_scale * (x @ w[f"{layer}.weight"].T) + w[f"{layer}.bias"]


def logits_of(w, ids, matmul_scale=1.0):
    """The logits, (batch, classes), of ids (batch, seq_len)."""
    x = w["embedding.weight"][ids]
    for i in range(sum(name.endswith("up.weight") for name in w)):
        block = f"blocks.{i}"
        hidden = norm(x) * w[f"{block}.norm.weight"] + w[f"{block}.norm.bias"]
        hidden = gelu(linear(hidden, w, f"{block}.up", matmul_scale))
        x = x + linear(hidden, w, f"{block}.down", matmul_scale)
    return linear(x.mean(1).reshape(len(ids), -1), w, "head", matmul_scale)


def batch_of(seed, batch):
    rng = np.random.default_rng(seed)
    return rng.integers(VOCAB_SIZE, size=(batch, SEQ_LEN)), rng.integers(NUM_CLASSES, size=batch)


def trained(arrays, optimizer, graph, seed, steps, batch, matmul_scale, parts=0):
    """From arrays by name: what `descend` returns, and the ids and targets."""
    ids, targets = batch_of(seed, batch)
    weights = {name: Value(array) for name, array in arrays.items()}
    rate = {"adam": 0.01, "momentum": 0.1}[optimizer]

    def forward(w, rows):
        return {}, cross_entropy(logits_of(w, ids[rows], matmul_scale), targets[rows])

    optimizer = reference.Optimizer(optimizer, rate, graph)
    values, added = reference.descend(weights, forward, steps, optimizer, batch, parts)
    # Adam divides a gradient by its own size: where that is near 0, its rounding is seen in full. In 20 steps through
    # four layers gradients were off by 36 times what others are.
    more = 20 + steps if optimizer.name == "adam" else 2 * steps + 2
    for value in [*values.values(), *(value for each in added.values() for value in each)]:
        value.bound *= more
    values["losses"].bound = 2 * reference.ROUNDING * values["losses"].exact.max()
    inputs = {"ids": Value(ids, dtype="int64"), "targets": Value(targets, dtype="int64")}
    logits = logits_of(weights, ids, matmul_scale)
    logits.bound /= 4  # 3 times what float32 was off
    return {**inputs, **weights, **values, "logits": logits}, added
