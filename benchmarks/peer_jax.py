"""JAX in a single process, with a host device for each rank; reads orders from standard input, like peer_torch.py."""

import json
import os
import sys
import time
from pathlib import Path

import jax
from peer_gpt_jax import train_gpt

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "harness")]
from oneflow_cookbook.start import recipe  # noqa: E402

N = int(os.environ["WORLD_SIZE"])


def train_twin(file, axes, **arguments):
    """Train a twin of docs/rosetta/jax: {"losses", "seconds" of each step but the first}."""
    twin = recipe.load(file)
    update, ends = twin.update, []

    def timed(*operands):
        results = jax.block_until_ready(update(*operands))  # jit returns before the step is computed
        ends.append(time.perf_counter())
        return results

    twin.update = timed
    _, losses = twin.train(jax.make_mesh((N,) if len(axes) == 1 else (2, N // 2), axes), **arguments)
    return {"losses": losses, "seconds": [end - begin for begin, end in zip(ends, ends[1:])]}


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", N)
    functions = {function.__name__: function for function in (train_twin, train_gpt)}
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(functions[order.pop("function")](**order)), flush=True)


if __name__ == "__main__":
    main()
