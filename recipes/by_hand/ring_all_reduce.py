"""Ring all-reduce by hand: each rank talks to its two neighbours only, and sends less than the tensor twice.

    rank r sends to r+1     rank 0                    rank 1                    SBP
    gradient   (8, 4)       its own                   its own                   P
    own        (8, 4)       whole, a local tensor     whole, a local tensor
    summed     (8, 4)       whole, a local tensor     whole, a local tensor
    reduced    (8, 4)       whole                     whole                     B

Every rank has a local tensor own of the same shape, and all want their sum. Each cuts its rows into n chunks. In n-1
rounds a rank sends one chunk to the next rank and adds what arrives: now it has one chunk of the sum, chunk r+1
(scatter-reduce). In n-1 more rounds the finished chunks go round the ring (all-gather). The same in one line is P -> B
of a global tensor: gradient is own in P, and reduced is gradient in B; its bytes are the same.

Trap:  send and recv wait for the other side. Where all ranks send first, none receives, and all wait for ever; here
       the even ranks send first and the odd ones receive first, which works on any number of ranks, odd or even.
Trap:  chunks may differ in length. recv needs no shape, as send tells it first, in a message of its own.
Moves: 2 (n-1) chunks from each rank: 2 (n-1)/n x the bytes of the tensor, 1 x on 2 ranks and below 2 x on any number.
Run:   ./launch.sh recipes/by_hand/ring_all_reduce.py
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/ring_all_reduce.py
Use it to see what an all-reduce does; in your program write to_global(sbp=flow.sbp.broadcast) or flow.comm.all_reduce.
Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
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
FITS = {"in_features": lambda given, ranks: given.in_features >= ranks}  # each rank has a chunk of rows


def pass_on(chunk):
    """Send a chunk to the next rank of the ring and return the one that the rank before has sent."""
    world_size, rank = flow.env.get_world_size(), flow.env.get_rank()
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size
    if rank % 2 == 0:
        flow.comm.send(chunk, following)
        return flow.comm.recv(preceding)
    arrived = flow.comm.recv(preceding)
    flow.comm.send(chunk, following)
    return arrived


def ring_all_reduce(tensor):
    """The sum of the local tensors of all ranks, on each of them."""
    world_size, rank = flow.env.get_world_size(), flow.env.get_rank()
    cuts = [len(tensor) * i // world_size for i in range(world_size + 1)]
    chunks = [tensor[start:stop] for start, stop in zip(cuts, cuts[1:])]
    for i in range(world_size - 1):  # scatter-reduce: each round, what arrives is a sum of one rank more
        arrived = pass_on(chunks[(rank - i) % world_size])
        chunks[(rank - i - 1) % world_size] = chunks[(rank - i - 1) % world_size] + arrived
    for i in range(world_size - 1):  # all-gather: what arrives is finished
        chunks[(rank - i) % world_size] = pass_on(chunks[(rank + 1 - i) % world_size])
    return flow.cat(chunks)


def run(device="cpu", seed=0, steps=1, in_features=8, out_features=4):
    """Returns the tensors of the table by name; each rank draws its own, and steps times the ring adds them up."""
    rng = np.random.default_rng([seed, flow.env.get_rank()])
    own = flow.tensor(rng.standard_normal((in_features, out_features), dtype=np.float32), device=device)
    for _ in range(steps):
        summed = ring_all_reduce(own)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    gradient = own.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    reduced = gradient.to_global(sbp=flow.sbp.broadcast)
    return {"gradient": gradient, "own": own, "summed": summed, "reduced": reduced}


def single_device(values, given):
    """What must come out: gradient is the sum already, when it is read."""
    return {"summed": values["gradient"], "reduced": values["gradient"]}


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
