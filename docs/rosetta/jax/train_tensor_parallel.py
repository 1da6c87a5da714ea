"""Train tensor parallel in JAX: shard w0 by columns and w1 by rows; out_sharding asks for the all-reduce.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    device 0       device 1       PartitionSpec
    x          (8, 4)                         whole          whole          P()
    y          (8, 4)                         whole          whole          P()
    w0         (4, 8)                         columns 0-3    columns 4-7    P(None, "tensor")
    w1         (8, 4)                         rows 0-3       rows 4-7       P("tensor")

The twin of recipes/training/train_tensor_parallel.py, with the same weights, batch and losses. The second matmul
contracts a sharded dimension: without out_sharding it is a ShardingTypeError, where OneFlow returns a partial sum.

Run:     python docs/rosetta/jax/train_tensor_parallel.py
On GPUs: delete the two lines of jax.config, and set JAX_DEFAULT_MATMUL_PRECISION=highest, as the default is TF32. On
         several hosts call jax.distributed.initialize() first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


def loss_of(weights, x, y):
    hidden = jax.nn.relu(x @ weights["w0"])
    out = jnp.matmul(hidden, weights["w1"], out_sharding=P())
    return jnp.mean((out - y) ** 2)


@functools.partial(jax.jit, donate_argnames=("weights", "momentum"))
def update(weights, momentum, x, y):
    """A step of SGD with momentum; returns weights, momentum and loss."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum)
    return weights, momentum, loss


def train(mesh, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a mesh; returns the weights and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    losses = []
    with jax.set_mesh(mesh):
        x, y = jax.device_put((x, y), P())
        weights = jax.device_put({"w0": w0, "w1": w1}, {"w0": P(None, "tensor"), "w1": P("tensor")})
        momentum = jax.tree.map(jnp.zeros_like, weights)
        for _ in range(steps):
            weights, momentum, loss = update(weights, momentum, x, y)
            losses.append(loss)
    return weights, [float(loss) for loss in losses]


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    weights, losses = train(jax.make_mesh((2,), ("tensor",)))
    for name, w in weights.items():
        for shard in w.addressable_shards:
            print(f"[{shard.device.id}] {name} {shard.data.shape} of {w.shape}")
    assert {name: w.sharding.shard_shape(w.shape) for name, w in weights.items()} == {"w0": (4, 4), "w1": (4, 4)}
    _, alone = train(jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1]))  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
