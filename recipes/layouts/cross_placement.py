"""Conversions between placements: from some ranks to others, disjoint, overlapping or nested, in every SBP.

    x = sum(parts)       rank 0         rank 1         rank 2         rank 3         SBP
    B       (4, 6)       whole          whole          nothing        nothing        B
    S(0)    (4, 6)       rows 0-1       rows 2-3       nothing        nothing        S(0)
    S(1)    (4, 6)       columns 0-2    columns 3-5    nothing        nothing        S(1)
    P       (4, 6)       parts[0]       parts[1]       nothing        nothing        P

    p1 -> p2 other ranks    B              S(0), S(1)    P
    B                       p2             1             1
    S(0), S(1)              p2             1             1
    P                       p1 + p2 - 1    p1            p1

Moves: the table, in units of x, from all ranks together; a graph keeps to it but for S -> P, which costs p2. Eager mode
       costs more where p1 or p2 > 1: B -> B 2 p2 - 1, P -> B p1 p2, P -> P 2 p1 - 1.
Run:   ./launch.sh recipes/layouts/cross_placement.py [--graph] [--source 0 1] [--target 0 1 2 3]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/layouts/cross_placement.py [--graph]
Use it where two groups of ranks meet, as pipeline stages do; split the tensor on at least one side.
Source: J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032.
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

WORLD_SIZES = (4, 2, 3)
FITS = {  # no empty shards
    "rows": lambda given, ranks: given.rows >= ranks,
    "columns": lambda given, ranks: given.columns >= ranks,
}
SBPS = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1), "P": flow.sbp.partial_sum}


class CrossPlacement(flow.nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target

    def forward(self, *sources):
        return [source.to_global(placement=self.target, sbp=sbp) for source in sources for sbp in SBPS.values()]


class CrossPlacementGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, *sources):
        return self.module(*sources)


def run(graph=False, device="cpu", seed=0, rows=4, columns=6, source=(), target=()):
    """x (rows, columns) on the ranks `source` in each SBP, then its 16 conversions to the ranks `target`, by name.

    By default the first half of the ranks and the second; small integers, so that nothing rounds.
    """
    rng, rank, half = np.random.default_rng(seed), flow.env.get_rank(), flow.env.get_world_size() // 2
    source, target = source or range(half), target or range(half, flow.env.get_world_size())
    parts = rng.integers(-9, 10, (flow.env.get_world_size(), rows, columns)).astype(np.float32)
    parts[[rank for rank in range(len(parts)) if rank not in source]] = 0
    x = parts.sum(axis=0)

    ranks = flow.placement(device, list(source))
    sources = {name: flow.tensor(x, placement=ranks, sbp=sbp) for name, sbp in SBPS.items() if name != "P"}
    part = flow.tensor(parts[rank], device=device)  # local: each rank has its own
    sources["P"] = part.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    module = CrossPlacement(flow.placement(device, list(target)))
    model = run.kept = CrossPlacementGraph(module) if graph else module  # a freed graph may abort OneFlow
    converted = model(*sources.values())
    names = [f"{source} -> {target}" for source in sources for target in SBPS]
    return {**sources, **dict(zip(names, converted))}


def single_device(values, given):
    """What each conversion must be: the same tensor, since placement and SBP say only where its elements are."""
    return {name: values["B"] for name in values}


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
