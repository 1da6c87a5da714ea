"""Local to global and back: what the ranks' own tensors become, and what only looks local but needs every rank.

    mine, of shape (4, 6), differs       rank 0         rank 1          SBP
    rows    = mine in S(0)   (8, 6)      rows 0-3       rows 4-7        S(0)
    columns = mine in S(1)   (4, 12)     columns 0-5    columns 6-11    S(1)
    total   = mine in P      (4, 6)      its mine       its mine        P
    first   = mine in B      (4, 6)      whole          whole           B
    sliced  = first in S(0)  (4, 6)      rows 0-1       rows 2-3        S(0)
    noise   = randn in B     (4, 6)      whole          whole           B
    blocks  = randn in S(0)  (4, 6)      rows 0-1       rows 2-3        S(0)

A local tensor becomes a block of the global one, so S(0) and S(1) put the ranks' tensors side by side, P adds them up,
and B takes that of rank 0. `to_local` gives the block back: block = rows.to_local() is mine.

Trap:  to split a tensor that every rank has whole, go through B, as sliced does; straight to S(0) it grows n times
       larger: flow.nn.Linear(8, 12).to_global(ranks, flow.sbp.split(0)) has 24 outputs on 2 ranks.
Trap:  numpy(), item() and print need every rank, also those outside the placement, and give each the full value, as in
       read = total.numpy(). `if rank == 0: print(total)` waits for ever.
Trap:  after manual_seed, randn in B is the same on every rank, and in S(0) each rank draws a block of its own: the same
       seed gives another tensor on another number of ranks.
Moves: first, 1 x its bytes to each rank but rank 0; read, an all-gather or all-reduce; nothing for the others.
Run:   ./launch.sh recipes/layouts/global_and_local.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/layouts/global_and_local.py [--graph]
Use it where data enters and leaves: each rank reads its own batch (S(0)), every rank makes the same weight (B).
Source: OneFlow documentation, "Global Tensor".
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
FITS = {"rows": lambda given, ranks: given.rows >= ranks}  # sliced splits them; an empty shard would abort OneFlow


class GlobalAndLocal(flow.nn.Module):
    def forward(self, first):
        return first.to_global(sbp=flow.sbp.split(0))


class GlobalAndLocalGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, first):  # a graph takes global tensors only: with local ones it is wrong, then aborts
        return self.module(first)


def run(graph=False, device="cpu", seed=0, rows=4, columns=6):
    """Returns the tensors of the table by name, and the local mine, block and read; mine is (rows, columns)."""
    flow.manual_seed(seed)
    first_element = rows * columns * flow.env.get_rank()
    mine = np.arange(first_element, first_element + rows * columns, dtype=np.float32).reshape(rows, columns)
    mine = flow.tensor(mine, device=device)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    rows_of_all = mine.to_global(placement=ranks, sbp=flow.sbp.split(0))
    columns_of_all = mine.to_global(placement=ranks, sbp=flow.sbp.split(1))
    total = mine.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    first = mine.to_global(placement=ranks, sbp=flow.sbp.broadcast)
    module = GlobalAndLocal()
    model = run.kept = GlobalAndLocalGraph(module) if graph else module  # a freed graph may abort OneFlow
    sliced = model(first)
    noise = flow.randn(rows, columns, placement=ranks, sbp=flow.sbp.broadcast)
    blocks = flow.randn(rows, columns, placement=ranks, sbp=flow.sbp.split(0))

    tensors = {"mine": mine, "rows": rows_of_all, "columns": columns_of_all, "total": total, "first": first}
    tensors.update({"sliced": sliced, "noise": noise, "blocks": blocks})
    return {**tensors, "block": rows_of_all.to_local(), "read": flow.tensor(total.numpy(), device=device)}


def single_device(values, given):
    """What the tensors must be, from those of all ranks one below the other: 0, 1, 2, ..."""
    rows, columns = values["mine"].shape
    ranks = np.arange(values["rows"].size, dtype=np.float64).reshape(-1, rows, columns)
    total = ranks.sum(axis=0)
    tensors = {"rows": np.concatenate(ranks, axis=0), "columns": np.concatenate(ranks, axis=1), "total": total}
    return {**tensors, "first": ranks[0], "sliced": ranks[0], "block": values["mine"], "read": total}


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
