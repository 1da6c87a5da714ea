"""2-D SBP: on a mesh of 2 x 2 ranks split the batch along one axis and the weight along the other.

    mesh [[0, 1], [2, 3]]    rank 0         rank 1         rank 2         rank 3         SBP
    x          (4, 4)        rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B
    w          (4, 8)        columns 0-3    columns 4-7    columns 0-3    columns 4-7    B, S(1)
    out        (4, 8)        0-1, 0-3       0-1, 4-7       2-3, 0-3       2-3, 4-7       S(0), S(1)
    partial    (8, 4)        rows 0-3       rows 4-7       rows 0-3       rows 4-7       P, S(0)
    gathered   (4, 8)        rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B
    reduced    (8, 4)        rows 0-3       rows 4-7       rows 0-3       rows 4-7       B, S(0)
    scattered  (8, 4)        0-3, 0-1       4-7, 0-1       0-3, 2-3       4-7, 2-3       S(1), S(0)
    swapped    (4, 4)        rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B

out = x @ w needs nothing from other ranks. partial = out^T @ x, as in the gradient of a weight, adds up over the
batch: a partial sum along axis 0, since the batch is split there, and split along axis 1 as w is.

Trap:  swapped is placed on [[0, 3], [1, 2]], so ranks 0 and 3 should share rows 0-1. OneFlow 0.9.0 sorts the ranks and
       gives them to 0 and 1 (OneFlow issue 9727).
Moves: gathered, an all-gather along axis 1: out/4 from each rank. reduced, an all-reduce along axis 0: partial/2.
       scattered, a reduce-scatter along axis 0: partial/4. Eager mode pays half as much again for gathered and for
       scattered, as for every S(1) -> B and P -> S(1); a graph does not.
Run:   ./launch.sh recipes/layouts/two_d_sbp.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/layouts/two_d_sbp.py [--graph]
Use it where the batch alone cannot feed all ranks: few ranks with fast links split the weight, the others the batch.
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
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

WORLD_SIZES = (4,)
FITS = {  # graphs need it
    "batch": lambda given, ranks: given.batch % 4 == 0,
    "in_features": lambda given, ranks: given.in_features % 4 == 0,
    "out_features": lambda given, ranks: given.out_features % 4 == 0,
}


class TwoDSbp(flow.nn.Module):
    def __init__(self, w, mesh):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(1))))

    def forward(self, x):
        out = flow.matmul(x, self.w)
        partial = flow.matmul(out.transpose(0, 1), x)
        gathered = out.to_global(sbp=(flow.sbp.split(0), flow.sbp.broadcast))
        reduced = partial.to_global(sbp=(flow.sbp.broadcast, flow.sbp.split(0)))
        scattered = partial.to_global(sbp=(flow.sbp.split(1), flow.sbp.split(0)))
        return out, partial, gathered, reduced, scattered


class TwoDSbpGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def run(graph=False, device="cpu", seed=0, batch=4, in_features=4, out_features=8):
    """Returns by name x (batch, in), w (in, out), out (batch, out), partial (out, in) and what they are moved to."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    mesh = flow.placement(device, [[0, 1], [2, 3]])
    order = flow.placement(device, [[0, 3], [1, 2]])
    swapped = flow.tensor(x, placement=order, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    x = flow.tensor(x, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    module = TwoDSbp(w, mesh)
    model = run.kept = TwoDSbpGraph(module) if graph else module  # a freed graph may abort OneFlow
    out, partial, gathered, reduced, scattered = model(x)
    moved = {"gathered": gathered, "reduced": reduced, "scattered": scattered, "swapped": swapped}
    return {"x": x, "w": module.w, "out": out, "partial": partial, **moved}


def single_device(values, given):
    """What the outputs must be: the same products in numpy on one device."""
    out = values["x"] @ values["w"]
    partial = out.T @ values["x"]
    return {"out": out, "gathered": out, "partial": partial, "reduced": partial, "scattered": partial}


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
