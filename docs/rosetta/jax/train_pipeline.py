"""Train a pipeline in JAX: in shard_map all devices run one program, and ppermute hands outputs to the next stage.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    device 0    device 1    PartitionSpec
    x          (8, 4)                         whole       whole       P(), and only stage 0 reads it
    y          (8, 4)                         whole       whole       P(), and only the last stage reads it
    w0         (4, 8)                         whole       nothing     weights[0] of weights (2, 8, 8): P("stage")
    w1         (8, 4)                         nothing     whole       weights[1]

The twin of recipes/pipelines/train_pipeline.py, with the same weights, batch and losses. Stages are slices of one
array, so they have one shape: zeros fill them up. The loop over m + n - 1 ticks is the schedule, GPipe, and jax.grad
makes its backward. In a bubble a device computes too, and the result is dropped.

Run:     python docs/rosetta/jax/train_pipeline.py
On GPUs: delete the two lines of jax.config, and set JAX_DEFAULT_MATMUL_PRECISION=highest, as the default is TF32. On
         several hosts call jax.distributed.initialize() first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


def pipelined(weights, x, y):
    """The mean loss of micro-batches x and y, (m, rows, hidden); each device has a stage of the weights."""
    n, m, stage = jax.lax.axis_size("stage"), len(x), jax.lax.axis_index("stage")
    is_last = stage == n - 1

    def tick(received, t):
        inputs = jnp.where(stage == 0, x[jnp.minimum(t, m - 1)], received)
        out = inputs @ weights[0]
        out = jnp.where(is_last, out, jax.nn.relu(out))
        return jax.lax.ppermute(out, "stage", [(k, k + 1) for k in range(n - 1)]), out

    nothing = jax.lax.pcast(jnp.zeros_like(x[0]), "stage", to="varying")
    _, out = jax.lax.scan(tick, nothing, jnp.arange(m + n - 1))
    loss = mse(out[n - 1 :], y)  # the last stage's first output comes after n - 1 ticks
    return jax.lax.psum(jnp.where(is_last, loss, 0), "stage")


def sequential(weights, x, y):
    """The same layers on a single device."""
    for w in weights[:-1]:
        x = jax.nn.relu(x @ w)
    return mse(x @ weights[-1], y)


def mse(out, y):
    return jnp.mean((out[..., : y.shape[-1]] - y) ** 2)


@functools.partial(jax.jit, static_argnames="loss_of", donate_argnames=("weights", "momentum"))
def update(loss_of, weights, momentum, x, y):
    """A step of SGD with momentum; returns weights, momentum and loss."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    momentum = 0.9 * momentum + gradients
    return weights - 0.1 * momentum, momentum, loss


def filled(array, *shape):
    """An array of this shape, with zeros behind what there is."""
    return np.pad(array, [(0, more - size) for size, more in zip(array.shape, shape)])


def train(mesh, stages=2, steps=3, micro_batches=2, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32, a stage on each device of a mesh, or all on the only one; returns weights and losses."""
    features = [in_features, *[hidden_size] * (stages - 1), out_features]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    weights = [rng.standard_normal(shape, dtype=np.float32) / 2 for shape in zip(features, features[1:])]

    x = filled(x, batch, hidden_size).reshape(micro_batches, -1, hidden_size)
    y = y.reshape(micro_batches, -1, out_features)
    weights = np.stack([filled(w, hidden_size, hidden_size) for w in weights])
    losses = []
    with jax.set_mesh(mesh):
        loss_of, spec = sequential, P()
        if mesh.size > 1:
            loss_of, spec = jax.shard_map(pipelined, in_specs=(P("stage"), P(), P()), out_specs=P()), P("stage")
        x, y = jax.device_put((x, y), P())
        weights = jax.device_put(weights, spec)
        momentum = jnp.zeros_like(weights)
        for _ in range(steps):
            weights, momentum, loss = update(loss_of, weights, momentum, x, y)
            losses.append(loss)
    return weights, [float(loss) for loss in losses]


def main(n=2, m=2):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)
    weights, losses = train(jax.make_mesh((n,), ("stage",)), n, micro_batches=m)
    for k, shard in enumerate(weights.addressable_shards):
        print(f"[{shard.device.id}] w{k}, filled up to {shard.data.shape[1:]}, and nothing of other stages")
    assert [shard.data.shape[0] for shard in weights.addressable_shards] == [1] * n
    _, alone = train(jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1]), n, micro_batches=m)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    print(f"[0] pipeline bubble, (n-1)/(m+n-1) with n = {n} and m = {m}: {(n - 1) / (m + n - 1):.0%} of the time")
    print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
