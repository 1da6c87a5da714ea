"""Fully sharded in PyTorch: FSDP2's fully_shard splits every weight, and gathers a layer only for its turn.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      PyTorch
    x          (8, 4)                         rows 0-3    rows 4-7    a plain tensor of 4 rows
    y          (8, 4)                         rows 0-3    rows 4-7    a plain tensor of 4 rows
    w0         (4, 8)                         rows 0-1    rows 2-3    DTensor, Shard(0)
    w1         (8, 4)                         rows 0-3    rows 4-7    DTensor, Shard(0)

The twin of recipes/memory/fully_sharded.py, with the same weights, batch and losses. Between steps weights, gradients
and Adam's state are DTensors; inside a layer's forward and backward its weight is a plain, whole tensor.

Run:     torchrun --nproc_per_node 2 docs/rosetta/pytorch/fully_sharded.py
On GPUs: DEVICE = "cuda", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, which
         then takes NCCL.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

DEVICE = "cpu"


class Layer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(w, device=DEVICE))  # (in, out), as in the recipe

    def forward(self, x):
        return x @ self.weight


class MLP(nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = Layer(w0)
        self.w1 = Layer(w1)

    def forward(self, x):
        hidden = torch.relu(self.w0(x))
        return self.w1(hidden)


def train(mesh=None, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32, without a mesh on a single device; returns the model and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x, y = torch.tensor(x, device=DEVICE), torch.tensor(y, device=DEVICE)
    model = MLP(w0, w1)
    if mesh:
        x, y = x.chunk(mesh.size())[mesh.get_local_rank()], y.chunk(mesh.size())[mesh.get_local_rank()]  # its own rows
        assert len(x) == len(y) == batch // mesh.size()
        for layer in model.children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # True frees the whole weight until backward
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # the reduce-scatters, which average
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if mesh:  # they are those of this rank's rows
        dist.all_reduce(losses, group=mesh.get_group())
        losses /= mesh.size()
    return model, losses.tolist()


def main():
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("data",))
    model, losses = train(mesh)
    rank = mesh.get_rank()
    for name, layer in model.named_children():
        w = layer.weight
        assert isinstance(layer, FSDPModule) and w.placements == w.grad.placements == (Shard(0),)
        share = w.to_local().numel() / w.numel()
        shape = f"{tuple(w.to_local().shape)} of {tuple(w.shape)}"
        print(f"[{rank}] {name} {shape}: {share:.0%} of it, its gradient and Adam's state")
    _, alone = train()  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    if rank == 0:
        print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
