"""Train a pipeline in PyTorch: distributed.pipelining runs 1F1B, a stage on each rank.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0     rank 1     PyTorch
    x          (8, 4)                         whole      nothing    an argument of rank 0's schedule.step
    y          (8, 4)                         nothing    whole      target of the last rank's schedule.step
    w0         (4, 8)                         whole      nothing    each rank creates its own stage only
    w1         (8, 4)                         nothing    whole

The twin of recipes/pipelines/train_pipeline.py, with the same weights, batch and losses. A stage is code of one rank,
so ranks differ in what they call. Schedules are classes: Schedule1F1B keeps fewer activations than ScheduleGPipe, and
ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble wait less.

Run:     torchrun --nproc_per_node 2 docs/rosetta/pytorch/train_pipeline.py
On GPUs: DEVICE = "cuda", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, which
         then takes NCCL.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

DEVICE = "cpu"


class Stage(nn.Module):
    def __init__(self, w, last):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, device=DEVICE))
        self.last = last

    def forward(self, x):
        out = x @ self.w
        return out if self.last else torch.relu(out)


def train(mesh=None, stages=2, steps=3, micro_batches=2, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32, a stage on each rank, or without a mesh all on a single device; returns model and losses."""
    features = [in_features, *[hidden_size] * (stages - 1), out_features]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    weights = [rng.standard_normal(shape, dtype=np.float32) / 2 for shape in zip(features, features[1:])]

    x, y = torch.tensor(x, device=DEVICE), torch.tensor(y, device=DEVICE)
    if mesh:
        model = Stage(weights[mesh.get_rank()], last=mesh.get_rank() == stages - 1)
        stage = PipelineStage(model, mesh.get_rank(), stages, torch.device(DEVICE), group=mesh.get_group())
        schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)
    else:
        model = nn.Sequential(*[Stage(w, last=k == stages - 1) for k, w in enumerate(weights)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        if mesh:
            loss = pipeline_step(schedule, stage, x, y)
        else:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if mesh:
        dist.broadcast(losses, stages - 1)  # only for the report: the last stage knows them
    return model, losses.tolist()


def pipeline_step(schedule, stage, x, y):
    """Forward and backward of all micro-batches; returns the loss on the last stage, and 0 on others."""
    parts = []
    inputs = [x] if stage.is_first else []
    if stage.is_last:
        schedule.step(*inputs, target=y, losses=parts)
        return torch.stack(parts).detach().mean()
    schedule.step(*inputs)
    return torch.zeros((), device=DEVICE)


def main(micro_batches=2):
    n, m = dist.get_world_size(), micro_batches
    mesh = init_device_mesh(DEVICE, (n,), mesh_dim_names=("pipeline",))
    model, losses = train(mesh, n, micro_batches=m)
    rank = mesh.get_rank()
    print(f"[{rank}] w{rank} {tuple(model.w.shape)} of {tuple(model.w.shape)}, and nothing of other stages")
    assert len([*model.parameters()]) == 1
    _, alone = train(None, n, micro_batches=m)  # the same layers on a single device, without micro-batches
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        print(f"[0] pipeline bubble, (n-1)/(m+n-1) with n = {n} and m = {m}: {(n - 1) / (m + n - 1):.0%} of the time")
        print(f"[0] loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
