"""JAX in a single process, with a host device for each rank; reads orders from standard input, like peer_torch.py."""

import json
import os
import sys
import time
from functools import partial

N = int(os.environ["WORLD_SIZE"])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={N}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from peer_gpt_jax import adamw, trained  # noqa: E402

MESHES = {"data": ((N,), ("data",)), "tensor": ((N,), ("tensor",)), "hybrid": ((2, N // 2), ("data", "tensor"))}
MESHES["sharded"] = MESHES["data"]


def momentum(weights, gradients, state):
    """SGD; state: {"m": momentum}."""
    m = jax.tree.map(lambda m, gradient: 0.9 * m + gradient, state["m"], gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, m), {"m": m}


adam = partial(adamw, rate=0.1, decay=0)


def training(kind, batch, in_features, hidden_size, out_features):
    """A function that runs a step of x @ w0, relu, @ w1 with momentum, or sharded with Adam, and waits for it."""
    shape, names = MESHES[kind]
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    rows, columns = ("data" if "data" in names else None), ("tensor" if "tensor" in names else None)
    split = {"x": P(rows), "w0": P(None, columns), "w1": P(columns)}
    if kind == "sharded":  # weights and the moments too
        split.update(w0=P(rows), w1=P(rows))
    split = {name: NamedSharding(mesh, spec) for name, spec in split.items()}
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.device_put(jax.random.normal(keys[0], (batch, in_features)), split["x"])
    y = jax.device_put(jax.random.normal(keys[1], (batch, out_features)), split["x"])
    weights = {
        "w0": jax.device_put(jax.random.normal(keys[2], (in_features, hidden_size)) / 16, split["w0"]),
        "w1": jax.device_put(jax.random.normal(keys[3], (hidden_size, out_features)) / 16, split["w1"]),
    }
    optimizer, moments = (adam, "mv") if kind == "sharded" else (momentum, "m")
    state = {moment: jax.tree.map(jnp.zeros_like, weights) for moment in moments}
    state_split = {moment: {name: split[name] for name in weights} for moment in moments}
    if optimizer is adam:
        state["t"], state_split["t"] = jnp.zeros(()), NamedSharding(mesh, P())

    def loss(weights):
        return jnp.mean((jax.nn.relu(x @ weights["w0"]) @ weights["w1"] - y) ** 2)

    def update(weights, state):
        return optimizer(weights, jax.grad(loss)(weights), state)

    shardings = {name: split[name] for name in weights}, state_split
    update = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
    now = [weights, state]

    def step():
        now[:] = update(*now)
        jax.block_until_ready(now)

    return step


def main():
    steps = {}
    for line in sys.stdin:
        options = json.loads(line)
        if "file" in options:
            print(json.dumps(trained(**options)), flush=True)
            continue
        count = options.pop("steps")
        if line not in steps:
            steps[line] = training(**options)
        ends = []
        for _ in range(count):
            steps[line]()
            ends.append(time.perf_counter())
        print(json.dumps([end - begin for begin, end in zip(ends, ends[1:])]), flush=True)


if __name__ == "__main__":
    main()
