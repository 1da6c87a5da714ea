"""PyTorch weights: read a .safetensors file into a model of any layout, each rank its own slice, and write one.

    one block                            rank 0          rank 1           SBP
    blocks.0.norm.weight  (8)            whole           whole            B
    blocks.0.up.weight    (32, 8)        rows 0-15       rows 16-31       S(0)
    blocks.0.up.bias      (32)           rows 0-15       rows 16-31       S(0)
    blocks.0.down.weight  (8, 32)        columns 0-15    columns 16-31    S(1)

The format is the length of a header (8 bytes), the header in JSON, {name: {"dtype", "shape", "data_offsets"}}, and the
numbers of one tensor after another; np.memmap reads only the pages on which a slice lies. Names and shapes are those of
PyTorch, floats take the model's dtype. Several files: load(model, {**open_safetensors(one), **open_safetensors(two)}).

Why:   a file of whole tensors fits any layout: each rank reads the slice that its SBP gives it.
Moves: to load: nothing; every host needs the file. To save: an all-gather of what is split; from other ranks to rank 0.
Run:   ./launch.sh recipes/your_model/pytorch_weights.py [--graph] [--weights model.safetensors]
Use it to start from a PyTorch checkpoint: safetensors.torch.save_model(model, "model.safetensors").
Source: Hugging Face, "Safetensors: Format", https://github.com/huggingface/safetensors.
"""

import argparse
import json
import math
import os
import pathlib
import tempfile

import numpy as np
import oneflow as flow
from oneflow import nn

WORLD_SIZES = (2, 1, 3, 4, 8)  # numbers of ranks; launch.sh refuses others
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16
WRAPPERS = {"module": "DistributedDataParallel", "_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP"}
DTYPES = {**FLOATS, "I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}


class Block(nn.Module):
    """Computes with weights as `lay_out` splits them: up by outputs, down by inputs."""

    def __init__(self, hidden_size):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        h = self.norm(x)
        h = h.to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.broadcast)  # one all-reduce of its gradient
        h = nn.functional.gelu(self.up(h))
        h = flow.matmul(h, self.down.weight, transpose_b=True)  # a partial sum on each rank
        return x + h.to_global(sbp=flow.sbp.broadcast) + self.down.bias


class Classifier(nn.Module):
    """A text classifier, with the parameter names of PyTorch."""

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


def lay_out(model, ranks):
    """Split the weights of each block, as tensor_parallel_module.py does for any model; the others are B."""
    model.to_global(placement=ranks, sbp=flow.sbp.broadcast)
    for block in model.blocks:
        for w, dim in ((block.up.weight, 0), (block.up.bias, 0), (block.down.weight, 1)):
            w.data = w.detach().to_global(sbp=flow.sbp.split(dim))
    return model


def open_safetensors(path):
    """{name: array} of a file: the length of a header (8 bytes), the header in JSON, and one tensor after another.

    The arrays are np.memmap, of which nothing is read yet; bfloat16 is uint16. Raises ValueError.
    """
    is_there(path)  # refuses a link that points nowhere
    try:
        data = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        entries = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not a safetensors file, or cut off") from None
    numbers, arrays = data[8 + length :], {}
    for name, dtype, shape, begin, end in entries:
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {name} is {dtype}; this recipe reads {', '.join(DTYPES)}")
        dtype = np.dtype(DTYPES[dtype])
        if end > numbers.size or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: cut off or damaged at {name}")
        arrays[name] = numbers[begin:end].view(dtype).reshape(shape)
    return arrays


def is_there(path):
    """Whether a file is there. ValueError for a link that points nowhere, as in a copied Hugging Face cache."""
    path = pathlib.Path(path)
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            target = f"{place} is a link to {os.readlink(place)}"
            raise ValueError(f"{target}, which is not there: where it is, copy the folder with cp -rL")
    return path.exists()


def match(model, arrays):
    """[(tensor of the model, its array)], of all parameters and persistent buffers.

    Raises ValueError, in one line, if the arrays are not those of the model, before anything is loaded.
    """
    tensors, names_of = model.state_dict(), {}
    check_names(arrays, tensors, "in load(model, {{{}: array for name, array in open_safetensors(path).items()}})")
    for name, w in tensors.items():
        names_of.setdefault(id(w), []).append(name)  # tied weights have several names
    pairs, problems = [], [f"{name} is not in the model" for name in arrays if name not in tensors]
    for names in names_of.values():
        w, in_file = tensors[names[0]], [name for name in names if name in arrays]
        if not in_file:
            problems.append(f"{' or '.join(names)} is missing")
            continue
        for name in in_file:
            problems += [f"{name} is {problem}" for problem in problems_of(arrays[name], w)]
        first, *others = in_file
        pairs.append((w, arrays[first]))
        for name in others:
            if not np.array_equal(arrays[name], arrays[first]):
                problems.append(f"{first} and {name} are one weight in the model, and differ here")
    if problems:
        raise ValueError("; ".join(problems))
    return pairs


def check_names(names, wanted, way):
    """Raise ValueError, with a way out, if PyTorch's wrappers add words such as module., or all names have a prefix."""
    prefix = os.path.commonprefix(list(names)).rpartition(".")[0]
    for name in names:
        words = [word for word in name.split(".") if word in WRAPPERS]
        inner = ".".join(word for word in name.split(".") if word not in WRAPPERS)
        cause = " and ".join(f"PyTorch's {WRAPPERS[word]} adds {word}." for word in words)
        if prefix and not words:
            words, inner, cause = [prefix], name[len(prefix) + 1 :], f"all names begin with {prefix}."
        if words and name not in wanted and inner in wanted:
            renamed = "name" + "".join(f'.replace("{word}.", "")' for word in words)
            raise ValueError(f"{name} is {inner} in the model: {cause}; take it away, as {way.format(renamed)}")


def problems_of(array, w):
    dtype = numpy_dtype(w)
    if array.shape != tuple(w.shape):
        yield f"{array.shape}, the model has {tuple(w.shape)}"
    if array.dtype != dtype and not (array.dtype in FLOATS.values() and dtype in FLOATS.values()):
        yield f"{array.dtype}, the model has {dtype}"
    if w.is_global and flow.sbp.partial_sum in w.sbp:
        yield "P in the model: only B and S can be loaded"


def numpy_dtype(w):
    """The dtype of a tensor's array: that of bfloat16 is float32."""
    return flow.zeros(1, dtype=w.dtype).numpy().dtype


def load(model, weights):
    """Fill a model of any layout from a file, or from arrays by name; each rank reads only what it holds.

    The values go into the tensors that the model has: an optimizer, ties and frozen weights stay.
    """
    arrays = weights if isinstance(weights, dict) else open_safetensors(weights)
    for w, array in match(model, arrays):
        if not w.is_global:
            copy(array, w)
        elif flow.env.get_rank() in w.placement.ranks:
            copy(own_slice(array, w), w.to_local())  # to_local shares the memory of w
    return model


def copy(array, local):
    if array.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with flow.no_grad():
        local.copy_(flow.tensor(array, dtype=local.dtype, device=local.device))


def own_slice(array, w):
    """What this rank holds of a global tensor: a view, of which nothing is read yet."""
    ranks = w.placement.ranks
    [coordinates] = np.argwhere(ranks == flow.env.get_rank())
    for k, size, sbp in zip(coordinates, ranks.shape, w.sbp):
        for dim in range(array.ndim):
            if sbp == flow.sbp.split(dim):
                array = np.array_split(array, size, axis=dim)[k]
    return array


def save_safetensors(model, path):
    """Write parameters and persistent buffers to a file that safetensors and PyTorch open. All ranks call it.

    Rank 0 gathers one tensor at a time, and renames the file when it is complete on disk. Tied weights are written once
    for each of their names, which PyTorch's load_state_dict wants.
    """
    tensors, header, offset = model.state_dict(), {"__metadata__": {"format": "pt"}}, 0
    names = sorted(tensors, key=lambda name: -numpy_dtype(tensors[name]).itemsize)  # so that each tensor is aligned
    for name in names:
        w = tensors[name]
        dtype = numpy_dtype(w)
        [dtype_in_file] = [key for key, value in DTYPES.items() if value == dtype]
        end = offset + w.numel() * dtype.itemsize
        header[name] = {"dtype": dtype_in_file, "shape": list(w.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin at a multiple of 8 bytes
    is_writer = flow.env.get_rank() == 0
    unfinished = pathlib.Path(f"{path}.unfinished" if is_writer else os.devnull)
    with open(unfinished, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(on_rank_0(tensors[name]).tobytes())
    if is_writer:
        fsync(unfinished)  # everything is on disk before the file gets its name
        os.replace(unfinished, path)
        fsync(unfinished.parent)  # and so is the name
    flow.comm.barrier()  # before another rank reads the file


def on_rank_0(w):
    """The whole of a tensor as an array on rank 0, and nothing on the others. All ranks call it."""
    w = w.detach()
    if w.is_global:
        mesh = np.zeros([1] * w.placement.ranks.ndim, int)  # rank 0, as a mesh of as many axes
        w = w.to_global(
            placement=flow.placement(w.placement.type, mesh.tolist()), sbp=[flow.sbp.broadcast] * mesh.ndim
        ).to_local()
    return w.numpy()


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
    """Load weights into a model that is split over ranks, and train from them.

    weights: the path of a .safetensors file, or {name: array}; None: those that OneFlow draws. Returns the model, the
    logits before training, as a numpy array, and the loss of each step.
    """
    flow.manual_seed(seed)
    model = Classifier()
    if weights is None:
        weights = {name: w.numpy() for name, w in model.state_dict().items()}
    lay_out(model, ranks)
    load(model, weights)

    rng = np.random.default_rng(seed)
    ids = flow.tensor(rng.integers(12, size=(batch, 4)), placement=ranks, sbp=flow.sbp.broadcast)
    targets = flow.tensor(rng.integers(5, size=batch), placement=ranks, sbp=flow.sbp.broadcast)
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
            match(Classifier(), open_safetensors(args.weights))
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
