"""The GPT of recipes/transformer/gpt.py in numpy, float64, on one device: the loss, its gradients, AdamW, answers."""

import math

import numpy as np

from tests.cases import reference
from tests.cases.reference import Value
from tests.cases.reference_transformer import causal, cross_entropy, experts_of, softmax

VOCABULARY = 13  # 0 to 9 are the digits, 10 is +, 11 is =, 12 is ;
SUMS = np.random.RandomState(0).permutation(10_000)  # of 100 a + b; the first 100 are held out


def squared_relu(x):
    """D. So et al., "Primer", arXiv:2109.08668."""
    positive = np.maximum(x.exact, 0)
    return Value(positive * positive, (x, lambda g: g * 2 * positive))


def rms_norm(x):
    """Each row of x, (..., hidden), divided by its root mean square: B. Zhang, R. Sennrich, arXiv:1910.07467."""
    scale = 1 / np.sqrt((x.exact * x.exact).mean(-1, keepdims=True))
    rows = x.exact * scale
    return Value(rows, (x, lambda g: scale * (g - rows * (g * rows).mean(-1, keepdims=True))))


def kept(chosen, capacity):
    """1 for each choice of an expert that has a slot: its first ones. chosen: (token, expert)."""
    return chosen * (chosen.cumsum(0) <= capacity)


def experts(x, w, name, seq_len):
    """What the experts make of x, (batch, up to seq_len, hidden), two of them for each token; and the balance loss."""
    probs = softmax(x @ w[name + "router"])
    best, num_experts = -np.sort(-probs.exact)[..., :3], probs.exact.shape[-1]
    assert -np.diff(best).max() > 1e-6, "rounding must not choose"
    capacity = math.ceil(1.25 * 2 * seq_len / num_experts)
    chosen = np.eye(num_experts)[experts_of(probs.exact, 2)].sum(2)
    gates = probs * chosen
    gates = gates / gates.sum(-1) * np.array([kept(sequence, capacity) for sequence in chosen])
    out = 0 * x
    for i in range(num_experts):
        hidden = squared_relu(x @ w[name + "up"][i])
        out = out + gates[..., i : i + 1] * (hidden @ w[name + "down"][i])
    fractions = chosen.mean(1, keepdims=True) / 2
    return out, num_experts * (probs.mean(1) * fractions).sum(-1).mean()


def block(x, w, name, num_heads):
    """One layer, of x (batch, seq_len, hidden), and the balance loss of its experts, 0 without them."""
    batch, seq_len, hidden = x.exact.shape
    head_size = hidden // num_heads
    qkv = (rms_norm(x) * w[name + "norm"]) @ w[name + "qkv"]  # head by head
    qkv = qkv.reshape(batch, seq_len, num_heads, 3 * head_size).permute(0, 2, 1, 3)
    q, k, v = (qkv[..., i * head_size : (i + 1) * head_size] for i in range(3))
    scores = (q @ k.T) * head_size**-0.5 + causal(seq_len)
    values = (softmax(scores) @ v).permute(0, 2, 1, 3).reshape(batch, seq_len, hidden)
    x = x + values @ w[name + "project"]
    normed = rms_norm(x) * w[name + "norm_mlp"]
    if name + "experts.router" in w:
        out, balance_loss = experts(normed, w, name + "experts.", len(w["embedding.positions"].exact))
        return x + out, balance_loss
    return x + squared_relu(normed @ w[name + "up"]) @ w[name + "down"], Value(0.0)


def logits_of(w, ids, num_heads):
    """(batch, seq_len, vocab_size), of ids (batch, seq_len), and the sum of the balance losses."""
    x, total = w["embedding.tokens"][ids] + w["embedding.positions"][: ids.shape[1]], Value(0.0)
    for i in range(sum(name.endswith(".qkv") for name in w)):
        x, balance_loss = block(x, w, f"blocks.{i}.", num_heads)
        total = total + balance_loss.reshape()
    return (rms_norm(x) * w["head.norm"]) @ w["embedding.tokens"].T, total


def loss_of(w, ids, targets, num_heads):
    """The mean over all tokens, and 0.01 of the balance losses; w: name -> Value."""
    logits, balance_loss = logits_of(w, ids, num_heads)
    return cross_entropy(logits.reshape(targets.size, -1), targets.ravel()) + 0.01 * balance_loss.reshape(1, 1)


def lines_of(sums):
    """As tokens, (sums, 10): both numbers with two digits, and their sum with three, the last digit first."""
    a, b = np.divmod(sums, 100)
    plus, equals, end = (np.full_like(a, token) for token in (10, 11, 12))
    answer = [(a + b) // 10**i % 10 for i in range(3)]
    return np.stack([a // 10, a % 10, plus, b // 10, b % 10, equals, *answer, end], -1)


def batch_of(step, batch_size, seq_len, seed=0):
    """Each row begins with a line; lines follow each other without a gap."""
    rng, lines = np.random.RandomState([seed, step]), seq_len // 10 + 1
    sums = SUMS[100 + rng.randint(9_900, size=(batch_size, lines))]
    rows = lines_of(sums).reshape(batch_size, -1)
    return rows[:, :seq_len], rows[:, 1 : seq_len + 1]


def new_weights(vocab_size, seq_len, num_layers, hidden_size, seed=0, experts=0):
    """Name -> Value, of float32 numbers."""
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return Value(0.05 * rng.standard_normal(shape, dtype=np.float32))

    def ones():
        return Value(np.ones(hidden_size))

    hidden = hidden_size
    w = {"embedding.tokens": drawn(vocab_size, hidden), "embedding.positions": drawn(seq_len, hidden)}
    for i in range(num_layers):
        w.update({f"blocks.{i}.norm": ones(), f"blocks.{i}.qkv": drawn(hidden, 3 * hidden)})
        w.update({f"blocks.{i}.project": drawn(hidden, hidden), f"blocks.{i}.norm_mlp": ones()})
        name, stacked = (f"blocks.{i}.experts.", (experts,)) if experts else (f"blocks.{i}.", ())
        w.update({name + "router": drawn(hidden, experts)} if experts else {})
        w.update({name + "up": drawn(*stacked, hidden, 4 * hidden), name + "down": drawn(*stacked, 4 * hidden, hidden)})
    return {**w, "head.norm": ones()}


def clipped(gradients, most):
    """Scaled down together, so that their norm is at most `most`; 0: as they are."""
    norm = math.sqrt(sum((gradient.exact**2).sum() for gradient in gradients.values()))
    scale = min(1, most / (norm + 1e-6)) if most else 1
    return {name: Value(gradient.exact * scale, rounded=True) for name, gradient in gradients.items()}


def vocab_size_of(num_heads):
    """The rows of the token table: the characters, rounded up to a multiple of the heads."""
    return -(-VOCABULARY // num_heads) * num_heads


def trained(steps, batch_size, seq_len, num_layers, hidden_size, num_heads, clip_grad=0.0, seed=0, sums=0, experts=0):
    """{"losses"; "initial" weights, "first" gradients and "new" weights, by name; "lines": its answers to sums}."""
    initial = w = new_weights(vocab_size_of(num_heads), seq_len, num_layers, hidden_size, seed, experts)
    optimizer = reference.Optimizer("adamw", rate=1e-3, graph=True, decay=0.01)  # 2e-7 from AdamW in float64
    losses, first = [], None
    for step in range(1, steps + 1):
        loss = loss_of(w, *batch_of(step, batch_size, seq_len, seed), num_heads)
        gradients = clipped(reference.gradients(loss, w), clip_grad)
        first = first or gradients
        w = optimizer.step(w, gradients)
        losses.append(loss.exact.item())
    lines = answered(w, SUMS[:sums], num_heads)
    return {"losses": losses, "initial": initial, "first": first, "new": w, "lines": lines}


def answered(w, sums, num_heads):
    """The lines that it writes for sums that are held out: the most likely digits."""
    lines = lines_of(sums)
    for i in (6, 7, 8):
        logits = logits_of(w, lines[:, :i], num_heads)[0].exact
        lines[:, i] = logits[:, -1, :VOCABULARY].argmax(-1)
    return lines
