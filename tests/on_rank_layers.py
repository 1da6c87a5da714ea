"""A step of a ready-made layer of oneflow.nn on the ranks of a pool, for test_layers.py: SBPs, bytes sent, values."""

import numpy as np
import oneflow as flow
from oneflow import nn

from oneflow_cookbook.measure.sbp import label, sbp_of, split_dim
from oneflow_cookbook.measure.sent import sent_by
from oneflow_cookbook.start import recipe

B = flow.sbp.broadcast
MAX_NORM = 16.0


class Step(nn.Module):
    """A layer and its input. A float input is a parameter as well, so that a graph has its gradient, too."""

    def __init__(self, layer, x, partial=False):
        super().__init__()
        self.layer, self.partial = layer, partial
        self.x = nn.Parameter(x) if x.is_floating_point() else x

    def forward(self, *more):
        x = flow._C.identity(self.x) if self.x.is_floating_point() else self.x
        if self.partial:
            x = x.to_global(sbp=flow.sbp.partial_sum)
        out = self.layer(x, *([more] if len(more) == 2 else more))  # an LSTM takes h0 and c0 as a tuple
        return out[0] if isinstance(out, tuple) else out


class StepGraph(nn.Graph):
    """SGD at lr=1 takes from each parameter its gradient."""

    def __init__(self, step, clip):
        super().__init__()
        self.step = step
        clipping = {"clip_grad_max_norm": MAX_NORM, "clip_grad_norm_type": 2.0} if clip else {}
        groups = [
            {"params": list(step.layer.parameters()), **clipping},
            {"params": list(step.parameters(recurse=False))},
        ]
        self.add_optimizer(flow.optim.SGD([group for group in groups if group["params"]], lr=1.0))

    def build(self, d, *more):
        out = self.step(*more)
        (out * d).sum().backward()
        return out


def arrays_of(kind, options, shape):
    """x and what else the layer takes, as numpy arrays: the same on every rank."""
    rng = np.random.default_rng(0)
    if kind == "Embedding":
        return rng.integers(options["num_embeddings"], size=shape), []
    x, more = rng.standard_normal(shape, dtype=np.float32), []
    if kind == "CrossEntropyLoss":
        more = [rng.integers(shape[1], size=shape[0])]
    if kind == "LSTM":
        more = [rng.standard_normal((1, shape[1], options["hidden_size"]), dtype=np.float32) for _ in ("h0", "c0")]
    return x, more


def layer_of(kind, options):
    """The layer, local, with the same parameters on every rank; those of a norm are not its ones and zeros."""
    layer, rng = getattr(nn, kind)(**options), np.random.default_rng(1)
    for parameter in layer.parameters():
        values = rng.standard_normal(tuple(parameter.shape), dtype=np.float32) / 4
        parameter.data.copy_(flow.tensor(values))
    return layer


def lay_out(layer, ranks, sbps, how):
    """Split the parameters; those that sbps does not name, and buffers, are B.

    how: "file.py:name" of a class that the layer becomes, or of a function shard(layer, ranks) that lays it out.
    """
    path, _, name = (how or "").rpartition(":")
    for key, buffer in list(layer.named_buffers()):
        setattr(layer, key, buffer.to_global(placement=ranks, sbp=B))
    if name == "shard":
        return recipe.load(path).shard(layer, ranks)
    for key, parameter in list(layer.named_parameters()):
        replicated = parameter.to_global(placement=ranks, sbp=B)
        setattr(layer, key, nn.Parameter(replicated.to_global(sbp=sbp_of(sbps.get(key, "B")))))
    if name:
        layer.__class__ = getattr(recipe.load(path), name)
    return layer


def run(kind, options, shape, layout, clip=False, graph=False, arrays=False):
    """A step of one layer. Collective.

    layout: the SBPs "x", "more" of the other inputs, "sbps" of the parameters by name; and "how", see lay_out. clip:
    whether clip_grad_norm_ follows. Returns {"sbp": {tensor: SBP}, "sent": {"forward", "backward", "clip" or "graph":
    what this rank sent}, "sizes": {x, W, out: bytes}}, W being all parameters together. With `arrays` also the numpy
    "arrays" by name, and whether Dropout has the "same mask" on all ranks.
    """
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    x, more = arrays_of(kind, options, shape)
    partial = layout["x"] == "P"
    inputs = flow.tensor(x, placement=ranks, sbp=sbp_of("B" if partial else layout["x"]))
    others = [flow.tensor(array, placement=ranks, sbp=sbp_of(layout["more"])) for array in more]
    flow.manual_seed(0)
    step = Step(lay_out(layer_of(kind, options), ranks, layout["sbps"], layout["how"]), inputs, partial)
    initial = values_of(step) if arrays else {}

    out, forward = sent_by(lambda: step(*others))
    d = gradient_of_out(out.shape, shape)
    d_global = flow.tensor(d, placement=ranks, sbp=sbp_of(label(out.sbp).replace("P", "B")))
    if graph:
        out, sent = graph_step(step, d_global, others, clip)
    else:
        sent = backward(step, out, d_global, clip)
        sent["forward"] = forward
    parameters = dict(step.layer.named_parameters())
    sizes = {"x": x.nbytes, "W": sum(4 * w.numel() for w in parameters.values()), "out": 4 * out.numel()}
    sbps = {"x": layout["x"], **{name: label(w.sbp) for name, w in parameters.items()}, "out": label(out.sbp)}
    result = {"sbp": sbps, "sent": sent, "sizes": sizes}
    if arrays:
        gradients = subtracted(step, initial) if graph else gradients_of(step)
        result["arrays"] = {"x": x, "more": more, "d": d, **initial, **gradients, "out": out.numpy()}
        result["same mask"] = kind == "Dropout" and same_mask(out.numpy(), label(out.sbp), ranks.ranks.size)
    return result


def backward(step, out, d, clip):
    """The bytes that this rank sends in backward and in clipping."""
    _, sent = sent_by(lambda: (out.backward(d), [w.grad for w in step.parameters()])[1])
    sent = {"backward": sent}
    if clip:
        _, sent["clip"] = sent_by(lambda: nn.utils.clip_grad_norm_(step.layer.parameters(), MAX_NORM))
    assert all(label(w.grad.sbp) == label(w.sbp) for w in step.parameters())
    return sent


def graph_step(step, d, more, clip):
    """The output, and what this rank sends."""
    graph = StepGraph(step, clip)
    graph._compile(d, *more)
    out, sent = sent_by(lambda: graph(d, *more))
    return out, {"graph": sent}


def same_mask(out, sbp, n):
    """Whether all n shards have their zeros at the same places."""
    masks = np.split(out != 0, n, axis=split_dim(sbp))
    return all((mask == masks[0]).all() for mask in masks)


def values_of(step):
    """The parameters by name, copied: numpy() of a tensor that is B shares its memory."""
    return {name.replace("layer.", ""): w.numpy().copy() for name, w in step.named_parameters()}


def subtracted(step, initial):
    """The gradients, as SGD at lr=1 has subtracted them from the initial values."""
    return {f"{name} grad": initial[name] - values for name, values in values_of(step).items()}


def gradients_of(step):
    return {f"{name.replace('layer.', '')} grad": w.grad.numpy().copy() for name, w in step.named_parameters()}


def gradient_of_out(shape, shape_of_x):
    """The gradient that backward begins with; for a mean the number of rows, as else gradients would be tiny."""
    if not shape:
        return np.float32(shape_of_x[0])
    return np.random.default_rng(2).standard_normal(tuple(shape), dtype=np.float32)


class SumGraph(nn.Graph):
    def __init__(self, layers, optimizer):
        super().__init__()
        self.layers = layers
        self.add_optimizer(optimizer)

    def build(self):
        loss = sum(layer.weight.sum() for layer in self.layers)
        loss.backward()
        return loss


def norm_of_update(group_sizes, graph):
    """The norm of what SGD at lr=1 subtracts from all weights, where the optimizer clips to 1.0 with these groups."""
    ranks = flow.placement.all("cpu")
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(sum(group_sizes))])
    layers.to_global(placement=ranks, sbp=flow.sbp.broadcast)
    before, weights = [layer.weight.numpy().copy() for layer in layers], [layer.weight for layer in layers]
    ends = np.cumsum(group_sizes)
    groups = [
        {"params": weights[end - size : end], "clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}
        for size, end in zip(group_sizes, ends)
    ]
    optimizer = flow.optim.SGD(groups, lr=1.0)
    if graph:
        SumGraph(layers, optimizer)().numpy()
    else:
        sum(w.sum() for w in weights).backward()
        optimizer.clip_grad()
        optimizer.step()
    return float(np.sqrt(sum(((old - w.numpy()) ** 2).sum() for old, w in zip(before, weights))))
