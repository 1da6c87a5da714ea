"""Runs JAX's twins of recipes, in the environment of the peers.

    python tests/rosetta_jax.py FILE

Writes to FILE: {"NAME on N": {"losses", "weights" and "averages", the optimizer's of their gradients: {name: its shard
on each device}, "hlo": the compiled step, "operands": [(shape, shape of a shard) of each operand of the step]}}.
"""

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SIZES = dict(batch=384, in_features=384, hidden_size=768, out_features=384)  # those of the SBP atlas
AXES = {"train_tensor_parallel": "tensor", "train_pipeline": "stage"}  # the others call theirs data
RUNS = [
    *((name, n) for name in ("train_data_parallel", "train_tensor_parallel", "fully_sharded") for n in (2, 4)),
    *(("train_pipeline", 2), ("train_pipeline", 4), ("train_data_tensor", 4)),
]


def twin(name):
    """The module of a twin."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "rosetta" / "jax" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mesh_of(name, n):
    devices = jax.devices()[:n]
    if name == "train_data_tensor":
        return jax.make_mesh((2, n // 2), ("data", "tensor"), devices=devices)
    return jax.make_mesh((n,), (AXES.get(name, "data"),), devices=devices)


def shards_of(weights):
    """{name: its shard on each device}; the stages of a pipeline are slices of one array."""
    if not isinstance(weights, dict):
        weights = {"w": weights}
    return {name: [np.asarray(shard.data).tolist() for shard in w.addressable_shards] for name, w in weights.items()}


def train(module, mesh, **arguments):
    """What the twin returns, and the last momentum, or Adam's first moment: a factor of all gradients is in both."""
    update, averages = module.update, []

    def watched(*operands):
        results = update(*operands)
        averages[:] = [results[1]]
        return results

    module.update = watched
    weights, losses = module.train(mesh, **arguments)
    module.update = update
    return weights, losses, averages[0]


class Compiled(Exception):
    """Ends a run when its step is compiled."""


def step_of(module, mesh, **arguments):
    """The text of the compiled step, and the shapes of its operands."""
    step, update = {}, module.update

    def compile_only(*operands):
        step["hlo"] = update.lower(*operands).compile().as_text()
        arrays = [array for array in jax.tree.leaves(operands) if isinstance(array, jax.Array)]
        step["operands"] = [(array.shape, array.sharding.shard_shape(array.shape)) for array in arrays]
        raise Compiled

    module.update = compile_only
    with contextlib.suppress(Compiled):
        module.train(mesh, **arguments)
    module.update = update
    return step


def result(name, n):
    module, mesh = twin(name), mesh_of(name, n)
    more = {"stages": n, "micro_batches": 4} if name == "train_pipeline" else {}
    weights, losses, averages = train(module, mesh, **more)
    shards = {"weights": shards_of(weights), "averages": shards_of(averages)}
    return {"losses": losses, **shards, **step_of(module, mesh, **SIZES, **more)}


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    results = {f"{name} on {n}": result(name, n) for name, n in RUNS}
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
