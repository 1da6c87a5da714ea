"""recipes/training/training_run.py in numpy, float64, on one device, with the whole batch at once."""

import dataclasses
import math

import numpy as np

from tests.cases import reference
from tests.cases.reference import Value
from tests.cases.reference_gpt import clipped
from tests.cases.reference_transformer import causal, norm, softmax

SMALL = {  # two batches in an epoch, and held-out sequences that fill no batch
    **{"batch_size": 12, "seq_len": 6, "vocab_size": 11, "num_layers": 1, "hidden_size": 8, "num_heads": 2},
    **{"train_samples": 26, "test_samples": 7, "warmup_steps": 2, "decay_steps": 5, "eval_every": 2},
    **{"weight_decay": 0.5, "clip_grad": 0.1},
}
PADDING = -100


@dataclasses.dataclass
class Sizes:
    """The configuration of a run, by the names of the recipe."""

    batch_size: int
    seq_len: int
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    train_samples: int
    test_samples: int
    warmup_steps: int
    decay_steps: int
    eval_every: int
    weight_decay: float
    clip_grad: float
    lr: float = 0.01


def new_weights(sizes, seed):
    """Name -> Value, of float32 numbers, in the order in which the recipe draws them."""
    rng, hidden, w = np.random.default_rng(seed), sizes.hidden_size, {}

    def draw(name, *shape):
        w[name] = Value(np.float32(0.1) * rng.standard_normal(shape, dtype=np.float32))

    def add_norm(name):
        w.update({f"{name}.weight": Value(np.ones(hidden)), f"{name}.bias": Value(np.zeros(hidden))})

    draw("tokens", sizes.vocab_size, hidden)
    draw("positions", sizes.seq_len, hidden)
    for i in range(sizes.num_layers):
        add_norm(f"blocks.{i}.norm")
        draw(f"blocks.{i}.qkv", hidden, 3 * hidden)
        draw(f"blocks.{i}.project", hidden, hidden)
        add_norm(f"blocks.{i}.norm_mlp")
        draw(f"blocks.{i}.up", hidden, 4 * hidden)
        draw(f"blocks.{i}.down", 4 * hidden, hidden)
    add_norm("norm")
    draw("head", hidden, sizes.vocab_size)
    return w


def normalized(x, w, name):
    return norm(x) * w[f"{name}.weight"] + w[f"{name}.bias"]


def block(x, w, name, num_heads):
    batch, seq_len, hidden = x.exact.shape
    size = hidden // num_heads
    qkv = normalized(x, w, f"{name}.norm") @ w[f"{name}.qkv"]  # head by head
    qkv = qkv.reshape(batch, seq_len, num_heads, 3 * size).permute(0, 2, 1, 3)
    q, k, v = (qkv[..., i * size : (i + 1) * size] for i in range(3))
    values = softmax((q @ k.T) * size**-0.5 + causal(seq_len)) @ v
    x = x + values.permute(0, 2, 1, 3).reshape(batch, seq_len, hidden) @ w[f"{name}.project"]
    return x + (normalized(x, w, f"{name}.norm_mlp") @ w[f"{name}.up"]).relu() @ w[f"{name}.down"]


def mean_loss(w, ids, targets, sizes):
    """The mean over the valid tokens alone."""
    x = w["tokens"][ids] + w["positions"]
    for i in range(sizes.num_layers):
        x = block(x, w, f"blocks.{i}", sizes.num_heads)
    logits = (normalized(x, w, "norm") @ w["head"]).reshape(targets.size, -1)
    rows = np.flatnonzero(targets.ravel() != PADDING)
    logits = logits[rows] - logits.exact[rows].max(-1, keepdims=True)
    return (logits.exp().sum(-1).log() - logits[np.arange(len(rows)), targets.ravel()[rows]].reshape(-1, 1)).mean()


def samples(indices, sizes):
    """The ids and targets of these sequences: each counts up by its own stride, modulo the vocabulary."""
    ids = np.zeros((len(indices), sizes.seq_len), int)
    targets = np.full((len(indices), sizes.seq_len), PADDING)
    for row, index in enumerate(indices):
        rng = np.random.RandomState(index)
        first, stride, length = rng.randint(sizes.vocab_size), rng.randint(1, 8), rng.randint(2, sizes.seq_len + 1)
        for i in range(length):
            ids[row, i] = (first + i * stride) % sizes.vocab_size
            targets[row, i] = (first + (i + 1) * stride) % sizes.vocab_size
    return ids, targets


def indices_of(step, sizes, seed):
    """The samples of a step; a new order in each epoch, of which what fills no batch is left out."""
    epoch, batch = divmod(step - 1, sizes.train_samples // sizes.batch_size)
    order = np.random.RandomState([seed, epoch]).permutation(sizes.train_samples)
    return order[batch * sizes.batch_size : (batch + 1) * sizes.batch_size]


def rate_of(step, sizes):
    """Linear from 0 to lr, then half a cosine down to lr / 10."""
    if step <= sizes.warmup_steps:
        return sizes.lr * step / sizes.warmup_steps
    done = min(1, (step - sizes.warmup_steps) / (sizes.decay_steps - sizes.warmup_steps))
    return sizes.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def trained(steps, seed=0, **sizes):
    """{"losses", "held_out"; "initial" and "new" weights and "moments" by name; "scale": of the last clipping}."""
    sizes = Sizes(**{**SMALL, **sizes})
    initial = w = new_weights(sizes, seed)
    adam, losses, held_out = reference.Optimizer("adam"), [], []
    test = np.arange(sizes.train_samples, sizes.train_samples + sizes.test_samples)
    for step in range(1, steps + 1):
        loss = mean_loss(w, *samples(indices_of(step, sizes, seed), sizes), sizes)
        gradients = clipped(reference.gradients(loss, w), sizes.clip_grad)
        adam.rate, before = rate_of(step, sizes), w
        w = adam.step(w, gradients)
        for name in (name for name in w if w[name].exact.ndim > 1):  # matrices decay
            decay = adam.rate * sizes.weight_decay * before[name].exact
            w[name] = Value(w[name].exact - decay, rounded=True)
        losses.append(loss.exact.item())
        if step % sizes.eval_every == 0:
            held_out.append(mean_loss(w, *samples(test, sizes), sizes).exact.item())
    return {"losses": losses, "held_out": held_out, "initial": initial, "new": w, "moments": adam.state}
