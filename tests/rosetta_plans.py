"""Trains a small language model under each plan of "Your own model" in docs/rosetta.md, and on a single device.

    torchrun --nproc_per_node 4 tests/rosetta_plans.py FILE

Writes to FILE: {plan: {"losses": of each step, "gradients": {weight: that of the last step, whole}, "shapes": {weight:
of rank 0's shard}}}; plan "" is a single device. "twin ..." are plans of the twin's model, without "shapes".

SGD without momentum trains: Adam would hide a gradient that is n times too large.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "harness")]
from tests.rosetta_torch import gradients_of, twin  # noqa: E402

VOCAB_SIZE, SEQ_LEN, HEAD_SIZE = 12, 8, 4
COLUMNS, ROWS = ("query", "key", "value", "up"), ("output", "down")


class Block(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.query, self.key, self.value, self.output = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        normed = self.norm(x)
        parts = [layer(normed) for layer in (self.query, self.key, self.value)]
        q, k, v = (part.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for part in parts)  # the heads of this rank
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(out.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))


class Model(nn.Module):
    def __init__(self, hidden_size=16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, hidden_size)
        self.blocks = nn.Sequential(Block(hidden_size), Block(hidden_size))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, VOCAB_SIZE)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embedding(ids))))


def plan_of_blocks(column=None, row=None):
    columns = {f"blocks.*.{name}": column or ColwiseParallel() for name in COLUMNS}
    return {**columns, **{f"blocks.*.{name}": row or RowwiseParallel() for name in ROWS}}


def tensor_parallel(model, mesh):
    parallelize_module(model, mesh["tensor"], plan_of_blocks())


def data_tensor(model, mesh):
    tensor_parallel(model, mesh)
    replicate(model, mesh=mesh["data"])


def sharded_data_tensor(model, mesh):
    tensor_parallel(model, mesh)
    fully_shard(model, mesh=mesh["data"])


def vocabulary(model, mesh):
    plan = plan_of_blocks()
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tensor"], plan)


def sequence_parallel(model, mesh):
    column = ColwiseParallel(input_layouts=Shard(1))
    plan = plan_of_blocks(column, RowwiseParallel(output_layouts=Shard(1)))
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for name in ("blocks.*.norm", "blocks.*.norm_mlp", "norm"):
        plan[name] = SequenceParallel()
    parallelize_module(model, mesh["tensor"], plan)


def fully_sharded(model, mesh):
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["data"])


PLANS = {"tensor": tensor_parallel, "vocabulary": vocabulary, "sequence": sequence_parallel}
SPLIT_BATCH = {
    "data x tensor": data_tensor,
    "data x tensor, sharded": sharded_data_tensor,
    "fully sharded": fully_sharded,
}
PLANS.update(SPLIT_BATCH)


def train(plan, mesh=None, steps=4, batch=4):
    """{"losses", "gradients" of the last step, "shapes" of this rank's shards of some weights}."""
    torch.manual_seed(0)  # each rank draws the whole model
    model = Model()
    ids = torch.randint(VOCAB_SIZE, (batch, SEQ_LEN + 1))
    splits_batch = plan in SPLIT_BATCH
    if plan:
        PLANS[plan](model, mesh)
        if splits_batch:
            ids = ids.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        with loss_parallel() if plan == "vocabulary" else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        loss = loss.detach()
        if splits_batch:
            dist.all_reduce(loss, group=mesh["data"].get_group())
            loss /= mesh["data"].size()
        losses.append(loss.item())
    shapes = {}
    for name in ("embedding", "blocks.0.up", "blocks.0.down"):
        weight = model.get_submodule(name).weight
        shapes[name] = list((weight.to_local() if isinstance(weight, DTensor) else weight).shape)
    return {"losses": losses, "gradients": gradients_of(model), "shapes": shapes}


def plans_of_the_twin():
    """{name: a plan of the page for the model of its twin}."""
    sequence = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.1": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    }
    return {"twin alone": None, "twin": twin("tensor_parallel_module").PLAN, "twin sequence": sequence}


def train_the_twin(plan, mesh, steps=4):
    """The same of the twin, trained by SGD in place of its Adam."""
    module, adam = twin("tensor_parallel_module"), torch.optim.Adam
    module.PLAN, torch.optim.Adam = plan, lambda parameters, lr: torch.optim.SGD(parameters, lr=0.1)
    model, losses = module.train(mesh if plan else None, steps=steps)
    torch.optim.Adam = adam
    return {"losses": losses, "gradients": gradients_of(model)}


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    results = {plan: train(plan, mesh) for plan in ("", *PLANS)}
    results.update({name: train_the_twin(plan, mesh["tensor"]) for name, plan in plans_of_the_twin().items()})
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
