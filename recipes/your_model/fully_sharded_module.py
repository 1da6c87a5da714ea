"""Fully sharded module: each layer of an unedited model keeps only shards, and gathers its weights for forward.

    the model                            rank 0       rank 1        SBP
    ids                   (8, 4)         rows 0-3     rows 4-7      S(0)
    embedding.weight      (12, 8)        rows 0-5     rows 6-11     S(0)
    blocks.0.up.weight    (32, 8)        rows 0-15    rows 16-31    S(0)
    blocks.0.down.bias    (8)            rows 0-3     rows 4-7      S(0)

Between steps weights, biases, gradients and Adam's state take 1/n of their bytes; parameters with fewer rows than ranks
stay whole. model.to_global(sbp=S(0)) alone is not this: it splits activations by columns, and aborts in a graph.
The model need not fit on one rank: each block is created, sharded and freed before the next one is created. But what
backward needs of the gathered weights stays until backward: at the peak of a step a rank holds all of them. In eager
mode, `shard(model, ranks, reshard_after_forward=True)` drops them after the forward of their layer, and gathers them
again in backward: then a rank holds the gathered weights of one layer at a time, and sends half as much again.

Why:   a weight is needed whole only while its layer runs; at all other times 1/n of it is enough.
Moves: an all-gather of each parameter, a reduce-scatter of its gradient: each (n-1)/n x their bytes from each rank.
Run:   ./launch.sh recipes/your_model/fully_sharded_module.py [--graph] [--reshard-after-forward]
Use it when your model's weights, gradients and optimizer state do not fit on one device.
Source: Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277.
"""

import argparse

import numpy as np
import oneflow as flow
from graph_safe import prepare_for_graph  # the file beside this one: copy both
from oneflow import nn

# flow._C and flow._oneflow_internal are private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (2, 1, *range(3, 9))  # numbers of ranks; launch.sh refuses others


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


def shard(module, ranks, reshard_after_forward=False):
    """Split each parameter of a module by rows, with rank 0's values, and gather it for the forward of its layer.

    The Parameter objects stay, so an optimizer may hold them already, and frozen and tied weights stay so.
    reshard_after_forward: gather again in backward, as PyTorch's fully_shard does by default; for eager mode alone.
    """
    rows, whole = flow.sbp.split(0), flow.sbp.broadcast
    for name, layer in module.named_modules():
        if layer._parameters:
            refuse_computed_weights(layer, f"{name}." if name else "")
    for parameter in module.parameters():
        sharded = parameter.is_global and (parameter.placement, parameter.sbp) == (ranks, (rows,))
        if not sharded:  # a block of it may have been sharded before
            has_enough_rows = parameter.ndim > 0 and parameter.shape[0] >= ranks.ranks.size
            replicated = parameter.detach().to_global(placement=ranks, sbp=whole)
            parameter.data = replicated.to_global(sbp=rows if has_enough_rows else whole)
    laid_out = {}  # buffer -> its global tensor: a buffer that two modules share stays one
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None and (not buffer.is_global or buffer.placement != ranks):
                if buffer not in laid_out:
                    laid_out[buffer] = buffer.to_global(placement=ranks, sbp=whole)
                layer._buffers[name] = laid_out[buffer]
        if layer._parameters and not getattr(type(layer), "_gathers_parameters", False):
            gather_in_forward(layer, reshard_after_forward)
    prepare_for_graph(module)
    return module


def gather_in_forward(layer, reshard_after_forward):
    """Make the forward of a layer read whole parameters; their gradients become shards."""
    kind = type(layer)
    if getattr(layer, "max_norm", None) is not None:
        raise ValueError(f"{kind.__name__}.forward changes weight in place, as it has max_norm; shards lose that")
    kept = {}  # what forward itself has put in self

    def forward(self, *args, **kwargs):
        refuse_computed_weights(self, f"{kind.__name__}.", kept)  # a hook may compute them only now
        shards = self._parameters
        self._parameters = {name: w if w is None else gathered(w) for name, w in shards.items()}
        try:
            if not reshard_after_forward:
                return kind.forward(self, *args, **kwargs)
            with saved_as_shards(self._parameters, shards):
                return kind.forward(self, *args, **kwargs)
        finally:
            self._parameters = shards
            kept.update(vars(self))

    attributes = {"forward": forward, "__module__": kind.__module__, "_gathers_parameters": True}
    layer.__class__ = type(kind.__name__, (kind,), attributes)


def refuse_computed_weights(layer, prefix, kept=()):
    """Raises ValueError if a forward pre-hook computes a weight, as weight_norm does: it would read shards."""
    hooks = [getattr(hook, "__name__", type(hook).__name__) for hook in layer._forward_pre_hooks.values()]
    for name, value in vars(layer).items() if hooks else ():
        if isinstance(value, flow.Tensor) and not (name in kept and kept[name] is value):
            raise ValueError(
                f"{prefix}{name} is not a parameter: the forward pre-hook {', '.join(hooks)} computes it, from "
                "shards; compute it in forward, or make it a parameter first, as nn.utils.remove_weight_norm does"
            )


def gathered(parameter):
    # without identity, OneFlow's autograd.grad fails for a Parameter
    return flow._C.identity(parameter).to_global(sbp=flow.sbp.broadcast, grad_sbp=parameter.sbp)


def saved_as_shards(whole, shards):
    """A context in which autograd keeps a shard in place of a whole parameter, and gathers it again in backward."""
    if flow._oneflow_internal.lazy_mode.is_enabled():
        raise RuntimeError("reshard_after_forward is for eager mode: nn.Graph keeps gathered weights until backward")
    shard_of = {whole[name].global_id(): w for name, w in shards.items() if w is not None}

    def pack(tensor):
        shard = shard_of.get(tensor.global_id()) if tensor.is_global else None
        return (tensor, None) if shard is None else (None, shard)

    def unpack(packed):
        tensor, shard = packed
        return tensor if shard is None else gathered(shard)

    return flow.autograd.graph.saved_tensors_hooks(pack, unpack)


def make_model(ranks, hidden_size, num_layers, reshard_after_forward=False):
    """The sharded model. No rank ever holds more than one full block."""
    model = shard(Classifier(hidden_size=hidden_size, num_layers=0), ranks, reshard_after_forward)
    for _ in range(num_layers):
        model.blocks.append(shard(Block(hidden_size, dropout=0.0), ranks, reshard_after_forward))
    return model


class TrainingGraph(nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, ids, targets):
        loss = nn.functional.cross_entropy(self.model(ids), targets)
        loss.backward()  # in a graph this includes the reduce-scatters and the update
        return loss


def train(
    ranks,
    graph=False,
    seed=0,
    steps=20,
    optimizer="adam",
    reshard_after_forward=False,
    batch=8,
    hidden_size=8,
    num_layers=2,
):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    flow.manual_seed(seed)
    model = make_model(ranks, hidden_size, num_layers, reshard_after_forward)
    rng = np.random.default_rng(seed)
    ids = flow.tensor(rng.integers(12, size=(batch, 4)), placement=ranks, sbp=flow.sbp.split(0))
    targets = flow.tensor(rng.integers(5, size=batch), placement=ranks, sbp=flow.sbp.split(0))
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
            optimizer.zero_grad(set_to_none=True)  # first, to free the old gradients before the weights are gathered
            loss = nn.functional.cross_entropy(model(ids), targets)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--optimizer", choices=["adam", "momentum"], default="adam")
    parser.add_argument("--reshard-after-forward", action="store_true", help="gather weights again in backward")
    args = parser.parse_args()
    if args.graph and args.reshard_after_forward:
        parser.error("--reshard-after-forward is for eager mode: nn.Graph keeps gathered weights until backward")

    options = {"optimizer": args.optimizer, "reshard_after_forward": args.reshard_after_forward}
    model, losses = train(flow.placement.all(args.device), args.graph, **options)
    held = sum(w.to_local().numel() for w in model.parameters())
    print(f"{held:,} of {sum(w.numel() for w in model.parameters()):,} numbers of the parameters")
    _, alone = train(flow.placement(args.device, [0]), args.graph, **options)  # on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
