"""A rank of PyTorch: reads orders from standard input, a line of JSON each, and answers with times.

Started by peers.py. Needs the environment of requirements-peers.txt; imports nothing of ours.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from peer_gpt_torch import trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

N, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Layers(nn.Module):
    """x @ w0, relu, @ w1, as in the recipes."""

    def __init__(self, in_features, hidden_size, out_features):
        super().__init__()
        self.first = nn.Linear(in_features, hidden_size, bias=False)
        self.second = nn.Linear(hidden_size, out_features, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain(model, x, y, sum_up=lambda: None, optimizer=momentum):
    """A function that runs a step and waits for it, as PyTorch does on a CPU."""
    update = optimizer(model)

    def step():
        update.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        sum_up()
        update.step()

    return step


def data(batch, in_features, hidden_size, out_features):
    """DistributedDataParallel; batch: that of all ranks together, as everywhere here."""
    model = nn.parallel.DistributedDataParallel(Layers(in_features, hidden_size, out_features))
    return plain(model, torch.randn(batch // N, in_features), torch.randn(batch // N, out_features))


def sharded(batch, in_features, hidden_size, out_features):
    """Fully sharded data parallel, of each layer: FSDP2."""
    model, mesh = Layers(in_features, hidden_size, out_features), init_device_mesh("cpu", (N,))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    x, y = torch.randn(batch // N, in_features), torch.randn(batch // N, out_features)
    return plain(model, x, y, optimizer=lambda module: torch.optim.Adam(module.parameters(), lr=0.1))


SPLIT = {"first": ColwiseParallel(), "second": RowwiseParallel()}


def tensor(batch, in_features, hidden_size, out_features):
    """DTensor: column-row."""
    model = parallelize_module(Layers(in_features, hidden_size, out_features), init_device_mesh("cpu", (N,)), SPLIT)
    torch.manual_seed(0)
    return plain(model, torch.randn(batch, in_features), torch.randn(batch, out_features))


def hybrid(batch, in_features, hidden_size, out_features):
    """The same on each half of the ranks, each with half of the batch; gradients are averaged by hand."""
    mesh = init_device_mesh("cpu", (2, N // 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(Layers(in_features, hidden_size, out_features), mesh["tensor"], SPLIT)
    group = mesh.get_group("data")

    def average():
        for weight in model.parameters():
            dist.all_reduce(weight.grad.to_local(), group=group)
            weight.grad.to_local().div_(2)

    torch.manual_seed(mesh.get_local_rank("data"))
    return plain(model, torch.randn(batch // 2, in_features), torch.randn(batch // 2, out_features), average)


def pipeline(batch, in_features, hidden_size, out_features, micro_batches, schedule):
    """torch.distributed.pipelining, with the schedule of this name: a layer for each rank."""
    widths = [in_features, *[hidden_size] * (N - 1), out_features]
    layer = nn.Linear(widths[RANK], widths[RANK + 1], bias=False)
    module = layer if RANK == N - 1 else nn.Sequential(layer, nn.ReLU())
    stage = PipelineStage(module, RANK, N, torch.device("cpu"))
    kind = {"ScheduleGPipe": ScheduleGPipe, "Schedule1F1B": Schedule1F1B}[schedule]
    schedule = kind(stage, micro_batches, loss_fn=nn.functional.mse_loss)
    x, y, update = torch.randn(batch, in_features), torch.randn(batch, out_features), momentum(module)

    def step():
        update.zero_grad()
        schedule.step(*([x] if RANK == 0 else []), **({"target": y} if RANK == N - 1 else {}))
        update.step()

    return step


def collective(name, elements):
    """A function that runs a collective of gloo on a float32 tensor; elements: of the whole tensor."""
    whole, part = torch.ones(elements), torch.ones(elements // N)
    exchanged = torch.empty_like(part)
    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-to-all": lambda: dist.all_to_all_single(exchanged, part),
    }[name]


def main():
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    kinds = {kind.__name__: kind for kind in (data, tensor, hybrid, pipeline, sharded, collective)}
    steps = {}
    for line in sys.stdin:
        options = json.loads(line)
        if "file" in options:
            print(json.dumps(trained(**options)), flush=True)
            continue
        count, kind = options.pop("steps"), options.pop("kind")
        if line not in steps:
            steps[line] = kinds[kind](**options)
        ends = []
        for _ in range(count):
            steps[line]()
            ends.append(time.perf_counter())
        print(json.dumps([end - begin for begin, end in zip(ends, ends[1:])]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
