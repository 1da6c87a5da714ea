"""Runs PyTorch's twins of recipes on this rank, in the environment of the peers; peer_programs.py starts it.

    torchrun ... tests/rosetta_torch.py FOLDER NAME ...

Writes FOLDER/RANK.json: {name: {"losses", "weights" and "gradients" of the last step: {name: this rank's shard},
"rows": of the output in each call of the loss, "sent": bytes of a step}}. Of tensor_parallel_module "initial", the
weights before training, and "gradients" of the first step, whole, instead.
"""

import contextlib
import importlib.util
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "harness")]
from oneflow_cookbook.measure.sent import QUIET, connections, growth  # noqa: E402

SIZES = dict(batch=384, in_features=384, hidden_size=768, out_features=384)  # those of the SBP atlas


def twin(name):
    """The module of a twin."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "rosetta" / "pytorch" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mesh_of(name):
    n = dist.get_world_size()
    if name == "train_data_tensor":
        return init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("data", "tensor"))
    return init_device_mesh("cpu", (n,), mesh_dim_names=("ranks",))


def gradient_of(w):
    """The gradient in the layout of the weight: that of a replicated DTensor may still be a partial sum."""
    return w.grad.redistribute(placements=w.placements) if isinstance(w, DTensor) else w.grad


def shards_of(model, tensor_of):
    """{name: this rank's shard of `tensor_of(weight)`} of an MLP as (in, out)."""
    transposed = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    shards = {}
    for name, w in model.named_parameters():
        local = tensor_of(w)
        local = local.to_local() if isinstance(local, DTensor) else local
        shards[name] = (local.T if id(w) in transposed else local).tolist()
    return shards


def gradients_of(model):
    """{name: whole gradient}. Collective."""
    gradients = {name: gradient_of(w) for name, w in model.named_parameters()}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).tolist() for name, g in gradients.items()}


def quiet():
    """Wait until every rank has sent everything; returns `connections()`. Collective."""
    dist.barrier()
    counts, times = connections(), 1
    while times < QUIET:
        time.sleep(0.005)
        before, counts = counts, connections()
        times = times + 1 if counts == before else 1
    dist.barrier()
    return counts


def sent(train, mesh, **arguments):
    """The bytes that this rank sends in a step: a run of 3 steps sends those of 2 more than a run of 1."""
    runs = []
    for steps in (1, 3):
        before = quiet()
        train(mesh, steps=steps, **arguments)
        runs.append(growth(before, quiet()))
    return (runs[1] - runs[0]) / 2


@contextlib.contextmanager
def rows_seen():
    """The rows of this rank's output in each call of mse_loss."""
    rows, mse_loss = [], functional.mse_loss

    def watched(out, y):
        rows.append(len(out))
        return mse_loss(out, y)

    functional.mse_loss = watched
    yield rows
    functional.mse_loss = mse_loss


def result(name):
    train, mesh = twin(name).train, mesh_of(name)
    of_module = name == "tensor_parallel_module"
    more = {"stages": dist.get_world_size(), "micro_batches": 4} if name == "train_pipeline" else {}
    with rows_seen() as rows:
        model, losses = train(mesh, **more)
    sizes = dict(batch=256, hidden_size=512) if of_module else SIZES
    results = {"losses": losses, "sent": sent(train, mesh, **sizes, **more)}
    if of_module:
        untrained, _ = train(steps=0)
        once, _ = train(mesh, steps=1)
        initial = {key: w.tolist() for key, w in untrained.named_parameters()}
        return {**results, "initial": initial, "gradients": gradients_of(once)}
    shards = {"weights": shards_of(model, torch.Tensor.detach), "gradients": shards_of(model, gradient_of)}
    return {**results, **shards, "rows": rows}


def main():
    dist.init_process_group("gloo")
    folder, *names = sys.argv[1:]
    results = {name: result(name) for name in names}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
