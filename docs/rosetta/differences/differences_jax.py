"""Where OneFlow, PyTorch and JAX differ in meaning: the same questions to JAX, with explicit shardings.

Run:   python docs/rosetta/differences/differences_jax.py
The same of OneFlow and PyTorch: differences_oneflow.py, differences_pytorch.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P


def to_local_of_a_replica():
    """Each device uses a replicated weight for its own row; shard_map shows a device its own part."""

    def own_row(w, x):
        return jax.lax.psum((x * w).sum(), "ranks")

    w = jax.device_put(jnp.ones(2), P())
    x = jax.device_put(jnp.array([[1.0, 2.0], [3.0, 4.0]]), P("ranks"))  # the gradient over both rows is [4, 6]
    gradient = jax.grad(jax.shard_map(own_row, in_specs=(P(), P("ranks")), out_specs=P()))(w, x)
    print("shard_map, a row each:", f"gradient {gradient.tolist()}")
    same = jax.shard_map(lambda w, x: (x * w).sum(), in_specs=(P(), P()), out_specs=P())
    gradient = jax.grad(same)(w, jax.device_put(jnp.array([1.0, 2.0]), P()))
    print("shard_map, the same row:", f"gradient {gradient.tolist()}")


def mean_in_shard_map():
    """A device sees its own rows only: the gradient of the mean of all is 2.5."""
    x = jax.device_put(jnp.arange(1.0, 5.0), P("ranks"))
    w = jax.device_put(jnp.ones(()), P())
    for words, mean in (("a local mean", jnp.mean), ("pmean", lambda x: jax.lax.pmean(jnp.mean(x), "ranks"))):
        inside = jax.shard_map(jax.grad(lambda w, x, mean=mean: mean(w * x)), in_specs=(P(), P("ranks")), out_specs=P())
        print(f"shard_map, jax.grad inside, {words}:", f"gradient {inside(w, x)}")


def own_part_of_a_partial_sum():
    x = jax.device_put(jnp.array([[1.0, 2.0], [3.0, 4.0]]), P(None, "ranks"))
    w = jax.device_put(jnp.ones((2, 1)), P("ranks"))

    def partial_sum(w):
        return jnp.matmul(x, w, out_sharding=P(unreduced={"ranks"}))

    out = jax.jit(partial_sum)(w)
    gradient = jax.jit(jax.grad(lambda w: reshard(partial_sum(w), P()).sum()))(w)
    own = out.addressable_shards[0].data.tolist()
    print("shard of a partial sum:", f"{own} of {reshard(out, P()).tolist()}, gradient {gradient.tolist()}")
    try:
        np.asarray(out)
    except Exception as error:
        print("numpy of a partial sum:", type(error).__name__)


def implicit_conversion():
    a = jax.device_put(jnp.ones((4, 4)), P("ranks"))
    b = jax.device_put(jnp.ones((4, 4)), P(None, "ranks"))
    try:
        a + b
    except Exception as error:  # JAX 0.10 has no public name for its class
        print("rows + columns:", type(error).__name__)
    whole = jax.device_put(jnp.ones((4, 4)), P())
    print("whole @ rows:", jax.typeof(whole @ a), "and no error")


def implicit_conversion_in_auto_mode():
    mesh = jax.make_mesh((2,), ("ranks",), axis_types=(AxisType.Auto,))
    a = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("ranks")))
    b = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P(None, "ranks")))
    print("rows + columns, an Auto mesh:", (a + b).sharding.spec)


def uneven_rows():
    try:
        jax.device_put(jnp.arange(5.0), P("ranks"))
    except ValueError as error:
        print("5 rows on 2:", str(error).partition(", but ")[2].partition(" the ")[0])


def uneven_rows_in_auto_mode():
    sharding = NamedSharding(jax.make_mesh((2,), ("ranks",), axis_types=(AxisType.Auto,)), P("ranks"))
    mean = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding).mean())(jnp.arange(5.0))
    print("5 rows on 2, jit and an Auto mesh:", f"mean {mean}")


def gradient_of_a_replica():
    w = jax.device_put(jnp.ones((4, 2)), P())
    x = jax.device_put(jnp.ones((2, 4)), P("ranks"))
    gradient = jax.grad(lambda w: (x @ w).sum())(w)
    print("gradient of a replicated weight:", gradient.sharding.spec, jax.typeof(gradient))


def loss_of_the_whole_batch():
    """Each row of q needs all rows of v, as in a contrastive loss: the gradient of v is the mean of q, 2."""
    q, v = (jax.device_put(jnp.array(rows), P("ranks")) for rows in ([1.0, 3.0], [2.0, 5.0]))
    gradient = jax.jit(jax.grad(lambda v: (q * reshard(v, P()).sum()).mean()))(v)
    print("loss of the whole batch:", f"gradient {gradient.tolist()}")

    def own_rows(v, q):
        return jax.lax.pmean((q * jax.lax.all_gather(v, "ranks", tiled=True).sum()).mean(), "ranks")

    gradient = jax.grad(jax.shard_map(own_rows, in_specs=(P("ranks"), P("ranks")), out_specs=P()))(v, q)
    print("shard_map, loss of the whole batch:", f"gradient {gradient.tolist()}")


def dropout():
    def draw():
        return jax.random.bernoulli(jax.random.key(0), 0.5, (64,))

    split, whole = np.array(jax.jit(draw, out_shardings=P("ranks"))()), np.array(draw())
    print("dropout:", "the mask of one device" if (split == whole).all() else "depends on the layout")
    own = jax.shard_map(lambda key: jax.random.bernoulli(key, 0.5, (32,)), in_specs=P(), out_specs=P("ranks"))
    kept = np.array(own(jax.device_put(jax.random.key(0), P())))
    print(
        "shard_map, dropout:", "the same mask on both shards" if (kept[:32] == kept[32:]).all() else "different masks"
    )


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    with jax.set_mesh(jax.make_mesh((2,), ("ranks",))):
        to_local_of_a_replica()
        mean_in_shard_map()
        own_part_of_a_partial_sum()
        implicit_conversion()
        uneven_rows()
        gradient_of_a_replica()
        loss_of_the_whole_batch()
        dropout()
    implicit_conversion_in_auto_mode()
    uneven_rows_in_auto_mode()


if __name__ == "__main__":
    main()
