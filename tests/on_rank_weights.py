"""What tests call on the ranks of a pool: pytorch_weights.py with a model that has tensors of every kind."""

import pathlib

import numpy as np
import oneflow as flow
from oneflow import nn

from oneflow_cookbook.measure.tensors import layout_of
from oneflow_cookbook.start import recipe

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


class Block(nn.Module):
    """BatchNorm's buffers, buffers of other dtypes, a layer without bias, uneven splits, a frozen scalar parameter."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 10)
        self.down = nn.Linear(10, 8, bias=False)
        self.temperature = nn.Parameter(flow.tensor(0.5), requires_grad=False)
        self.register_buffer("mask", flow.zeros(5, dtype=flow.bool))
        self.register_buffer("table", flow.zeros(3, 7, dtype=flow.int32))
        self.register_buffer("bytes", flow.zeros(7, dtype=flow.uint8))
        self.register_buffer("scratch", flow.ones(3), persistent=False)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight  # tied


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block(), Pair()])
        self.head = nn.Linear(8, 5)


def split_by_hand(model, ranks):
    """On the ranks of a mesh rows along the first axis, and columns or rows again along the second."""
    for w in model.parameters():
        sbp = [S(0), S(w.ndim - 1)][: ranks.ranks.ndim] if w.ndim else [B] * ranks.ranks.ndim
        w.data = w.detach().to_global(placement=ranks, sbp=[B] * ranks.ranks.ndim).to_global(sbp=sbp)
    for layer in model.modules():
        for name, buffer in layer._buffers.items():
            layer._buffers[name] = buffer.to_global(placement=ranks, sbp=[B] * ranks.ranks.ndim)


def lay_out(model, layout, paths):
    """Lay a model out on four ranks by the recipe of a layout."""
    if layout == "fully sharded":
        recipe.load(paths["fully_sharded_module"]).shard(model, flow.placement.all("cpu"))
    elif layout == "pipeline":
        module = recipe.load(paths["pipeline_module"])
        module.assign_stages(model, [model.embedding, *model.blocks, model.head], module.placements("cpu", 4))
    elif layout == "P":
        model.to_global(placement=flow.placement.all("cpu"), sbp=B)
        model.head.bias.data = model.head.bias.detach().to_global(sbp=P)
    elif layout in HAND_MADE:
        split_by_hand(model, flow.placement("cpu", HAND_MADE[layout]))
    elif layout != "local":
        module = recipe.load(paths["tensor_parallel_module"])
        plan = {r"blocks\.0\.up": module.Column, r"blocks\.0\.down": module.Row}
        data = {"data": 4, "tensor": 1, "data x tensor": 2}[layout]
        module.lay_out(model, module.placements("cpu", 4, data), {} if layout == "data" else plan)


HAND_MADE = {"two ranks of four": [1, 2], "rows and columns": [[0, 1], [2, 3]]}


def filled(weights, layout, target, paths):
    """Load weights into a model under a layout, and save it.

    Returns {name: (layout, what this rank holds)}, and what must stay as it was: a list before, and one after.
    """
    module, model = recipe.load(paths["pytorch_weights"]), Model()
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)  # before the layout
    lay_out(model, layout, paths)

    def facts():
        own = [id(w) for group in optimizer.param_groups for w in group.parameters]
        scratch = model.blocks[0].scratch
        kinds = [(id(w), w.requires_grad, layout_of(w)) for w in model.state_dict().values()]
        return [own, kinds, scratch.numpy().tolist()]

    before = facts()
    module.load(model, weights)
    after = facts()
    held = {}
    for name, w in model.state_dict().items():
        held[name] = (layout_of(w), (w.to_local() if w.is_global else w).numpy())
    module.save_safetensors(model, pathlib.Path(target))
    return held, before, after


def refusal(arrays, layout, paths):
    """The error with which arrays are refused; None if they are loaded."""
    model = Model()
    lay_out(model, layout, paths)
    try:
        recipe.load(paths["pytorch_weights"]).load(model, arrays)
    except ValueError as error:
        return str(error)


def part_from_two_files(path, files):
    """The weight and bias of a model's part, split by rows, that is loaded from two files."""
    module, model = recipe.load(path), Model()
    split_by_hand(model, flow.placement.all("cpu"))
    first, second = map(module.open_safetensors, files)
    module.load(model.head, {**first, **second})
    return [w.numpy() for w in model.head.parameters()]


def shapes():
    """{name: (dtype, shape)} of the model."""
    return {name: (str(w.numpy().dtype), tuple(w.shape)) for name, w in Model().state_dict().items()}


def pages_read(path, file, features):
    """How many bytes of a file with one split weight this rank has in its memory when the weight is loaded."""
    module, ranks = recipe.load(path), flow.placement.all("cpu")
    model = nn.Linear(features, features, bias=False)
    model.weight.data = model.weight.detach().to_global(placement=ranks, sbp=B).to_global(sbp=S(0))
    arrays = module.open_safetensors(file)
    module.load(model, arrays)
    _, mapping = pathlib.Path("/proc/self/smaps").read_text().split(f" {file}\n")  # one, which `arrays` keeps
    assert arrays
    return next(1024 * int(line.split()[1]) for line in mapping.splitlines() if line.startswith("Rss:"))


def of_16_bits(path, file):
    """The weight of a bfloat16 model that is loaded, on each rank alone, and saved to a file."""
    module = recipe.load(path)
    model = nn.Linear(2, 3, bias=False).to(flow.bfloat16)
    weight = np.array([[1.0, 2.5], [-3.0, 0.125], [4.0, 5.0]], np.float32)
    module.load(model, {"weight": (weight.view(np.uint32) >> 16).astype(np.uint16)})
    module.save_safetensors(model, pathlib.Path(file))
    return str(model.weight.dtype), weight, model.weight.float().numpy()
