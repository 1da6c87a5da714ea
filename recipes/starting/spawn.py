"""Spawn: one Python program starts its ranks itself, by multiprocessing, and gets their results back.

    in the program      rank 0
    x        (4, 5)     whole, a local tensor
    w        (5, 8)     whole, a local tensor
    out      (4, 8)     whole, a local tensor
    shards   (2, 7)     whole, a local tensor

The program is one process and no rank of the job. The ranks that it starts multiply in data parallel, as
data_parallel.py does: x S(0) @ w B = out S(0). What each holds of out comes back through a pipe, and `shards` has the
rows and columns of x, w and out on each of them, and whether an nn.Graph made out. A spawned process imports this file
anew, and OneFlow with it, so its rank must be in the environment before it starts.

Trap:  a rank that raises never ends while others live, so it must end by os._exit; the program sees the closed pipe,
       ends the other ranks, and raises itself. And the import in the first rank waits for the last, so large arguments
       of Process, more than fit into a pipe (64 KB), would hold up its start for ever: they go to the ranks when each
       has said that it is there, as no rank does when one has died in its import.
Moves: nothing between the ranks; x and w to each rank and its shard of out back, through pipes, pickled.
Run:   ./launch.sh recipes/starting/spawn.py [--graph] [--ranks 4]
       python recipes/starting/spawn.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 1 recipes/starting/spawn.py [--graph]
Use it when a program needs ranks for a while, as a test, a search or a service does. A launcher is better for a job:
it starts several hosts, marks and keeps the output of each rank, restarts, and has a time limit.
Source: Python documentation, multiprocessing, "Contexts and start methods".
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

WORLD_SIZES = (1,)
FITS = {"batch": lambda given, _: given.batch >= given.ranks}  # an empty shard would abort OneFlow


class DataParallel(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        return flow.matmul(x, self.w)


class DataParallelGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def multiply(x, w, graph, device):
    """On each of the ranks: the shapes of x and w there, its shard of out, and whether a graph has made that."""
    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    module = DataParallel(w, ranks)
    model = multiply.kept = DataParallelGraph(module) if graph else module  # a freed graph may abort OneFlow
    out = model(x)
    shapes = [tuple(tensor.to_local().shape) for tensor in (x, module.w)]
    return shapes, out.to_local().detach().numpy(), isinstance(model, flow.nn.Graph)


def in_rank(program):
    """Do what the program asks for and send back what comes of it. An error ends this rank at once, not with all."""
    import traceback

    try:
        program.send("here")  # all have met, and from now on this rank reads what comes
        function, arguments = program.recv()
        program.send(function(*arguments))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def listens(port):
    """Whether somebody listens on a port of this host."""
    import socket

    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def next_of_each(pipes):
    """What each rank sends next, by rank. A pipe that ends is the end of its rank, whatever the others wait for."""
    import multiprocessing.connection

    found = {}
    while len(found) < len(pipes):
        for pipe in multiprocessing.connection.wait([pipe for pipe in pipes if pipe not in found]):
            try:
                found[pipe] = pipe.recv()
            except (EOFError, OSError):
                raise RuntimeError(f"rank {pipes.index(pipe)} of {len(pipes)} ended without a result") from None
    return [found[pipe] for pipe in pipes]


def on_ranks(world_size, function, *arguments):
    """Start so many ranks, call the function on each, and return what they return, by rank."""
    import contextlib
    import multiprocessing
    import signal
    import socket
    import time

    with contextlib.suppress(ValueError):  # not the main thread, which alone hears signals
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # else the ranks would live on
    context, before = multiprocessing.get_context("spawn"), dict(os.environ)
    kept = socket.socket()  # while it is open, nobody else gets the port
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind(("127.0.0.1", 0))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1]), "WORLD_SIZE": str(world_size)}
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank))
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=in_rank, args=(theirs,), daemon=True))
            processes[-1].start()
            theirs.close()  # the rank's is the only one left, so its end is the end of the pipe
            pipes.append(ours)
            while rank == 0 and processes[0].is_alive() and not listens(where["MASTER_PORT"]):
                time.sleep(0.01)  # until OneFlow's rank 0 is there: a rank that comes too early sleeps for 10 s
        next_of_each(pipes)  # all are there
        for pipe in pipes:
            with contextlib.suppress(OSError):  # it has ended, as we see below
                pipe.send((function, arguments))
        results = next_of_each(pipes)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.pid:  # else a signal came while it was started, and it ends by itself
                process.kill()
        kept.close()
        os.environ.clear()
        os.environ.update(before)
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return results


def run(graph=False, device="cpu", seed=0, ranks=2, batch=4, in_features=5, out_features=8):
    """One forward pass on ranks of its own; returns by name x, w, out, and shards (ranks, 7)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    results = on_ranks(ranks, multiply, x, w, graph, device)
    out = np.concatenate([own for _, own, _ in results])
    shards = [[*shapes[0], *shapes[1], *own.shape, in_graph] for shapes, own, in_graph in results]
    run.says = [
        f"rank {rank} of {ranks} held x {one}, w {other}, out {own.shape}{', made by its graph' * in_graph}"
        for rank, ((one, other), own, in_graph) in enumerate(results)
    ]
    return {"x": flow.tensor(x), "w": flow.tensor(w), "out": flow.tensor(out), "shards": flow.tensor(shards)}


def single_device(values, given):
    """What must come back: the same product in numpy on one device, of which each rank held some rows."""
    rows = [len(part) for part in np.array_split(values["x"], given.ranks)]
    sizes = given.in_features, given.out_features
    shards = [[count, sizes[0], *sizes, count, sizes[1], given.graph] for count in rows]
    return {"out": values["x"] @ values["w"], "shards": np.array(shards)}


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
