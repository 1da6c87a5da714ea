"""Hello, ranks: what each rank knows of itself, and how all come to know it of all.

                      rank 0        rank 1        SBP
    mine     (2, 3)   row 0         row 1         S(0)
    all      (2, 3)   whole         whole         B

A row is (rank, local rank, node). What each number is for:

    world size  how many ranks the job has: list(range(n)) is the placement of all of them
    rank        0 to n-1 in the whole job: placements count in it, and it says which shard a rank holds
    local rank  0 to k-1 on its host: which GPU it should take
    node        which host, in the order of their first ranks: between two is the slower network
    device      cpu, or cuda: where its shards are; behind cuda the number of the GPU that it takes
    address     where the others reach it, and where all have met: rank 0's MASTER_ADDR and MASTER_PORT

Trap:  OneFlow tells hosts apart by their addresses, and believes LOCAL_RANK: two ranks of one address with one number
       leave the second without its shard, and no error. launch.sh sets it right; by hand, leave it unset. And
       a scheduler may give hosts their ranks in turns: which share one is seen here from the addresses of all.
Moves: an all-gather, (n-1)/n of `all` from each of n ranks; before it another, of the addresses.
Run:   ./launch.sh recipes/starting/hello_ranks.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/starting/hello_ranks.py [--graph]
Use it first on every new cluster: it shows whether all ranks are there, once each, and on which hosts.
Source: OneFlow documentation, "Launching distributed training" and oneflow.env.
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
FITS = {}


class Hello(flow.nn.Module):
    def forward(self, mine):
        return mine.to_global(sbp=flow.sbp.broadcast)


class HelloGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, mine):
        return self.module(mine)


def addresses():
    """This host's name, the address by which it is seen on the way to rank 0, and where rank 0 is."""
    import socket

    leader, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # nothing is sent
        way.connect((leader, int(port)))
        return socket.gethostname(), way.getsockname()[0], f"{leader}:{port}"


def from_each(address):
    """The addresses of all ranks, by rank. Collective."""
    found = flow.zeros(flow.env.get_world_size(), 4, dtype=flow.int64)
    flow.comm.all_gather_into_tensor(found, flow.tensor([[int(number) for number in address.split(".")]]))
    return found.numpy().tolist()


def run(graph=False, device="cpu"):
    """Every rank says who it is; returns by name mine (n, 3), a row from each rank, and all (n, 3) of int64."""
    world_size, rank, gpu = flow.env.get_world_size(), flow.env.get_rank(), flow.env.get_local_rank()
    host, own, leader = addresses()
    hosts = from_each(own)
    nodes = [one for k, one in enumerate(hosts) if one not in hosts[:k]]  # in the order of their first ranks
    node, local_rank = nodes.index(hosts[rank]), hosts[:rank].count(hosts[rank])
    run.says = [
        f"I am rank {rank} of {world_size}: local rank {local_rank} on node {node} of {len(nodes)}",
        f"on {device if device == 'cpu' else f'cuda:{gpu}'} of {host} ({own}); rank 0 is at {leader}",
    ]

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    mine = flow.tensor([[rank, local_rank, node]], device=device)
    mine = mine.to_global(placement=ranks, sbp=flow.sbp.split(0))  # the rows of all ranks, one below the other
    module = Hello()
    model = run.kept = HelloGraph(module) if graph else module  # a freed graph may abort OneFlow
    return {"mine": mine, "all": model(mine)}


def single_device(values, given):
    """What must come out: all rows, and the ranks in them in order."""
    rows = values["mine"].copy()
    rows[:, 0] = np.arange(len(rows))
    return {"all": rows}


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
