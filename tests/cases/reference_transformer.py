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


def experts_of(probs, top_k):
    """[the most likely expert, the second, ...] of each token, from an array (..., experts); of equals the first."""
    return np.argsort(-probs, axis=-1, kind="stable")[..., :top_k]


def slots_of(experts, num_experts, capacity):
    """(token, expert, slot): 1 where a token of a sequence has a slot. experts: (token, choice), by their numbers."""
    taken, free = np.zeros((len(experts), num_experts, capacity)), [iter(range(capacity)) for _ in range(num_experts)]
    for choice in experts.T:  # all first choices, then all second ones
        for token, expert in enumerate(choice):
            slot = next(free[expert], None)
            if slot is not None:
                taken[token, expert, slot] = 1
    return taken


def route(probs, top_k, capacity):
    """(gates, slots, balance loss, number of tokens of each expert) of probs, a Value (sequence, token, expert)."""
    experts = np.array([experts_of(sequence, top_k) for sequence in probs.exact])
    _, seq_len, num_experts = probs.exact.shape
    chosen = np.eye(num_experts)[experts].sum(2)
    gates = probs * chosen
    gates = gates / gates.sum(-1) if top_k > 1 else gates
    slots = np.array([slots_of(sequence, num_experts, capacity) for sequence in experts])
    fractions = chosen.sum(1, keepdims=True) / (seq_len * top_k)
    balance = num_experts * (probs.mean(1) * fractions).sum(-1).mean()  # Switch Transformers, (4) to (6)
    return gates, slots, balance, chosen.sum((0, 1))


def mixture_of_experts(
    seed=0,
    steps=1,
    experts=8,
    top_k=2,
    capacity=3,
    aux_loss_coef=0.3,
    batch=8,
    seq_len=8,
    hidden_size=4,
    ffn_size=8,
    matmul_scale=1.0,
    router_scale=1.0,
):
    """Steps of SGD on mean((out - y)^2) and the balance loss, and how the tokens of each step were routed.

    Also "gap", the smallest difference of probabilities that decided a choice: rounding must not.
    """
    rng, num_experts = np.random.default_rng(seed), experts
    x, y = (drawn(rng, batch, seq_len, hidden_size) for _ in range(2))
    w = {"router": router_scale * drawn(rng, hidden_size, num_experts)}
    w.update({"w_up": drawn(rng, experts, hidden_size, ffn_size, by=4)})
    w.update({"w_down": drawn(rng, experts, ffn_size, hidden_size, by=4)})
    w.update({"norm.weight": Value(np.ones(hidden_size)), "norm.bias": Value(np.zeros(hidden_size))})
    routed, gaps = {"balance_losses": [], "loads": [], "dropped": []}, []

    def forward(w, part):
        tokens = norm(x) * w["norm.weight"] + w["norm.bias"]
        probs = softmax(matmul_scale * (tokens @ w["router"]))
        best = -np.sort(-probs.exact, axis=-1)[..., : top_k + 1]
        gaps.append(-np.diff(best).max(initial=-1))
        gates, taken, balance, load = route(probs, top_k, capacity)
        slots = Value(taken.reshape(batch, seq_len, -1))
        sent = (matmul_scale * (slots.T @ tokens)).reshape(batch, num_experts, capacity, hidden_size)
        by_expert = sent.permute(1, 0, 2, 3).reshape(num_experts, batch * capacity, hidden_size)
        hidden = (matmul_scale * (by_expert @ w["w_up"])).relu()
        expert_out = (matmul_scale * (hidden @ w["w_down"])).reshape(num_experts, batch, capacity, hidden_size)
        returned = expert_out.permute(1, 0, 2, 3).reshape(batch, num_experts * capacity, hidden_size)
        weights = (gates.reshape(batch, seq_len, num_experts, 1) * taken).reshape(*slots.exact.shape)
        out = x + matmul_scale * (weights @ returned)
        for name, number in (("balance_losses", balance.exact.item()), ("loads", load)):
            routed[name].append(number)
        routed["dropped"].append(load.sum() - taken.sum())
        tensors = {"tokens": tokens, "sent": sent, "arrived": sent, "hidden": hidden, "out": out}
        return tensors, mse(out, y) + aux_loss_coef * balance.reshape(1, 1, 1)

    rate = reference.Optimizer("sgd", rate=1.0)
    trained = reference.descend(w, forward, steps, rate)[0]
    routed = {name: Value(numbers, rounded=name == "balance_losses") for name, numbers in routed.items()}
    return {"x": x, "y": y, **w, **trained, **routed, "gap": min(gaps)}
