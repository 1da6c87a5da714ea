"""What the transformer recipes must give: see reference.py."""

import numpy as np

from tests.cases import reference
from tests.cases.reference import Value, drawn, mse, rows_of


def norm(x):
    """Of each row minus its mean, by its standard deviation."""
    centered = x - x.mean(-1)
    return centered / ((centered**2).mean(-1) + 1e-5) ** 0.5


def softmax(x):
    power = (x - x.exact.max(-1, keepdims=True)).exp()
    return power / power.sum(-1)


def cross_entropy(logits, targets):
    """The mean over the rows."""
    shifted = logits - logits.exact.max(-1, keepdims=True)
    return (shifted.exp().sum(-1).log() - shifted[np.arange(len(targets)), targets].reshape(-1, 1)).mean()


def causal(sequence):
    """What is added to scores, so that no token sees a later one."""
    return Value(np.triu(np.full((sequence, sequence), -1e9), k=1))


def attention(q, k, v, matmul_scale):
    """Of (..., sequence, head size); returns the scores, their softmax, and what they make of v."""
    scores = matmul_scale * (q @ k.T) * q.exact.shape[-1] ** -0.5
    weights = softmax(scores + causal(q.exact.shape[-2]))
    return scores, weights, matmul_scale * (weights @ v)


def block(x, w, samples, heads, matmul_scale, sequence_first=False):
    """Pre-norm attention and MLP of tokens, (samples x sequence, features) or the other way; its tensors by name."""
    tokens, features = x.exact.shape
    shape, order, back = (samples, tokens // samples), (0, 2, 1, 3), (0, 2, 1, 3)
    if sequence_first:
        shape, order, back = shape[::-1], (1, 2, 0, 3), (2, 0, 1, 3)
    normed0 = norm(x) * w["norm0"]
    qkv = matmul_scale * (normed0 @ w["w_qkv"])
    by_head, size = qkv.reshape(*shape, heads, -1).permute(*order), features // heads
    q, k, v = (by_head[..., i * size : (i + 1) * size] for i in range(3))
    scores, weights, mixed = attention(q, k, v, matmul_scale)
    mixed = mixed.permute(*back).reshape(tokens, features)
    residual = x + matmul_scale * (mixed @ w["w_out"])
    normed1 = norm(residual) * w["norm1"]
    hidden = (matmul_scale * (normed1 @ w["w_up"])).relu()
    made = {"gathered0": normed0, "qkv": qkv, "scores": scores, "attention": weights, "mixed": mixed}
    made.update({"residual": residual, "gathered1": normed1, "hidden": hidden})
    return {**made, "out": residual + matmul_scale * (hidden @ w["w_down"])}


def trained_block(returned, seed, steps, samples, sequence, heads, head_size, parts=0, matmul_scale=1.0, sequence_first=False):
    """x, y, the weights and what `descend` returns; returned: names of the block's tensors; parts: of the samples."""
    rng, features = np.random.default_rng(seed), heads * head_size
    x, y = (drawn(rng, samples * sequence, features) for _ in range(2))
    shapes = {"norm0": (features,), "w_qkv": (features, 3 * features), "w_out": (features, features)}
    shapes.update({"norm1": (features,), "w_up": (features, 4 * features), "w_down": (4 * features, features)})
    w = {name: drawn(rng, *shape, by=4) for name, shape in shapes.items()}

    def forward(w, part):
        rows = x[part]
        made = block(rows, w, samples * len(rows.exact) // len(x.exact), heads, matmul_scale, sequence_first)
        return {name: made[name] for name in returned}, mse(made["out"], y[part])

    trained, added = reference.descend(w, forward, steps, rows=samples * sequence, parts=parts)
    return {"x": x, "y": y, **w, **trained}, added


def vocab_parallel(seed=0, steps=1, tokens=8, vocabulary=61, padded=61, features=4, parts=0, matmul_scale=1.0):
    """The same for a language model of two tables; `parts`: of the tokens."""
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(vocabulary, size=(2, tokens))
    w = {"table": drawn(rng, padded, features), "head": drawn(rng, features, padded)}
    unused = np.where(np.arange(padded) < vocabulary, 0, -1e9)

    def forward(w, part):
        x = w["table"][ids[part]]
        logits = matmul_scale * (x @ w["head"])
        return {"x": x, "logits": logits}, cross_entropy(logits + unused, targets[part])

    trained, added = reference.descend(w, forward, steps, rows=tokens, parts=parts)
    counts = [np.bincount(ids[part], minlength=padded)[:, None] + np.zeros(features) for part in rows_of(tokens, parts)]
    values = {"ids": Value(ids, dtype="int64"), "targets": Value(targets, dtype="int64"), **w, **trained}
    values["indexed grad"] = Value(sum(counts))
    return values, {**added, "indexed grad": [Value(one) for one in counts]}


def context_parallel(seed=0, steps=1, sequence=8, heads=4, head_size=4, matmul_scale=1.0):
    """Steps of SGD of q, k and v on sum((out - y)^2), out = attention(q, k, v) of (sequence, heads, head size)."""
    rng = np.random.default_rng(seed)
    q, k, v, y = (drawn(rng, sequence, heads, head_size) for _ in range(4))

    def forward(w, part):
        scores, _, mixed = attention(*(w[name].permute(1, 0, 2) for name in "qkv"), matmul_scale)
        out = mixed.permute(1, 0, 2)
        return {"scores": scores, "out": out}, ((out - y) ** 2).sum()

    w = {"q": q, "k": k, "v": v}
    return {**w, "y": y, **reference.descend(w, forward, steps)[0]}


def mixture_of_experts(n, seed=0, steps=1, tokens=8, features=4, hidden_features=8, capacity=3, matmul_scale=1.0):
    """Steps of SGD on mean((out - y)^2), of n experts and `tokens` on each of n ranks; x is a weight that stays."""
    rng = np.random.default_rng(seed)
    x, y = (drawn(rng, n * tokens, features) for _ in range(2))
    shapes = {"router": (features, n), "w_up": (n, features, hidden_features), "w_down": (n, hidden_features, features)}
    w = {"x": x, **{name: drawn(rng, *shape) for name, shape in shapes.items()}}

    def forward(w, part):
        odds = softmax(matmul_scale * (w["x"] @ w["router"]))
        expert, rows = odds.exact.argmax(axis=1), np.arange(n * tokens)
        best = np.sort(odds.exact, axis=1)
        assert n == 1 or (best[:, -1] - best[:, -2] > 1e-4).all(), "rounding must not choose the expert"
        dispatch = np.zeros((n, tokens, n, capacity))
        for rank, token in np.ndindex(n, tokens):
            own = expert[rank * tokens : (rank + 1) * tokens]
            place = (own[:token] == own[token]).sum()
            if place < capacity:
                dispatch[rank, token, own[token], place] = 1
        slots = Value(dispatch.reshape(n, tokens, n * capacity))
        sent = matmul_scale * (slots.T @ w["x"].reshape(n, tokens, features))
        sent = sent.reshape(n, n, capacity, features)
        own = sent.permute(1, 0, 2, 3).reshape(n, n * capacity, features)
        hidden = (matmul_scale * (own @ w["w_up"])).relu()
        done = (matmul_scale * (hidden @ w["w_down"])).reshape(n, n, capacity, features).permute(1, 0, 2, 3)
        back = matmul_scale * (slots @ done.reshape(n, n * capacity, features))
        out = w["x"] + odds[rows, expert].reshape(-1, 1) * back.reshape(n * tokens, features)
        made = {"odds": odds.reshape(n, tokens, n), "dispatch": slots, "sent": sent, "arrived": sent}
        return {**made, "hidden": hidden, "out": out}, mse(out, y)

    return {**w, "y": y, **reference.descend(w, forward, steps, fixed=("x",))[0]}
