"""Loss placement: gather the outputs on one rank and take the loss there, or take a part of the loss on each rank.

                                      rank 0            rank 1            SBP
    x                    (8, 4)       rows 0-3          rows 4-7          S(0)
    y                    (8, 4)       whole             nothing           B
    out                  (8, 4)       rows 0-3          rows 4-7          S(0)
    out at the loss      (8, 4)       whole             nothing           B
    w0 grad              (4, 8)       whole             whole             B
    w1 grad              (8, 4)       whole             whole             B

The labels y decide where the loss is: out goes to the placement and SBP of y. --loss first: rank 0 has y whole, and in
time holds out and the gradient of out whole, n times the share of any other rank. --loss other: so does the last rank,
which does nothing else (3 ranks or more). --loss each: y is split like out, each rank's loss is a part of a sum, P, and
out stays where it is. Losses, gradients and weights are the same.

Trap:  the gradient of out comes back in the SBP in which out was gathered, B: every rank would get it whole and go back
       through the whole batch. grad_sbp=S(0) gives each rank the gradient of its own rows.
Moves: each: no output. first: (n-1)/n of out to rank 0 and as much of its gradient back, for either of which eager mode
       lets each of n ranks send (n-1)/n. other: out and its gradient, once. And in each step the all-reduce of data
       parallelism, 2 (n-1)/n x the weights from each of n ranks that hold x.
Run:   ./launch.sh recipes/by_hand/loss_placement.py [--graph] [--loss each|first|other]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/loss_placement.py [--graph]
Use it to choose: take "each" unless the loss needs all outputs in one place, as a ranking of the whole batch does.
Source: OneFlow documentation, oneflow.Tensor.to_global (grad_sbp).
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


LOSSES = ("each", "first", "other")  # the last one leaves n-1 ranks to work, of 3 or more
REFUSED = "takes each or first, or other on 3 ranks or more: type --loss first"
FITS = {
    "batch": lambda given, ranks: given.batch >= ranks - (given.loss == "other"),  # no empty shards
    "loss": lambda given, ranks: None if given.loss in LOSSES[:ranks] else REFUSED,
}


class Replicas(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, x, y):
        out = flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)
        there = out.to_global(placement=y.placement, sbp=y.sbp, grad_sbp=flow.sbp.split(0))
        return flow.nn.functional.mse_loss(there, y), out, there


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss, out, there = self.module(x, y)
        loss.backward()
        module = self.module.to(flow.nn.Module)
        return loss, out, there, module.w0.grad, module.w1.grad


def run(graph=False, device="cpu", seed=0, steps=3, loss="first", batch=8, in_features=4, hidden=8, out_features=4):
    """Some steps of SGD; returns x, y, weights before and after, gradients, the last outputs, and the losses."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    world_size = flow.env.get_world_size()
    rank = world_size - 1 if loss == "other" else 0
    ranks = flow.placement(device, list(range(world_size - (loss == "other"))))
    one = flow.placement(device, [rank])
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    if loss == "each":
        y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    else:
        y = flow.tensor(y, placement=one, sbp=flow.sbp.broadcast)
    w0 = flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast)
    module = Replicas(w0, w1)
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = run.kept = TrainingGraph(module, update) if graph else module  # a freed graph may abort OneFlow
    losses = []
    for _ in range(steps):
        if graph:
            value, out, there, w0_grad, w1_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            value, out, there = model(x, y)
            value.backward()
            update.step()
            w0_grad, w1_grad = module.w0.grad, module.w1.grad
        losses.append(value)

    tensors = {"x": x, "y": y, "w0": w0, "w1": w1, "out": out, "out at the loss": there}
    tensors.update({"w0 grad": w0_grad, "w1 grad": w1_grad, "new w0": module.w0, "new w1": module.w1})
    return {**tensors, "losses": flow.stack([value.to_global(sbp=flow.sbp.broadcast) for value in losses])}


def single_device(values, given):
    """What must come out: the same steps in numpy on one device."""
    weights, losses = [values["w0"], values["w1"]], []
    for _ in range(given.steps):
        hidden = np.maximum(values["x"] @ weights[0], 0)
        out = hidden @ weights[1]
        error = out - values["y"]
        losses.append((error**2).mean())
        error *= 2 / error.size
        gradients = [values["x"].T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]
        weights = [w - 0.1 * gradient for w, gradient in zip(weights, gradients)]
    tensors = {"out": out, "out at the loss": out, "w0 grad": gradients[0], "w1 grad": gradients[1]}
    return {**tensors, "new w0": weights[0], "new w1": weights[1], "losses": np.array(losses)}


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
