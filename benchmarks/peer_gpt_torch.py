"""The model of recipes/transformer/gpt.py in PyTorch: DistributedDataParallel, DTensor or FSDP2, for peer_torch.py."""

import contextlib
import os
import time

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

N, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
SPLIT = {  # Megatron's, the vocabulary too
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.qkv": ColwiseParallel(),
    "blocks.*.project": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
EPSILON = 1e-12  # of a norm: the recipe has none to speak of


def linear(weight):
    """A layer that computes x @ weight."""
    layer = nn.Linear(*weight.shape, bias=False)
    layer.weight = nn.Parameter(torch.from_numpy(weight.T.copy()))
    return layer


class Block(nn.Module):
    def __init__(self, heads, w):
        super().__init__()
        width = len(w["norm"])
        self.of_head = 3 * width // heads  # columns of qkv
        self.norm, self.norm_mlp = nn.RMSNorm(width, EPSILON), nn.RMSNorm(width, EPSILON)
        self.qkv, self.project, self.up, self.down = (linear(w[name]) for name in ("qkv", "project", "up", "down"))

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.of_head)).transpose(1, 2)  # the heads of this rank
        values = scaled_dot_product_attention(*qkv.chunk(3, -1), is_causal=True)
        x = x + self.project(values.transpose(1, 2).flatten(2))
        return x + self.down(relu(self.up(self.norm_mlp(x))).square())


class GPT(nn.Module):
    def __init__(self, heads, w):
        super().__init__()
        self.tokens = nn.Embedding.from_pretrained(torch.from_numpy(w["embedding.tokens"]), freeze=False)
        self.positions = nn.Parameter(torch.from_numpy(w["embedding.positions"]))
        layers = sum(name.endswith(".qkv") for name in w)
        self.blocks = nn.Sequential(
            *(
                Block(heads, {name.split(".")[-1]: w[name] for name in w if f"blocks.{i}." in name})
                for i in range(layers)
            )
        )
        self.norm = nn.RMSNorm(self.tokens.embedding_dim, EPSILON)
        self.head = nn.Linear(self.tokens.embedding_dim, self.tokens.num_embeddings, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions)))


def parallel(kind, model):
    mesh = init_device_mesh("cpu", (N,))
    if kind == "tensor":
        parallelize_module(model, mesh, SPLIT)
        model.head.weight = model.tokens.weight  # parallelize_module unties them
    elif kind == "sharded":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    elif N > 1:
        return nn.parallel.DistributedDataParallel(model)
    return model


def train_gpt(kind, file, heads):
    """Train from the weights on the text of a file of gpt.py's: {"losses" of this rank, "seconds" of each step but
    the first and the last}."""
    w = dict(np.load(file))
    rows = torch.from_numpy(w.pop("rows"))  # (steps, batch, length + 1)
    if kind != "tensor":
        rows = rows.chunk(N, 1)[RANK]
    model = parallel(kind, GPT(heads, w))
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) == is_one] for is_one in (True, False)]
    update = torch.optim.AdamW([{"params": group} for group in groups if group], 1e-3, weight_decay=0.01, fused=True)
    losses, begins = [], []
    for batch in rows:
        begins.append(time.perf_counter())
        with loss_parallel() if kind == "tensor" else contextlib.nullcontext():
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            losses.append(loss.item())
            loss.backward()
        update.step()
        update.zero_grad()
    return {"losses": losses, "seconds": np.diff(begins[1:]).tolist()}
