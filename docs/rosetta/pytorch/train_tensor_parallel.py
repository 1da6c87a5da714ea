"""Train tensor parallel in PyTorch: parallelize_module splits columns, then rows; one all-reduce each way.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0         rank 1         PyTorch
    x          (8, 4)                         whole          whole          a plain tensor
    y          (8, 4)                         whole          whole          a plain tensor
    w0         (4, 8)                         columns 0-3    columns 4-7    w0.weight = w0.T: Shard(0), ColwiseParallel
    w1         (8, 4)                         rows 0-3       rows 4-7       w1.weight = w1.T: Shard(1), RowwiseParallel

The twin of recipes/training/train_tensor_parallel.py, with the same weights, batch and losses. Only inside the two
layers are the tensors DTensors: what enters the first and leaves the second is plain. nn.Linear keeps (out, in).

Run:     torchrun --nproc_per_node 2 docs/rosetta/pytorch/train_tensor_parallel.py
On GPUs: DEVICE = "cuda", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, which
         then takes NCCL.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DEVICE = "cpu"


class MLP(nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = nn.Linear(*w0.shape, bias=False, device=DEVICE)
        self.w1 = nn.Linear(*w1.shape, bias=False, device=DEVICE)
        self.w0.weight.data.copy_(torch.tensor(w0.T))
        self.w1.weight.data.copy_(torch.tensor(w1.T))

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
        model = parallelize_module(model, mesh, {"w0": ColwiseParallel(), "w1": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


def main():
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model, losses = train(mesh)
    rank = mesh.get_rank()
    for name, layer in model.named_children():
        w = layer.weight.T
        print(f"[{rank}] {name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    assert [w.placements for w in model.parameters()] == [(Shard(0),), (Shard(1),)]
    _, alone = train()  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
