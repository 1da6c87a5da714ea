"""Fully sharded in JAX: shard every weight by rows; reshard gathers it in the step.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    device 0    device 1    PartitionSpec
    x          (8, 4)                         rows 0-3    rows 4-7    P("data")
    y          (8, 4)                         rows 0-3    rows 4-7    P("data")
    w0         (4, 8)                         rows 0-1    rows 2-3    P("data")
    w1         (8, 4)                         rows 0-3    rows 4-7    P("data")

The twin of recipes/memory/fully_sharded.py, with the same weights, batch and losses. There is no wrapper: FSDP is a
sharding. Gradients and Adam's state have the sharding of the weights. Whether gathered weights stay until backward is
the choice of jax.checkpoint, as of any activation.

Run:     python docs/rosetta/jax/fully_sharded.py
On GPUs: delete the two lines of jax.config, and set JAX_DEFAULT_MATMUL_PRECISION=highest, as the default is TF32. On
         several hosts call jax.distributed.initialize() first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard


def loss_of(weights, x, y):
    w0 = reshard(weights["w0"], P())  # all-gather
    hidden = jax.nn.relu(x @ w0)
    w1 = reshard(weights["w1"], P())
    return jnp.mean((hidden @ w1 - y) ** 2)


@functools.partial(jax.jit, donate_argnames=("weights", "m", "v"))
def update(weights, m, v, x, y, m_scale, v_scale):
    """A step of Adam with a learning rate of 0.1; returns weights, m, v and loss."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)  # gradients are sharded as the weights are
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, gradients)

    def updated(w, m, v):
        return w - 0.1 * (m / m_scale) / (jnp.sqrt(v / v_scale) + 1e-8)

    return jax.tree.map(updated, weights, m, v), m, v, loss


def train(mesh, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a mesh; returns the weights and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    losses = []
    with jax.set_mesh(mesh):
        x, y = jax.device_put((x, y), P("data"))
        assert x.sharding.shard_shape(x.shape) == (batch // mesh.shape["data"], in_features)
        weights = jax.device_put({"w0": w0, "w1": w1}, P("data"))
        m, v = jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights)
        for t in range(1, steps + 1):  # 1 - 0.999**t in float32 would be wrong in the fifth digit
            weights, m, v, loss = update(weights, m, v, x, y, 1 - 0.9**t, 1 - 0.999**t)
            losses.append(loss)
    return weights, [float(loss) for loss in losses]


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    weights, losses = train(jax.make_mesh((2,), ("data",)))
    for name, w in weights.items():
        for shard in w.addressable_shards:
            shape = f"{shard.data.shape} of {w.shape}"
            share = shard.data.size / w.size
            print(f"[{shard.device.id}] {name} {shape}: {share:.0%} of it, its gradient and Adam's state")
    assert {name: w.sharding.shard_shape(w.shape) for name, w in weights.items()} == {"w0": (2, 8), "w1": (4, 4)}
    _, alone = train(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
