"""One matmul in three layouts, in JAX with explicit shardings: the program of README.md.

    out = x @ w       x                 w                 out
    data parallel     P("ranks")        P()               P("ranks")
    columns           P()               P(None, "ranks")  P(None, "ranks")
    rows              P(None, "ranks")  P("ranks")        P(unreduced={"ranks"}), which reshard makes P()

Moves:   nothing, but for rows one all-reduce of out.
Run:     python docs/rosetta/jax/matmul_layouts.py
On GPUs: delete the two lines of jax.config, and set JAX_DEFAULT_MATMUL_PRECISION=highest, as the default is TF32. On
         several hosts call jax.distributed.initialize() first.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

LAYOUTS = {
    "data": (P("ranks"), P(), P("ranks")),
    "columns": (P(), P(None, "ranks"), P(None, "ranks")),
    "rows": (P(None, "ranks"), P("ranks"), P(unreduced={"ranks"})),
}


def run(mesh, layout, x, w):
    """x @ w in one of the layouts; returns an array that is spread over the mesh."""
    x_spec, w_spec, out_spec = LAYOUTS[layout]
    with jax.set_mesh(mesh):
        x = jax.device_put(x, x_spec)
        w = jax.device_put(w, w_spec)
        return jax.jit(lambda x, w: jnp.matmul(x, w, out_sharding=out_spec))(x, w)


def show(words, out):
    for shard in out.addressable_shards:
        print(f"[{shard.device.id}] {words} {shard.data.tolist()}")


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.make_mesh((2,), ("ranks",))
    x = jnp.array([[1.0, 2.0], [3.0, 1.0]])
    w = jnp.array([[2.0, 0.0, 1.0, 0.0], [1.0, 3.0, 2.0, 0.0]])  # JAX cannot split 3 columns over 2 devices: 4
    for layout in LAYOUTS:
        out = run(mesh, layout, x, w)
        show(jax.typeof(out), out)
    with jax.set_mesh(mesh):
        show("all-reduce", reshard(out, P()))
        np.testing.assert_allclose(reshard(out, P()), x @ w)


if __name__ == "__main__":
    main()
