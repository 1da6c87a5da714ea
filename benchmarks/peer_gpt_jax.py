"""The model of recipes/transformer/gpt.py in JAX, as sharded jit, for peer_jax.py."""

import time
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

COLUMN, ROW = P(None, "ranks"), P("ranks")
SPLIT = {  # of a weight, by its last name; of others and of their moments: whole
    "data": {},
    "tensor": {"tokens": ROW, "qkv": COLUMN, "project": ROW, "up": COLUMN, "down": ROW},
    "sharded": dict.fromkeys(("tokens", "positions", "qkv", "project", "up", "down"), ROW),
}


def adamw(weights, gradients, state, rate=1e-3, decay=0.01):
    """state: {"m", "v": the moments, "t": steps so far}."""
    t = state["t"] + 1
    m = jax.tree.map(lambda m, gradient: 0.9 * m + 0.1 * gradient, state["m"], gradients)
    v = jax.tree.map(lambda v, gradient: 0.999 * v + 0.001 * gradient**2, state["v"], gradients)

    def moved(w, m, v):
        return (1 - rate * decay) * w - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return jax.tree.map(moved, weights, m, v), {"m": m, "v": v, "t": t}


def normed(x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) * weight


def loss(w, ids, targets, heads):
    x = w["embedding.tokens"][ids] + w["embedding.positions"]
    for i in range(sum(name.endswith(".qkv") for name in w)):
        norm, qkv, project, norm_mlp, up, down = (
            w[f"blocks.{i}.{name}"] for name in ("norm", "qkv", "project", "norm_mlp", "up", "down")
        )
        of_heads = (normed(x, norm) @ qkv).reshape(*ids.shape, heads, -1)
        values = jax.nn.dot_product_attention(*jnp.split(of_heads, 3, -1), is_causal=True)
        x = x + values.reshape(x.shape) @ project
        x = x + jnp.square(jax.nn.relu(normed(x, norm_mlp) @ up)) @ down
    chances = jax.nn.log_softmax(normed(x, w["head.norm"]) @ w["embedding.tokens"].T)
    return -jnp.take_along_axis(chances, targets[..., None], -1).mean()


@lru_cache
def compiled(heads, splits):
    """One step, for weights with these shardings, (name, sharding) of each."""
    splits = dict(splits)
    whole = splits["head.norm"]

    def step(weights, state, ids, targets):
        value, gradients = jax.value_and_grad(loss)(weights, ids, targets, heads)
        return value, *adamw(weights, gradients, state)

    of_state = {"m": splits, "v": splits, "t": whole}
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(whole, splits, of_state)), of_state


def train_gpt(kind, file, heads):
    """Train from the weights on the text of a file of gpt.py's: {"losses", "seconds" of each step but two}."""
    weights = dict(np.load(file))
    rows = weights.pop("rows")  # (steps, batch, length + 1)
    mesh = jax.make_mesh((jax.device_count(),), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
    splits = {name: NamedSharding(mesh, SPLIT[kind].get(name.split(".")[-1], P())) for name in weights}
    step, of_state = compiled(heads, tuple(splits.items()))
    state = {moment: jax.tree.map(np.zeros_like, weights) for moment in "mv"}
    state = jax.device_put({**state, "t": np.float32(0)}, of_state)
    weights, of_text = jax.device_put(weights, splits), NamedSharding(mesh, P() if kind == "tensor" else ROW)
    losses, ends = [], []
    for batch in rows:
        value, weights, state = step(weights, state, *jax.device_put((batch[:, :-1], batch[:, 1:]), of_text))
        losses.append(float(value))
        jax.block_until_ready(weights)
        ends.append(time.perf_counter())
    return {"losses": losses, "seconds": np.diff(ends[1:]).tolist()}
