"""Train data x tensor parallel in PyTorch: parallelize_module on one mesh axis, replicate on the other.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0         rank 1         rank 2         rank 3
    x          (8, 4)                         rows 0-3       rows 0-3       rows 4-7       rows 4-7
    y          (8, 4)                         rows 0-3       rows 0-3       rows 4-7       rows 4-7
    w0         (4, 8)                         columns 0-3    columns 4-7    columns 0-3    columns 4-7
    w1         (8, 4)                         rows 0-3       rows 4-7       rows 0-3       rows 4-7

The twin of recipes/training/train_data_tensor.py, with the same weights, batch and losses. Each axis has its own API:
in a step DTensor knows the axis "tensor" only. replicate is not yet public in PyTorch 2.13. The public fully_shard in
its place, as torchtitan has it, also shards the weights over "data". nn.Linear keeps (out, in).

Run:     torchrun --nproc_per_node 4 docs/rosetta/pytorch/train_data_tensor.py
On GPUs: DEVICE = "cuda", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, which
         then takes NCCL.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
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
        return self.w1(hidden).clone()  # RowwiseParallel returns a view, and replicate warns of views


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
        data = mesh["data"]
        x, y = x.chunk(data.size())[data.get_local_rank()], y.chunk(data.size())[data.get_local_rank()]  # its own rows
        assert len(x) == len(y) == batch // data.size()
        model = parallelize_module(model, mesh["tensor"], {"w0": ColwiseParallel(), "w1": RowwiseParallel()})
        model = replicate(model, mesh=data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # the all-reduces along data, which average
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if mesh:  # they are those of this rank's rows
        dist.all_reduce(losses, group=data.get_group())
        losses /= data.size()
    return model, losses.tolist()


def main():
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model, losses = train(mesh)
    rank = mesh.get_rank()
    for name, layer in model.named_children():
        w = layer.weight.T
        local = w.to_local()
        print(
            f"[{rank}] {name} {tuple(local.shape)} of {tuple(w.shape)}, its sum after training {local.sum().item():.4f}"
        )
    assert [w.placements for w in model.parameters()] == [(Replicate(), Shard(0)), (Replicate(), Shard(1))]
    _, alone = train()  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
