"""DistributedDataParallel: each rank trains with local tensors on its own rows, and one line averages the gradients.

    gradient = mean of the ranks'   rank 0                   rank 1                   SBP
    x           (4, 4)              whole, a local tensor    whole, a local tensor
    y           (4, 4)              whole, a local tensor    whole, a local tensor
    x of all    (8, 4)              rows 0-3                 rows 4-7                 S(0)
    y of all    (8, 4)              rows 0-3                 rows 4-7                 S(0)
    own w0      (4, 8)              whole, a local tensor    whole, a local tensor
    own w1      (8, 4)              whole, a local tensor    whole, a local tensor
    w0          (4, 8)              whole, a local tensor    whole, a local tensor
    w1          (8, 4)              whole, a local tensor    whole, a local tensor
    w0 grad     (4, 8)              whole, a local tensor    whole, a local tensor
    w1 grad     (8, 4)              whole, a local tensor    whole, a local tensor

It is train_data_parallel.py without global tensors. Each rank draws own weights; DistributedDataParallel overwrites
them with those of rank 0 (w0, w1), and from then on equal gradients keep all replicas equal, bit by bit. It puts hooks
into the module and returns the same one, so a state_dict has no prefix "module." as in PyTorch. Up to 10 weights share
one bucket, and one all-reduce, in backward().

Trap:  it averages over ranks, not over rows: with 4 rows here and 3 there, a row of the 3 counts more. --weigh rows
       multiplies each rank's loss by its rows x n / batch, which gives the gradient of the whole batch.
Trap:  zero_grad(set_to_none=True) clears nothing in OneFlow 0.9.0: a new .grad is the bucket again, with the old
       gradient in it. summed w0 grad is w0 grad + that of one more step, which zero_grad() would give alone.
Moves: every step an all-reduce, 2 (n-1)/n x the bytes of the weights from each of n ranks; once, the weights of rank 0.
Run:   ./launch.sh recipes/training/ddp.py [--weigh rows]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/ddp.py
Use it when a model with local tensors exists already; it cannot be mixed with global tensors, nor put into a graph.
Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704.
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
FITS = {"batch": lambda given, ranks: given.batch >= ranks, "weigh": ("ranks", "rows")}  # each rank has a row


class Network(flow.nn.Module):
    def __init__(self, w0, w1, share):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())
        self.share = share

    def forward(self, x, y):
        out = flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)
        return flow.nn.functional.mse_loss(out, y) * self.share


def run(device="cpu", seed=0, steps=3, weigh="ranks", batch=8, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns this rank's rows, weights before and after, gradients, and the losses."""
    world_size, rank = flow.env.get_world_size(), flow.env.get_rank()
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    rng = np.random.default_rng([seed, rank])  # another one on each rank
    own_w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    own_w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    x = flow.tensor(np.array_split(x, world_size)[rank], device=device)
    y = flow.tensor(np.array_split(y, world_size)[rank], device=device)
    own_w0 = flow.tensor(own_w0, device=device)
    own_w1 = flow.tensor(own_w1, device=device)
    share = len(x) * world_size / batch if weigh == "rows" else 1.0
    module = flow.nn.parallel.DistributedDataParallel(Network(own_w0, own_w1, share))
    tensors = {"own w0": own_w0, "own w1": own_w1, "w0": module.w0.detach().clone(), "w1": module.w1.detach().clone()}
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        update.zero_grad()
        loss = module(x, y)
        loss.backward()
        update.step()
        losses.append(loss.detach())
    tensors.update({"w0 grad": module.w0.grad.clone(), "w1 grad": module.w1.grad.clone()})
    update.zero_grad(set_to_none=True)  # the trap
    module(x, y).backward()
    tensors.update({"summed w0 grad": module.w0.grad, "summed w1 grad": module.w1.grad})

    losses = flow.stack(losses)
    flow.comm.all_reduce(losses)
    tensors.update({"new w0": module.w0, "new w1": module.w1, "losses": losses / world_size})
    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x_of_all = x.to_global(placement=ranks, sbp=flow.sbp.split(0))
    y_of_all = y.to_global(placement=ranks, sbp=flow.sbp.split(0))
    return {"x": x, "y": y, "x of all": x_of_all, "y of all": y_of_all, **tensors}


def single_device(values, given):
    """What must come out: the mean of what the ranks find in their rows, in numpy on one device."""
    n, weights, gradients, losses = flow.env.get_world_size(), [values["w0"], values["w1"]], [0, 0], []
    for step in range(given.steps + 1):
        last, gradients, loss = gradients, [0, 0], 0
        for x, y in zip(np.array_split(values["x of all"], n), np.array_split(values["y of all"], n)):
            share = len(x) / given.batch if given.weigh == "rows" else 1 / n
            hidden = np.maximum(x @ weights[0], 0)
            error = hidden @ weights[1] - y
            loss += share * (error**2).mean()
            error *= share * 2 / error.size
            gradients[0] = gradients[0] + x.T @ (error @ weights[1].T * (hidden > 0))
            gradients[1] = gradients[1] + hidden.T @ error
        if step < given.steps:
            weights = [w - 0.1 * gradient for w, gradient in zip(weights, gradients)]
            losses.append(loss)
    tensors = {"losses": np.array(losses)}
    for i in (0, 1):
        tensors.update({f"w{i} grad": last[i], f"summed w{i} grad": last[i] + gradients[i], f"new w{i}": weights[i]})
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
