"""Asynchronous update: rank 0 takes each gradient as it comes, however old the weights that it was made from.

    the last worker is slow   rank 0      rank 1      SBP
    x0           (4, 4)       whole       nothing     B
    y0           (4, 4)       whole       nothing     B
    x1           (4, 4)       nothing     whole       B
    y1           (4, 4)       nothing     whole       B
    w0           (4, 8)       whole       nothing     B
    w1           (8, 4)       whole       nothing     B
    late w0      (4, 8)       whole       nothing     B
    late w1      (8, 4)       whole       nothing     B
    stale w0     (4, 8)       whole       nothing     B
    stale w1     (8, 4)       whole       nothing     B

The weights live on rank 0. In each step every worker k fetches a copy and sends back the gradient of its rows xk and
yk, and rank 0 takes the gradients one by one. The slow one fetches only when all synchronise; in between it goes on
with the copy that it has. The order is a schedule, not a race, so that a run can be repeated and proven.

late:  all synchronise in every step. The last gradient meets weights that the others have changed already, which does
       no harm: it was made from the same weights, and plain SGD only adds up. It is the step of parameter_server.py.
stale: all synchronise every sync_every steps. In between the gradients of the slow worker are of weights 1, 2, ...
       steps old, and the result is another one. sync_every is the bound: no gradient is older than sync_every - 1.
Moves: in a step that synchronises (n-1) x the weights' bytes from rank 0, else (n-2) x; 1 x from each other rank.
Run:   ./launch.sh recipes/by_hand/async_update.py [--sync-every 3]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/async_update.py
Use it when workers differ much in speed, and watch the loss; else let all wait for all: train_data_parallel.py.
Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
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
FITS = {"batch": lambda given, ranks: given.batch >= ranks}  # no empty shards


def gradients_of(weights, x, y, size):
    """A worker's part of the loss, and its gradients: where the worker is, there they are."""
    out = flow.matmul(flow.relu(flow.matmul(x, weights[0])), weights[1])
    part = flow.nn.functional.mse_loss(out, y, reduction="sum") / size  # a worker may have fewer rows
    return part.detach(), flow.autograd.grad(part, weights)


def train(weights, xs, ys, size, steps, sync_every):
    """Train the weights in place; returns the loss of each step, as the workers saw it."""
    server, losses, copies = weights[0].placement, [], [None] * len(xs)
    for step in range(steps):
        for k, x in enumerate(xs):
            slow = k == len(xs) - 1
            if step % sync_every == 0 or not slow:
                fetched = [w.to_global(placement=x.placement, sbp=flow.sbp.broadcast) for w in weights]
                copies[k] = [w.detach().requires_grad_() for w in fetched]
        results = [gradients_of(copy, x, y, size) for copy, x, y in zip(copies, xs, ys)]  # all at the same time
        for _, gradients in results:  # they arrive one by one
            for w, gradient in zip(weights, gradients):
                w -= 0.1 * gradient.to_global(placement=server, sbp=flow.sbp.broadcast)
        losses.append(sum(part.to_global(placement=server, sbp=flow.sbp.broadcast) for part, _ in results))
    return flow.stack(losses)


def run(device="cpu", seed=0, steps=4, sync_every=2, batch=8, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns the rows of each worker, the weights before and after, and the losses."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    world_size = flow.env.get_world_size()
    server = flow.placement(device, [0])
    workers = [flow.placement(device, [k]) for k in range(world_size)]
    blocks = list(zip(workers, np.array_split(x, world_size), np.array_split(y, world_size)))
    xs = [flow.tensor(rows, placement=worker, sbp=flow.sbp.broadcast) for worker, rows, _ in blocks]
    ys = [flow.tensor(rows, placement=worker, sbp=flow.sbp.broadcast) for worker, _, rows in blocks]
    w0 = flow.tensor(w0, placement=server, sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=server, sbp=flow.sbp.broadcast)
    late, stale = [w0.clone(), w1.clone()], [w0.clone(), w1.clone()]
    late_losses = train(late, xs, ys, y.size, steps, sync_every=1)
    losses = train(stale, xs, ys, y.size, steps, sync_every)

    tensors = {f"{name}{k}": rows for k, pair in enumerate(zip(xs, ys)) for name, rows in zip("xy", pair)}
    tensors.update({"w0": w0, "w1": w1, "late w0": late[0], "late w1": late[1], "late losses": late_losses})
    return {**tensors, "stale w0": stale[0], "stale w1": stale[1], "losses": losses}


def single_device(values, given):
    """What must come out: in numpy, with the weights that the slow worker has fetched last."""
    x, y = (np.concatenate([values[name] for name in values if name[0] == kind]) for kind in "xy")
    slow = len(x) - len(values[[name for name in values if name[0] == "x"][-1]])  # its first row
    tensors = {}
    for schedule, sync_every in (("late ", 1), ("stale ", given.sync_every)):
        weights, losses = [values["w0"], values["w1"]], []
        old = weights
        for step in range(given.steps):
            old = weights if step % sync_every == 0 else old
            total, loss = [0, 0], 0
            for (w0, w1), rows in ((weights, slice(0, slow)), (old, slice(slow, len(x)))):
                hidden = np.maximum(x[rows] @ w0, 0)
                error = hidden @ w1 - y[rows]
                loss += (error**2).sum() / y.size
                error *= 2 / y.size
                total[0] = total[0] + x[rows].T @ (error @ w1.T * (hidden > 0))
                total[1] = total[1] + hidden.T @ error
            weights = [w - 0.1 * gradient for w, gradient in zip(weights, total)]
            losses.append(loss)
        tensors.update({f"{schedule}w0": weights[0], f"{schedule}w1": weights[1]})
        tensors["losses" if schedule == "stale " else "late losses"] = np.array(losses)
    return tensors


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
