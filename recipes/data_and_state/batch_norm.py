"""Batch norm: nn.BatchNorm1d takes each rank's own rows for the batch; the mean of a global tensor is of all rows.

    h = x @ w, normalized by column    rank 0          rank 1          SBP
    x              (8, 4)              rows 0-3        rows 4-7        S(0)
    y              (8, 8)              rows 0-3        rows 4-7        S(0)
    w              (4, 8)              whole           whole           B
    by_shard       (8, 8)              rows 0-3        rows 4-7        S(0)
    mean           (1, 8)              whole           whole           B
    var            (1, 8)              whole           whole           B
    out            (8, 8)              rows 0-3        rows 4-7        S(0)

nn.BatchNorm1d knows no SBP: on an S(0) input each rank computes mean and variance of its shard alone, and by_shard is
not what one device computes. No error, no warning. Its running_mean and running_var say B and yet differ from rank to
rank: numpy() shows each its own, and a checkpoint keeps those of rank 0.

By hand it is right: the mean of the rows of a global tensor is a partial sum that P -> B adds up, also where the shards
are uneven, and autograd goes back through it. So mean, var and out, and the training step with out, are those of one
device. For evaluation keep running averages of mean and var: they are the same on all ranks.

nn.SyncBatchNorm does not run on CPU: "SyncBatchNorm expected input tensor to be on GPU".

Moves: 4 all-reduces of one row, mean and var forward and backward, and that of w's gradient, every step; nn.BatchNorm1d
       sends nothing for its statistics.
Run:   ./launch.sh recipes/data_and_state/batch_norm.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/batch_norm.py [--graph]
Use it when a rank's part of the batch is too small to stand for all of it; LayerNorm has no such trouble with S(0).
Source: S. Ioffe and C. Szegedy, "Batch Normalization", arXiv:1502.03167.
"""

import argparse
import inspect
import os
import sys

import numpy as np

os.environ.setdefault("no_grpc_proxy", ",")  # matches all: ranks do not meet through an http_proxy
try:
    import oneflow as flow
except (ImportError, RuntimeError) as error:  # RuntimeError: the empty placeholder that pip installs on Python 3.11+
    print(f"{sys.argv[0]}: no OneFlow ({error}): it needs Python 3.8-3.10 and requirements.txt", file=sys.stderr)
    sys.exit(2)

WORLD_SIZES = range(2, 65)
FITS = {
    "batch": lambda given, ranks: given.batch >= 2 * ranks,  # one row has no variance
    "in_features": lambda given, ranks: given.in_features > 1,  # the size of a single weight is normalized away
}


class Normalized(flow.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = flow.nn.Parameter(w.clone())
        self.built_in = flow.nn.BatchNorm1d(w.shape[1]).to_global(placement=w.placement, sbp=flow.sbp.broadcast)

    def forward(self, x, y):
        h = flow.matmul(x, self.w)
        by_shard = self.built_in(h)  # the wrong way; the loss does not depend on it
        mean = h.mean(dim=0, keepdim=True).to_global(sbp=flow.sbp.broadcast)
        centered = h - mean
        var = (centered * centered).mean(dim=0, keepdim=True).to_global(sbp=flow.sbp.broadcast)
        out = centered / flow.sqrt(var + 1e-5)
        return flow.nn.functional.mse_loss(out, y), out, mean, var, by_shard


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss, *others = self.module(x, y)
        loss.backward()  # in a graph this stands for the update too
        return (loss, *others, self.module.to(flow.nn.Module).w.grad)


def run(graph=False, device="cpu", seed=0, steps=3, batch=8, in_features=4, out_features=8):
    """Some steps in float32; returns the table's tensors, as in the last step, running statistics, and the losses."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    w = flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast)
    module = Normalized(w)
    update = flow.optim.SGD([module.w], lr=0.1)
    model = run.kept = TrainingGraph(module, update) if graph else module  # a freed graph may abort OneFlow
    losses = []
    for _ in range(steps):
        if graph:
            loss, out, mean, var, by_shard, w_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            loss, out, mean, var, by_shard = model(x, y)
            loss.backward()
            update.step()
            w_grad = module.w.grad
        losses.append(loss)

    tensors = {"x": x, "y": y, "w": w, "by_shard": by_shard}
    tensors.update({"running_mean": module.built_in.running_mean, "running_var": module.built_in.running_var})
    tensors.update({"mean": mean, "var": var, "out": out, "w grad": w_grad, "new w": module.w})
    return {**tensors, "losses": flow.stack([loss.to_global(sbp=flow.sbp.broadcast) for loss in losses])}


def single_device(values, given):
    """What one device computes, by which by_shard, running_mean and running_var are wrong: they are left out."""
    x, y, w, losses = values["x"], values["y"], values["w"], []
    for _ in range(given.steps):
        h = x @ w
        mean, var = h.mean(axis=0, keepdims=True), h.var(axis=0, keepdims=True)
        scale = np.sqrt(var + 1e-5)
        out = (h - mean) / scale
        losses.append(((out - y) ** 2).mean())
        back = 2 * (out - y) / y.size
        gradient = x.T @ ((back - back.mean(axis=0) - out * (back * out).mean(axis=0)) / scale)
        w = w - 0.1 * gradient
    return {"mean": mean, "var": var, "out": out, "w grad": gradient, "new w": w, "losses": np.array(losses)}


# The lesson ends here. What follows stands in every recipe: what a rank holds, when a run is refused, the options.
def held(tensor):
    """The block of a tensor that this rank holds, in words."""
    blocks, rank = [np.arange(size) for size in tensor.shape], flow.env.get_rank()
    where = "" if tensor.is_global else f"local, on {tensor.device}"
    if tensor.is_global:
        names = {flow.sbp.broadcast: "B", flow.sbp.partial_sum: "P"}
        names.update({flow.sbp.split(dim): f"S({dim})" for dim in range(tensor.ndim)})
        ranks = tensor.placement.ranks
        where = f"{', '.join(names[sbp] for sbp in tensor.sbp):4} on ranks {ranks.tolist()}"
        if rank not in ranks:
            return f"nothing                   {where}"
        for sbp, n, position in zip(tensor.sbp, ranks.shape, np.argwhere(ranks == rank)[0]):
            if names[sbp].startswith("S"):
                dim = int(names[sbp][2])
                blocks[dim] = np.array_split(blocks[dim], n)[position]
        if [len(block) for block in blocks] != list(tensor.to_local().shape):
            raise RuntimeError(f"rank {rank} holds {tuple(tensor.to_local().shape)}, not what its SBP says")
    words = [f"{word} {f'{block[0]}-{block[-1]}':5}" for word, block in zip(("rows", "columns"), blocks)]
    return f"{' '.join(words):24}  {where}"


def astray():
    """How the ranks were started wrongly, or None. OneFlow would go on, and print wrong values."""
    import zlib

    world_size, rank = flow.env.get_world_size(), flow.env.get_rank()
    ranks = flow.placement("cpu", list(range(world_size)))
    own = flow.tensor(np.arange(world_size), placement=ranks, sbp=flow.sbp.split(0)).to_local().numpy().tolist()
    if own != [rank]:  # a LOCAL_RANK that two ranks of one address share
        return f"rank {rank} holds {own} in place of [{rank}]: unset LOCAL_RANK, it is {os.environ.get('LOCAL_RANK')}"
    words = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    number = flow.tensor([zlib.crc32(os.fsencode(words))]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
    if len(set(number.tolist())) > 1:
        return "ranks of two jobs have met: start all with the same options, each job on a MASTER_PORT of its own"
    return None


def refusal(args):
    """Why this run cannot start, or None; known to every rank before any waits for another."""
    world_size, gpus = flow.env.get_world_size(), range(flow.cuda.device_count())
    if world_size not in WORLD_SIZES:
        return f"cannot run on {world_size} ranks: type -n {WORLD_SIZES[0]}, or --nproc_per_node {WORLD_SIZES[0]}"
    n = vars(args).get("ranks") or world_size  # those that the program starts, or its own
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, list) and not (set(value) <= set(range(world_size)) and len(set(value)) == len(value)):
            return f"{option} takes ranks from 0 to {world_size - 1}, each once: type {option} 0"
        if isinstance(value, str) and callable(FITS.get(name)):  # any text: the function says what is wrong with it
            wrong = FITS[name](args, world_size)
            if wrong:
                return f"{option} {value}: {wrong}"
        elif isinstance(value, str) and value not in FITS.get(name, (value,)):
            return f"{option} takes {', '.join(FITS[name])}, not {value}: type {option} {FITS[name][0]}"
        if type(value) is int:
            given = argparse.Namespace(**{**vars(args), name: max(value, int(name != "seed"))})
            while name in FITS and not FITS[name](given, world_size):
                setattr(given, name, getattr(given, name) + 1)
            if getattr(given, name) != value:
                return f"{option} {value} does not fit on {n} ranks: type {option} {getattr(given, name)}"
    usable = [gpu for gpu in gpus if (6, 0) <= flow.cuda.get_device_capability(gpu) < (9, 0)]
    enough = len(usable) == len(gpus) >= n // flow.env.get_node_size()
    if args.device == "cuda" and not enough:
        return f"each rank needs a GPU of compute capability 6.0 to 8.9, got {len(usable)}: type --device cpu"
    args.device = args.device or ("cuda" if enough else "cpu")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    for name, default in ((name, one.default) for name, one in inspect.signature(run).parameters.items()):
        option, kind = f"--{name.replace('_', '-')}", int if isinstance(default, tuple) else type(default)
        if name == "graph":
            parser.add_argument(option, action="store_true", help="run the module inside an nn.Graph")
        elif name == "device":
            words = "default: cuda if each rank has a supported GPU"
            parser.add_argument(option, choices=["cpu", "cuda"], help=words)
        else:
            many = "+" if isinstance(default, tuple) else None
            parser.add_argument(option, type=kind, nargs=many, default=default, help="default: %(default)s")
    args = parser.parse_args()
    wrong = astray()
    if wrong:
        print(f"{parser.prog}: {wrong}", file=sys.stderr, flush=True)
        os._exit(2)  # not sys.exit, which waits for the ranks that have not noticed
    reason = refusal(args)
    if reason:
        parser.exit(2, f"{parser.prog}: {reason}\n")

    tensors = run(**vars(args))
    width = max(8, *(len(name) + 2 for name in tensors))
    for rank in range(flow.env.get_world_size()):
        if rank == flow.env.get_rank():
            for name, tensor in tensors.items():
                print(f"rank {rank}: {name:{width}}{held(tensor)}", flush=True)
            for line in getattr(run, "says", ()):
                print(f"rank {rank}: {line}", flush=True)
        flow.comm.barrier()

    values = {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}  # collective: all ranks
    expected = single_device(values, args)
    error = max(np.abs(values[name] - expected[name]).max() / np.abs(expected[name]).max() for name in expected)
    equal = error < (1e-5 if "steps" in vars(args) else 1e-6)  # float32 rounds by up to 6e-8, again in each step
    if flow.env.get_rank() == 0:
        if "losses" in values:
            print(f"loss {values['losses'][0]:.4f} -> {values['losses'][-1]:.4f} in {len(values['losses'])} steps")
        print(f"{'equal to' if equal else 'DIFFERS FROM'} the single-device values: largest difference {error:.1e}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
