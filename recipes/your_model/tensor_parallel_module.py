"""Tensor parallel module: lay an unedited model out on a data x tensor mesh.

    one block, mesh 1 x 2                rank 0          rank 1           SBP
    ids                   (8, 4)         whole           whole            S(0), B
    embedding.weight      (12, 8)        whole           whole            B, B
    blocks.0.up.weight    (32, 8)        rows 0-15       rows 16-31       B, S(0)
    blocks.0.up.bias      (32)           rows 0-15       rows 16-31       B, S(0)
    blocks.0.down.weight  (8, 32)        columns 0-15    columns 16-31    B, S(1)
    blocks.0.down.bias    (8)            whole           whole            B, B

nn.Linear keeps its weight as (out, in), so column parallel is S(0). The bias of a row-parallel layer is added once,
after the sum. If only the weights are split and the layers stay nn.Linear, eager mode still gives the right values, but
partial sums flow into LayerNorm and the residual: at batch 256 and hidden_size 512 a step sends 10 times as much.

Why:   which layers go by columns and which by rows is all that differs, and names can say it; the code stays.
Moves: along the tensor axis an all-reduce of (batch, seq_len, hidden_size) for each block, forward and backward; along
       the data axis an all-reduce of each parameter's gradient.
Run:   ./launch.sh recipes/your_model/tensor_parallel_module.py [--graph] [--data 2]
Use it when training does not fit on one device or is too slow, and links are fast; each rank starts with a copy.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

import argparse
import re

import numpy as np
import oneflow as flow
from graph_safe import prepare_for_graph  # the file beside this one: copy both
from oneflow import nn

WORLD_SIZES = (2, 1, 3, 4, 8)  # numbers of ranks; launch.sh refuses others


class Block(nn.Module):
    def __init__(self, hidden_size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """An ordinary text classifier; nothing in it refers to ranks."""

    def __init__(self, vocab_size=12, hidden_size=8, num_layers=2, num_classes=5, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList([Block(hidden_size, dropout) for _ in range(num_layers)])
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Column(nn.Linear):
    """Each rank of the tensor axis has some of the outputs."""

    split = {"weight": flow.sbp.split(0), "bias": flow.sbp.split(0)}

    def forward(self, x):
        x = x.to_global(sbp=x.sbp, grad_sbp=x.sbp)  # one all-reduce of its gradient, here and nowhere else
        out = flow.matmul(x, split_weight(self), transpose_b=True)
        return out if self.bias is None else out + self.bias


class Row(nn.Linear):
    """Each rank of the tensor axis has some of the inputs and computes a partial sum."""

    split = {"weight": flow.sbp.split(1), "bias": flow.sbp.broadcast}

    def forward(self, x):
        out = flow.matmul(x, split_weight(self), transpose_b=True)
        out = out.to_global(sbp=(*out.sbp[:-1], flow.sbp.broadcast))  # the all-reduce; then the bias is added once
        return out if self.bias is None else out + self.bias


def split_weight(layer):
    """The weight of a Column or Row. RuntimeError if it is not split, as where a hook replaces it."""
    sbp = layer.weight.sbp[-1] if layer.weight.is_global else "local"
    if sbp != layer.split["weight"]:
        raise RuntimeError(
            f"the weight of a {type(layer).__name__} is {sbp}, not {layer.split['weight']}: {computed_by(layer)} has "
            "replaced what the plan has split; leave the layer out of the plan"
        )
    return layer.weight


PLAN = {r"blocks\.\d+\.up": Column, r"blocks\.\d+\.down": Row}


def lay_out(model, mesh, plan):
    """Put a model on a mesh, with rank 0's values, and split the layers whose names match the plan.

    mesh: a placement whose last axis is the tensor axis, such as [0, 1], or data x tensor, [[0, 1], [2, 3]].

    The Parameter objects stay, so an optimizer may hold them already, and frozen and tied weights stay so.
    """
    kinds = kinds_of(model, plan)
    whole = (flow.sbp.broadcast,) * np.ndim(mesh.ranks)
    for parameter in model.parameters():
        parameter.data = parameter.detach().to_global(placement=mesh, sbp=whole)
    laid_out = {}  # buffer -> its global tensor: a buffer that two modules share stays one
    for layer in model.modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                if buffer not in laid_out:
                    laid_out[buffer] = buffer.to_global(placement=mesh, sbp=whole)
                layer._buffers[name] = laid_out[buffer]
    for layer, kind in kinds.items():
        for name, parameter in layer.named_parameters(recurse=False):
            parameter.data = parameter.detach().to_global(sbp=(*whole[:-1], kind.split.get(name, whole[-1])))
        # a subclass of nn.Linear keeps its forward; its super().forward is then that of Column or Row
        original = type(layer)
        attributes = {"__module__": original.__module__}
        layer.__class__ = kind if original is nn.Linear else type(original.__name__, (original, kind), attributes)
    prepare_for_graph(model)
    return model


def kinds_of(model, plan):
    """{layer: Column or Row} by a plan. Raises ValueError before anything is changed."""
    kinds = {}
    for pattern, kind in plan.items():
        layers = {name: layer for name, layer in model.named_modules() if re.fullmatch(pattern, name)}
        if not layers:
            raise ValueError(f"no layer of the model is named {pattern}")
        for name, layer in layers.items():
            if not isinstance(layer, nn.Linear):
                way = "; vocab_parallel.py splits an embedding" if isinstance(layer, nn.Embedding) else ""
                raise ValueError(f"{name} is {type(layer).__name__}: only nn.Linear can be {kind.__name__}{way}")
            for key in kind.split:
                tensor = vars(layer).get(key, layer._parameters.get(key, "computed"))  # None: no bias
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    raise ValueError(
                        f"{name}.{key} is not a parameter: {computed_by(layer)} computes it, so no plan can split it; "
                        f"leave {name} out, or make it a parameter first, as nn.utils.remove_weight_norm does"
                    )
            if kinds.setdefault(layer, kind) is not kind:
                raise ValueError(f"{name} is {kinds[layer].__name__} and {kind.__name__} in the plan")
    return kinds


def computed_by(layer):
    """What computes a weight: forward pre-hooks, such as WeightNorm, or a property of the layer's class."""
    hooks = [getattr(hook, "__name__", type(hook).__name__) for hook in layer._forward_pre_hooks.values()]
    return f"the forward pre-hook {', '.join(hooks)}" if hooks else type(layer).__name__


class TrainingGraph(nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, ids, targets):
        loss = nn.functional.cross_entropy(self.model(ids), targets)
        loss.backward()  # in a graph this includes the all-reduces and the update
        return loss


def placements(device, n, data=1, tensor=None):
    """A data x tensor mesh of n ranks."""
    return flow.placement(device, np.arange(n).reshape(data, tensor or n // data).tolist())


def train(mesh, graph=False, seed=0, steps=20, optimizer="adam", dropout=0.0, batch=8, hidden_size=8):
    """Train in float32 on a mesh; returns the model and the loss of each step."""
    flow.manual_seed(seed)
    model = lay_out(Classifier(hidden_size=hidden_size, dropout=dropout), mesh, PLAN)
    rng = np.random.default_rng(seed)
    ids = flow.tensor(rng.integers(12, size=(batch, 4)), placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    targets = flow.tensor(rng.integers(5, size=batch), placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    if optimizer == "adam":
        optimizer = flow.optim.Adam(model.parameters(), lr=0.01)
    else:
        optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(ids, targets)
        else:
            loss = nn.functional.cross_entropy(model(ids), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", type=int, default=1, help="ranks along the data axis; the others are the tensor axis")
    parser.add_argument("--optimizer", choices=["adam", "momentum"], default="adam")
    parser.add_argument("--dropout", type=float, default=0.0, help="its masks, and so the losses, depend on the ranks")
    args = parser.parse_args()
    n = flow.env.get_world_size()
    if args.data < 1 or n % args.data:
        parser.error(f"--data {args.data}: it must divide the {n} ranks")
    if not 0 <= args.dropout <= 1:
        parser.error(f"--dropout {args.dropout:g}: from 0 to 1")

    options = {"optimizer": args.optimizer, "dropout": args.dropout}
    model, losses = train(placements(args.device, n, args.data), args.graph, **options)
    for name, w in model.blocks[0].named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, alone = train(placements(args.device, 1), args.graph, **options)  # the same code on a single device
    if not args.dropout:
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps; on a single device {alone[-1]:.4f}")


if __name__ == "__main__":
    main()
