"""Tensor parallel module in PyTorch: a plan for parallelize_module lays an unedited model out.

    one block                            rank 0          rank 1           PyTorch
    ids                   (8, 4)         whole           whole            a plain tensor
    embedding.weight      (12, 8)        whole           whole            a plain Parameter
    blocks.0.up.weight    (32, 8)        rows 0-15       rows 16-31       ColwiseParallel: Shard(0)
    blocks.0.up.bias      (32)           rows 0-15       rows 16-31       ColwiseParallel: Shard(0)
    blocks.0.down.weight  (8, 32)        columns 0-15    columns 16-31    RowwiseParallel: Shard(1)
    blocks.0.down.bias    (8)            whole           whole            RowwiseParallel: Replicate()

The twin of recipes/your_model/tensor_parallel_module.py, with the same model, batch and plan. PyTorch draws
the weights.

Run:     torchrun --nproc_per_node 2 docs/rosetta/pytorch/tensor_parallel_module.py
On GPUs: DEVICE = "cuda", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, which
         then takes NCCL.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DEVICE = "cpu"


class Block(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """An ordinary text classifier; nothing in it refers to ranks."""

    def __init__(self, vocab_size=12, hidden_size=8, num_layers=2, num_classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList([Block(hidden_size) for _ in range(num_layers)])
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def train(mesh=None, seed=0, steps=20, batch=8, hidden_size=8):
    """Train in float32, without a mesh on a single device; returns the model and the loss of each step."""
    torch.manual_seed(seed)  # each rank draws the whole model; parallelize_module then takes rank 0's values
    model = Classifier(hidden_size=hidden_size).to(DEVICE)
    if mesh:
        model = parallelize_module(model, mesh, PLAN)
    rng = np.random.default_rng(seed)
    ids = torch.tensor(rng.integers(12, size=(batch, 4)), device=DEVICE)
    targets = torch.tensor(rng.integers(5, size=batch), device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


def main():
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model, losses = train(mesh)
    rank = mesh.get_rank()
    for name, w in model.blocks[0].named_parameters():
        local = w.to_local() if isinstance(w, DTensor) else w
        print(f"[{rank}] {name} {tuple(local.shape)} of {tuple(w.shape)}")
    for block in model.blocks:  # a layer that the plan missed has plain weights, without placements
        assert block.up.weight.placements == (Shard(0),) and block.down.weight.placements == (Shard(1),)
    _, alone = train()  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        print(
            f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps; on a single device {alone[-1]:.4f}"
        )


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
