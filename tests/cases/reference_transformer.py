"""The values of the transformer recipes in plain numpy: see reference.py."""

import numpy as np

from tests.cases import reference
from tests.cases.reference import Value, drawn, mse


def norm(x):
    """Each row minus its mean, divided by its standard deviation."""
    centered = x - x.mean(-1)
    return centered / ((centered**2).mean(-1) + 1e-5) ** 0.5


def softmax(x):
    power = (x - x.exact.max(-1, keepdims=True)).exp()
    return power / power.sum(-1)


def cross_entropy(logits, targets):
    """The mean over the rows."""
    shifted = logits - logits.exact.max(-1, keepdims=True)
    return (shifted.exp().sum(-1).log() - shifted[np.arange(len(targets)), targets].reshape(-1, 1)).mean()


def causal(seq_len):
    """What is added to scores, so that no token sees a later one."""
    return Value(np.triu(np.full((seq_len, seq_len), -1e9), k=1))


def attention(q, k, v, matmul_scale):
    """q, k, v: (..., seq_len, head_size); returns the scores, their softmax, and its product with v."""
    scores = matmul_scale * (q @ k.T) * q.exact.shape[-1] ** -0.5
    probs = softmax(scores + causal(q.exact.shape[-2]))
    return scores, probs, matmul_scale * (probs @ v)


def block(x, w, batch, num_heads, matmul_scale, sequence_first=False):
    """Pre-norm attention and MLP of tokens, (batch x seq_len, hidden_size) or the other way; its tensors by name."""
    tokens, hidden_size = x.exact.shape
    shape, order, back = (batch, tokens // batch), (0, 2, 1, 3), (0, 2, 1, 3)
    if sequence_first:
        shape, order, back = shape[::-1], (1, 2, 0, 3), (2, 0, 1, 3)
    attention_in = norm(x) * w["attention_norm.weight"] + w["attention_norm.bias"]
    qkv = matmul_scale * (attention_in @ w["w_qkv"])
    by_head, size = qkv.reshape(*shape, num_heads, -1).permute(*order), hidden_size // num_heads
    q, k, v = (by_head[..., i * size : (i + 1) * size] for i in range(3))
    scores, probs, context = attention(q, k, v, matmul_scale)
    context = context.permute(*back).reshape(tokens, hidden_size)
    residual = x + matmul_scale * (context @ w["w_out"])
    mlp_in = norm(residual) * w["mlp_norm.weight"] + w["mlp_norm.bias"]
    hidden = (matmul_scale * (mlp_in @ w["w_up"])).relu()
    tensors = {"attention_in": attention_in, "qkv": qkv, "scores": scores, "probs": probs, "context": context}
    tensors.update({"residual": residual, "mlp_in": mlp_in, "hidden": hidden})
    return {**tensors, "out": residual + matmul_scale * (hidden @ w["w_down"])}


def trained_block(seed, steps, batch, seq_len, num_heads, head_size, parts=0, matmul_scale=1.0, sequence_first=False):
    """x, y, the mask, the weights, and what `descend` returns; parts: of the batch."""
    rng, hidden_size = np.random.default_rng(seed), num_heads * head_size
    x, y = (drawn(rng, batch * seq_len, hidden_size) for _ in range(2))
    shapes = {"w_qkv": (hidden_size, 3 * hidden_size), "w_out": (hidden_size, hidden_size)}
    shapes.update({"w_up": (hidden_size, 4 * hidden_size), "w_down": (4 * hidden_size, hidden_size)})
    w = {name: drawn(rng, *shape, by=4) for name, shape in shapes.items()}
    for name in ("attention_norm", "mlp_norm"):
        w.update({f"{name}.weight": Value(np.ones(hidden_size)), f"{name}.bias": Value(np.zeros(hidden_size))})

    def forward(w, part):
        rows = x[part]
        tensors = block(rows, w, batch * len(rows.exact) // len(x.exact), num_heads, matmul_scale, sequence_first)
        return tensors, mse(tensors["out"], y[part])

    trained, added = reference.descend(w, forward, steps, rows=batch * seq_len, parts=parts)
    return {"x": x, "y": y, "mask": causal(seq_len), **w, **trained}, added


def vocab_parallel(seed=0, steps=1, tokens=8, vocab_size=61, padded=61, hidden_size=4, parts=0, matmul_scale=1.0):
    """ids, targets, and what `descend` returns for a language model of two tables; `parts`: of the tokens."""
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(vocab_size, size=(2, tokens))
    table, head = drawn(rng, vocab_size, hidden_size).exact, drawn(rng, hidden_size, vocab_size).exact
    padding = (0, padded - vocab_size)
    w = {"table": Value(np.pad(table, (padding, (0, 0)))), "head": Value(np.pad(head, ((0, 0), padding)))}
    unused = np.where(np.arange(padded) < vocab_size, 0, -1e9)

    def forward(w, part):
        x = w["table"][ids[part]]
        logits = matmul_scale * (x @ w["head"])
        return {"x": x, "logits": logits}, cross_entropy(logits + unused, targets[part])

    trained, added = reference.descend(w, forward, steps, rows=tokens, parts=parts)
    inputs = {"ids": Value(ids, dtype="int64"), "targets": Value(targets, dtype="int64"), "unused": Value(unused)}
    return {**inputs, **w, **trained}, added


def context_parallel(seed=0, steps=1, seq_len=8, num_heads=4, head_size=4, matmul_scale=1.0):
    """Steps of SGD of q, k and v on sum((out - y)^2), out = attention(q, k, v) of (seq_len, num_heads, head_size)."""
    rng = np.random.default_rng(seed)
    q, k, v, y = (drawn(rng, seq_len, num_heads, head_size) for _ in range(4))

    def forward(w, part):
        _, _, context = attention(*(w[name].permute(1, 0, 2) for name in "qkv"), matmul_scale)
        out = context.permute(1, 0, 2)
        return {"out": out}, ((out - y) ** 2).sum()

    w = {"q": q, "k": k, "v": v}
    return {**w, "y": y, "mask": causal(seq_len), **reference.descend(w, forward, steps)[0]}


def mixture_of_experts(
    n, seed=0, steps=1, group_size=8, hidden_size=4, ffn_size=8, capacity=3, matmul_scale=1.0, router_scale=1.0
):
    """Steps of SGD on mean((out - y)^2), with n experts and n groups of tokens; and how many tokens each step drops."""
    rng = np.random.default_rng(seed)
    x, y = (drawn(rng, n * group_size, hidden_size) for _ in range(2))
    shapes = {"router": (hidden_size, n), "w_up": (n, hidden_size, ffn_size), "w_down": (n, ffn_size, hidden_size)}
    w = {name: drawn(rng, *shape) for name, shape in shapes.items()}
    w["router"] = router_scale * w["router"]
    w.update({"norm.weight": Value(np.ones(hidden_size)), "norm.bias": Value(np.zeros(hidden_size))})
    dropped = []

    def forward(w, part):
        tokens = norm(x) * w["norm.weight"] + w["norm.bias"]
        probs = softmax(matmul_scale * (tokens @ w["router"]))
        expert, rows = probs.exact.argmax(axis=1), np.arange(n * group_size)
        best = np.sort(probs.exact, axis=1)
        assert not router_scale or n == 1 or (best[:, -1] - best[:, -2] > 1e-4).all(), "rounding must not choose"
        dispatch_mask = np.zeros((n, group_size, n, capacity))
        for group, token in np.ndindex(n, group_size):
            own = expert[group * group_size : (group + 1) * group_size]
            slot = (own[:token] == own[token]).sum()  # earlier tokens of the group that chose the same expert
            if slot < capacity:
                dispatch_mask[group, token, own[token], slot] = 1
        dropped.append(n * group_size - dispatch_mask.sum())
        slots, tokens = Value(dispatch_mask.reshape(n, group_size, -1)), tokens.reshape(n, group_size, hidden_size)
        sent = (matmul_scale * (slots.T @ tokens)).reshape(n, n, capacity, hidden_size)
        by_expert = sent.permute(1, 0, 2, 3).reshape(n, n * capacity, hidden_size)
        hidden = (matmul_scale * (by_expert @ w["w_up"])).relu()
        expert_out = (matmul_scale * (hidden @ w["w_down"])).reshape(n, n, capacity, hidden_size).permute(1, 0, 2, 3)
        combined = matmul_scale * (slots @ expert_out.reshape(n, n * capacity, hidden_size))
        out = x + probs[rows, expert].reshape(-1, 1) * combined.reshape(n * group_size, hidden_size)
        tensors = {"tokens": tokens, "probs": probs.reshape(n, group_size, n), "dispatch_mask": slots, "sent": sent}
        tensors.update({"arrived": sent, "hidden": hidden, "expert_out": expert_out, "combined": combined, "out": out})
        return tensors, mse(out, y)

    trained = reference.descend(w, forward, steps)[0]
    return {"x": x, "y": y, **w, **trained, "dropped": Value(dropped)}
