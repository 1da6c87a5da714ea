"""PyTorch weights: each rank reads its own slice of a .safetensors file into a split model.

    one block                            rank 0          rank 1           SBP
    blocks.0.norm.weight  (8)            whole           whole            B
    blocks.0.up.weight    (32, 8)        rows 0-15       rows 16-31       S(0)
    blocks.0.up.bias      (32)           rows 0-15       rows 16-31       S(0)
    blocks.0.down.weight  (8, 32)        columns 0-15    columns 16-31    S(1)

The format is the length of a header (8 bytes), the header in JSON, {name: {"dtype", "shape", "data_offsets"}}, and the
numbers of one tensor after another; np.memmap reads of them what a slice needs. Names and shapes are PyTorch's. float16
and bfloat16 become float32. `save_safetensors` writes a file that PyTorch opens.

Moves: to load: whole parameters, from rank 0 to all others; nothing of the split ones. To save: split ones to rank 0.
Run:   ./launch.sh recipes/your_model/pytorch_weights.py [--graph] [--weights model.safetensors]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/your_model/pytorch_weights.py [--graph]
Use it to start from a PyTorch checkpoint: safetensors.torch.save_file(model.state_dict(), "model.safetensors").
Source: Hugging Face, "Safetensors: Format", https://github.com/huggingface/safetensors.
"""

import argparse
import json
import os
import pathlib
import tempfile

import numpy as np
import oneflow as flow
from oneflow import nn

WORLD_SIZES = (2, 1, 3, 4, 8)  # numbers of ranks; launch.sh refuses others
B, S = flow.sbp.broadcast, flow.sbp.split


class Block(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """An ordinary text classifier, with the parameter names of PyTorch."""

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


class Column(nn.Linear):
    """Each rank has some of the outputs: weight and bias S(0). See tensor_parallel_module.py."""

    def forward(self, x):
        x = x.to_global(sbp=x.sbp, grad_sbp=x.sbp)
        return flow.matmul(x, self.weight, transpose_b=True) + self.bias


class Row(nn.Linear):
    """Each rank has some of the inputs and computes a partial sum: weight S(1), bias B."""

    def forward(self, x):
        out = flow.matmul(x, self.weight, transpose_b=True)
        return out.to_global(sbp=B) + self.bias


KINDS = {"up": Column, "down": Row}
SPLIT_DIMS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # by the end of a parameter's name; all others are B
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def open_safetensors(path):
    """{name: array} of a file, as np.memmap: nothing but the header is read. bfloat16 is uint16 here: see `to_float32`.

    Raises ValueError if the file is not complete.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: not a safetensors file, or cut off: {size} bytes, a header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path}: not a safetensors file: its header is not JSON") from None
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} is {entry['dtype']}; this recipe reads {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        if 8 + length + end > size:
            raise ValueError(f"{path}: cut off: {name} ends at byte {8 + length + end}, the file at {size}")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        arrays[name] = np.memmap(path, dtype, "r", 8 + length + begin, shape or (1,)).reshape(shape)
    return arrays


def to_float32(array):
    if array.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def check_names_and_shapes(model, arrays):
    """Raises ValueError if the arrays are not those of the model, before anything is loaded."""
    wanted = {name: tuple(w.shape) for name, w in model.named_parameters()}
    problems = [f"{name} is missing" for name in wanted if name not in arrays]
    problems += [f"{name} is not in the model" for name in arrays if name not in wanted]
    for name, shape in wanted.items():
        if name in arrays and arrays[name].shape != shape:
            problems.append(f"{name} is {arrays[name].shape}, the model has {shape}")
    if problems:
        raise ValueError("; ".join(problems))


def load(model, arrays, ranks):
    """Lay a model out tensor parallel, with the values of arrays by name; each rank reads its slices alone."""
    check_names_and_shapes(model, arrays)
    rank, members = flow.env.get_rank(), ranks.ranks.tolist()
    k = members.index(rank) if rank in members else 0  # a rank outside the placement gives a slice that is not used
    for layer_name, layer in list(model.named_modules()):
        for name, _ in list(layer.named_parameters(recurse=False)):
            whole = arrays[f"{layer_name}.{name}"]
            dim = SPLIT_DIMS.get(f"{layer_name.split('.')[-1]}.{name}")
            if dim is None:
                own, sbp = whole, B
            else:
                own, sbp = np.array_split(whole, len(members), axis=dim)[k], S(dim)
            local = flow.tensor(to_float32(own))
            setattr(layer, name, nn.Parameter(local.to_global(placement=ranks, sbp=sbp)))
        layer.__class__ = KINDS.get(layer_name.split(".")[-1], type(layer))
    return model


def save_safetensors(model, path):
    """Write the parameters to a file that safetensors and PyTorch open. All ranks call it; rank 0 writes.

    Rank 0 gathers one tensor at a time, and renames the file when it is complete on disk.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, w in model.named_parameters():
        header[name] = {"dtype": "F32", "shape": list(w.shape), "data_offsets": [offset, offset + 4 * w.numel()]}
        offset += 4 * w.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin at a multiple of 8 bytes
    rank_0 = flow.placement(next(model.parameters()).placement.type, [0])
    is_writer = flow.env.get_rank() == 0
    unfinished = pathlib.Path(f"{path}.unfinished" if is_writer else os.devnull)
    with open(unfinished, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for w in model.parameters():
            whole = w.detach().to_global(placement=rank_0, sbp=B)  # all ranks call it
            file.write(whole.to_local().numpy().tobytes())
    if is_writer:
        fsync(unfinished)  # everything is on disk before the file gets its name
        os.replace(unfinished, path)
        fsync(unfinished.parent)  # and so is the name
    flow.comm.barrier()  # before another rank reads the file, as `train` does


def fsync(path):
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class TrainingGraph(nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, ids, targets):
        loss = nn.functional.cross_entropy(self.model(ids), targets)
        loss.backward()  # in a graph this includes the update
        return loss


def train(ranks, graph=False, weights=None, seed=0, steps=3, batch=8):
    """Load weights onto a placement, and train from them.

    weights: the path of a .safetensors file, or {name: array}; None: those that OneFlow draws. Returns the model, the
    logits before training, as a numpy array, and the loss of each step.
    """
    flow.manual_seed(seed)
    model = Classifier()
    if weights is None:
        weights = {name: w.numpy() for name, w in model.named_parameters()}
    elif not isinstance(weights, dict):
        weights = open_safetensors(weights)
    load(model, weights, ranks)

    rng = np.random.default_rng(seed)
    ids = flow.tensor(rng.integers(12, size=(batch, 4)), placement=ranks, sbp=B)
    targets = flow.tensor(rng.integers(5, size=batch), placement=ranks, sbp=B)
    with flow.no_grad():
        logits = model(ids).numpy()
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
    return model, logits, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--weights", default=None, help="a .safetensors file of this model (default: weights drawn here)"
    )
    args = parser.parse_args()
    if args.weights:
        try:
            check_names_and_shapes(Classifier(), open_safetensors(args.weights))
        except (OSError, ValueError) as error:
            parser.error(str(error))  # each rank ends with this line before it waits for another

    model, logits, losses = train(flow.placement.all(args.device), args.graph, args.weights)
    for name, w in model.blocks[0].named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    with tempfile.TemporaryDirectory() as folder:  # each rank has a folder of its own; rank 0 writes
        path = pathlib.Path(folder, "model.safetensors")
        save_safetensors(model, path)
        if flow.env.get_rank() == 0:
            print(f"saved {len(open_safetensors(path))} tensors, {os.path.getsize(path):,} bytes")
    _, logits_alone, losses_alone = train(flow.placement(args.device, [0]), args.graph, args.weights)
    np.testing.assert_allclose(logits, logits_alone, atol=1e-6)
    np.testing.assert_allclose(losses, losses_alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
