"""Where OneFlow, PyTorch and JAX differ in meaning: the same questions to PyTorch's DTensor, DDP and checkpoints.

Run:   torchrun --nproc_per_node 2 docs/rosetta/differences/differences_pytorch.py
The same of OneFlow and JAX: differences_oneflow.py, differences_jax.py.
"""

import pathlib
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def say(*words):
    if dist.get_rank() == 0:
        print("[0]", *words, flush=True)


def to_local_of_a_replica(mesh):
    """Each rank uses a replicated weight for its own row: the gradients must be added up."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # the gradient of the sum over both rows is [4, 6]
    for gradients in (None, [Partial()]):
        w = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
        (x[dist.get_rank()] * w.to_local(grad_placements=gradients)).sum().backward()
        gradient = w.grad.redistribute(placements=[Replicate()]).to_local()
        say("to_local, a row each:", f"grad_placements={gradients}, gradient {gradient.tolist()}")
    w = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
    (x[0] * w.to_local()).sum().backward()
    say("to_local, the same row:", f"gradient {w.grad.to_local().tolist()}")


def to_local_of_a_partial_sum(mesh):
    x = distribute_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mesh, [Shard(1)])
    w = distribute_tensor(torch.ones(2, 1), mesh, [Shard(0)]).requires_grad_()
    out = x @ w  # Partial
    out.to_local().sum().backward()
    local, whole, gradient = out.to_local().tolist(), out.full_tensor().tolist(), w.grad.full_tensor().tolist()
    say("to_local of a partial sum:", f"{local} of {whole}, gradient {gradient}")


def implicit_conversion(mesh):
    a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    say("rows + columns:", (a + b).placements[0])
    try:
        with ExplicitRedistributionContext():
            a + b
    except RuntimeError as error:
        say("rows + columns, explicit:", str(error)[:32])
    try:
        a + torch.ones(4, 4)
    except RuntimeError as error:
        say("rows + a plain tensor:", str(error)[:50])
    say("rows + a plain tensor of one number:", (a + torch.tensor(1.0)).placements[0])


def uneven_rows(mesh):
    rank, x = dist.get_rank(), torch.arange(5.0)
    spread = distribute_tensor(x, mesh, [Shard(0)])
    local, mean = spread.to_local(), spread.mean()
    say("5 rows on 2:", f"{local.numel()} on rank 0, mean {mean.full_tensor().item()}, {mean.placements[0]}")
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), device_mesh=mesh)
    model(x.chunk(2)[rank][:, None]).mean().backward()
    say("5 rows on 2, DDP:", f"gradient {model.module.weight.grad.item()}")
    model = fully_shard(nn.Linear(1, 1, bias=False), mesh=mesh)
    model(x.chunk(2)[rank][:, None]).mean().backward()
    gradient = model.weight.grad.full_tensor()  # collective
    say("5 rows on 2, fully_shard:", f"gradient {gradient.item()}")
    own = DTensor.from_local(x.chunk(2)[rank], mesh, [Shard(0)])
    say("3 and 2 rows, from_local:", f"{len(own)} rows, says rank 0")


def gradient_of_a_replica(mesh):
    w = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]).requires_grad_()
    x = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])
    (x @ w).sum().backward()
    say("gradient of a replicated weight:", w.grad.placements[0])
    for optimizer in (torch.optim.SGD([w], lr=0.1), torch.optim.Adam([w], lr=0.1)):
        with CommDebugMode() as sent:
            optimizer.step()
        say("gradient of a replicated weight:", f"a step of {type(optimizer).__name__} sends {sent.get_total_counts()}")


def a_layer_outside_the_plan():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})
    model(torch.ones(1, 4)).sum().backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        say("clip_grad_norm_, a layer outside the plan:", str(error)[:60])
    model = DistributedDataParallel(model, device_mesh=mesh["data"])
    before = len(model.state_dict())
    model(torch.ones(1, 4))
    say("DDP of this model:", f"state_dict has {before} tensors, after a forward {len(model.state_dict())}")


def loss_of_the_whole_batch(mesh):
    """Each row of q needs all rows of v, as in a contrastive loss: the gradient of v is the mean of q, 2."""
    rank, q = dist.get_rank(), torch.tensor([[1.0], [3.0]])
    v = torch.tensor([[2.0], [5.0]])[rank].requires_grad_()
    gathered = [torch.empty(1) for _ in range(2)]
    dist.all_gather(gathered, v)
    say("loss of the whole batch:", f"dist.all_gather, requires_grad {torch.stack(gathered).requires_grad}")
    whole = DTensor.from_local(v, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    (q[rank] * whole.to_local(grad_placements=[Partial()]).sum()).mean().backward()  # of its own row
    say("loss of the whole batch:", f"DTensor, gradient {(v.grad / 2).tolist()} of rank 0's row, averaged as in DDP")


def parameter_without_dimensions(mesh):
    """Such as a learnable temperature."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

    for wrap in (fully_shard, replicate):
        try:
            wrap(Scale(), mesh=mesh)
        except ValueError as error:
            say(f"{wrap.__name__}, a parameter without dimensions:", error)
    DistributedDataParallel(Scale())
    say("DDP, a parameter without dimensions:", "accepted")


def dropout(mesh):
    torch.manual_seed(0)
    kept = nn.functional.dropout(distribute_tensor(torch.ones(64), mesh, [Shard(0)])).full_tensor() > 0
    say("dropout:", "the same mask on both shards" if torch.equal(kept[:32], kept[32:]) else "different masks")
    torch.manual_seed(dist.get_rank())
    kept = nn.functional.dropout(distribute_tensor(torch.ones(64), mesh, [Replicate()])).to_local() > 0
    masks = [torch.empty_like(kept) for _ in range(2)]
    dist.all_gather(masks, kept)
    say("dropout of Replicate(), seeds by rank:", "the same mask" if torch.equal(*masks) else "different masks")


def checkpoint(mesh):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    [folder] = folder
    rows = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)])
    dcp.save({"w": rows}, checkpoint_id=folder)
    columns = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])
    dcp.load({"w": columns}, checkpoint_id=folder)  # in place
    files = len(list(pathlib.Path(folder).glob("*.distcp")))
    right = torch.equal(columns.to_local(), torch.arange(16.0).reshape(4, 4).chunk(2, 1)[dist.get_rank()])
    say("checkpoint:", f"{files} files with a shard each, loaded as {tuple(columns.to_local().shape)}, equal: {right}")
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


def main():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    to_local_of_a_replica(mesh)
    to_local_of_a_partial_sum(mesh)
    implicit_conversion(mesh)
    uneven_rows(mesh)
    gradient_of_a_replica(mesh)
    a_layer_outside_the_plan()
    loss_of_the_whole_batch(mesh)
    parameter_without_dimensions(mesh)
    dropout(mesh)
    checkpoint(mesh)


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
