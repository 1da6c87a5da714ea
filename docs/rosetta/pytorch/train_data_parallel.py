"""Train data parallel in PyTorch: DistributedDataParallel all-reduces the gradients in backward.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      PyTorch
    x          (8, 4)                         rows 0-3    rows 4-7    a plain tensor of 4 rows
    y          (8, 4)                         rows 0-3    rows 4-7    a plain tensor of 4 rows
    w0         (4, 8)                         whole       whole       a plain Parameter
    w1         (8, 4)                         whole       whole       a plain Parameter

The twin of recipes/training/train_data_parallel.py, with the same weights, batch and losses. DDP never sees a global
tensor: it averages the ranks' gradients, which is the gradient of the mean because all ranks have as many rows.

Run:     torchrun --nproc_per_node 2 docs/rosetta/pytorch/train_data_parallel.py
On GPUs: DEVICE = "cuda", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, which
         then takes NCCL.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

DEVICE = "cpu"


class MLP(nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = nn.Parameter(torch.tensor(w0, device=DEVICE))
        self.w1 = nn.Parameter(torch.tensor(w1, device=DEVICE))

    def forward(self, x):
        hidden = torch.relu(x @ self.w0)
        return hidden @ self.w1


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
        model = DistributedDataParallel(model, device_mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # the all-reduces, in buckets
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if mesh:  # they are those of this rank's rows
        dist.all_reduce(losses, group=mesh.get_group())
        losses /= mesh.size()
    return model, losses.tolist()


def main():
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model, losses = train(mesh)
    rank = mesh.get_rank()
    for name, w in model.module.named_parameters():
        print(f"[{rank}] {name} {tuple(w.shape)} of {tuple(w.shape)}, its sum after training {w.sum().item():.4f}")
    _, alone = train()  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
