"""The Llama of recipes/transformer/llama.py in numpy, float64, on one device: weights, batches, losses, training."""

import numpy as np

from tests.cases import reference
from tests.cases.reference import Value
from tests.cases.reference_transformer import causal, cross_entropy, softmax


def shapes(vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, tied):
    """Name in transformers -> shape, (out, in) as torch.nn.Linear has it."""
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    of = {"model.embed_tokens.weight": (vocab_size, hidden_size)}
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        of[attention + "q_proj.weight"] = (q_size, hidden_size)
        of[attention + "k_proj.weight"] = of[attention + "v_proj.weight"] = (kv_size, hidden_size)
        of[attention + "o_proj.weight"] = (hidden_size, q_size)
        of[mlp + "gate_proj.weight"] = of[mlp + "up_proj.weight"] = (intermediate_size, hidden_size)
        of[mlp + "down_proj.weight"] = (hidden_size, intermediate_size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            of[f"model.layers.{i}.{norm}.weight"] = (hidden_size,)
    of["model.norm.weight"] = (hidden_size,)
    return of if tied else {**of, "lm_head.weight": (vocab_size, hidden_size)}


def new_weights(shapes, seed):
    """Norms are ones."""
    rng = np.random.default_rng(seed)
    return {
        name: Value(0.1 * rng.standard_normal(shape, dtype=np.float32) if len(shape) > 1 else np.ones(shape))
        for name, shape in shapes.items()
    }


def rms_norm(x, eps):
    """B. Zhang, R. Sennrich, arXiv:1910.07467."""
    return x * ((x**2).mean(-1) + eps) ** -0.5


def silu(x):
    return x * ((-1 * x).exp() + 1) ** -1


def frequencies(head_dim, rope):
    """J. Su et al., arXiv:2104.09864; stretched as in Llama 3.1, A. Dubey et al., arXiv:2407.21783."""
    turns = []
    for i in range(head_dim // 2):
        turn = rope.get("rope_theta", 10000.0) ** (-2 * i / head_dim)
        if rope.get("rope_type") == "llama3":
            wavelength, context = 2 * np.pi / turn, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > context / low:
                turn = turn / rope["factor"]
            elif wavelength >= context / high:
                share = (context / wavelength - low) / (high - low)
                turn = (1 - share) * turn / rope["factor"] + share * turn
        turns.append(turn)
    return np.array(turns)


def rotated(x, turns):
    """Numbers j and j + head_dim / 2 of a head are a point in the plane, turned by its position times turns[j]."""
    half = len(turns)
    angles = np.arange(x.exact.shape[-2])[:, None] * turns
    cos, sin = (np.concatenate((part, part), -1) for part in (np.cos(angles), np.sin(angles)))
    quarter_turn = np.zeros((2 * half, 2 * half))
    for j in range(half):
        quarter_turn[half + j, j], quarter_turn[j, half + j] = -1, 1
    return x * Value(cos) + (x @ Value(quarter_turn)) * Value(sin)


def attention(x, w, name, heads, turns, scale):
    """Grouped queries: J. Ainslie et al., arXiv:2305.13245. scale: of each matmul."""
    batch, length, _ = x.exact.shape

    def by_head(projection):
        out = scale * (x @ w[f"{name}{projection}.weight"].T)
        return out.reshape(batch, length, -1, 2 * len(turns)).permute(0, 2, 1, 3)

    q, k, v = by_head("q_proj"), by_head("k_proj"), by_head("v_proj")
    q, k = rotated(q, turns), rotated(k, turns)
    group = np.arange(heads) // (heads // k.exact.shape[1])  # head of queries -> of keys
    k, v = k[:, group], v[:, group]
    scores = scale * (q @ k.T) * (2 * len(turns)) ** -0.5 + causal(length)
    values = (scale * (softmax(scores) @ v)).permute(0, 2, 1, 3).reshape(batch, length, -1)
    return scale * (values @ w[f"{name}o_proj.weight"].T)


def logits_of(w, ids, heads, eps, turns, scale=1.0):
    """(batch, length, vocab_size), of ids (batch, length)."""
    x = w["model.embed_tokens.weight"][ids]
    for i in range(sum(name.endswith("q_proj.weight") for name in w)):
        name = f"model.layers.{i}."
        h = rms_norm(x, eps) * w[f"{name}input_layernorm.weight"]
        x = x + attention(h, w, f"{name}self_attn.", heads, turns, scale)
        h = rms_norm(x, eps) * w[f"{name}post_attention_layernorm.weight"]
        gate, up = (scale * (h @ w[f"{name}mlp.{part}_proj.weight"].T) for part in ("gate", "up"))
        x = x + scale * ((silu(gate) * up) @ w[f"{name}mlp.down_proj.weight"].T)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return scale * ((rms_norm(x, eps) * w["model.norm.weight"]) @ head.T)


def batch_of(step, vocab_size, batch, seq_len, seed):
    """Rows that count modulo vocab_size, and the same one later."""
    first = np.random.RandomState([seed, step]).randint(vocab_size, size=(batch, 1))
    rows = (first + np.arange(seq_len + 1)) % vocab_size
    return rows[:, :-1], rows[:, 1:]


def loss_of(w, ids, targets, *model):
    """The mean over all tokens; model: what `logits_of` takes besides."""
    logits = logits_of(w, ids, *model)
    return cross_entropy(logits.reshape(targets.size, -1), targets.ravel())


def trained(shapes, heads, eps, turns, seed, steps, batch, seq_len, matmul_scale=1.0):
    """By name the initial weights, the gradients of the last step, momentum and new weights; the losses."""
    initial = w = new_weights(shapes, seed)
    optimizer, losses, gradients = reference.Optimizer("momentum"), [], {}
    for step in range(steps):
        ids, targets = batch_of(step, shapes["model.embed_tokens.weight"][0], batch, seq_len, seed)
        loss = loss_of(w, ids, targets, heads, eps, turns, matmul_scale)
        gradients = reference.gradients(loss, w)
        w = optimizer.step(w, gradients)
        losses.append(loss.exact.item())
    values = {f"{name} grad": gradient for name, gradient in gradients.items()}
    values.update({f"new {name}": weight for name, weight in w.items()})
    return {**initial, **values, **optimizer.state, "losses": Value(losses, rounded=True)}
