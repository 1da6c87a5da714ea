"""Replicate, scatter, gather: PyTorch's nn.DataParallel step by step, and what an SBP for each tensor says instead.

                                   rank 0            rank 1            SBP
    x                  (8,)        whole             nothing           B
    y                  (8, 27)     whole             nothing           B
    table              (27, 4)     whole             nothing           B
    w                  (4, 27)     whole             nothing           B
    scattered x        (8,)        rows 0-3          rows 4-7          S(0)
    replicated table   (27, 4)     whole             whole             B
    replicated w       (4, 27)     whole             whole             B
    out                (8, 27)     rows 0-3          rows 4-7          S(0)
    gathered out       (8, 27)     whole             nothing           B
    table grad         (27, 4)     whole             nothing           B
    w grad             (4, 27)     whole             nothing           B

x is a text, each letter as its number; out = table[x] @ w guesses the next letter, and y is that letter, one-hot. Rank
0 has all and updates all: in each step it scatters x, replicates the weights, gathers out and takes the loss. Autograd
goes back by itself, from placement to placement: it scatters the gradient of out, S(0), and reduces the gradients of
the replicas, P, to rank 0. --way sbp says the same with two SBPs, x S(0) and weights B, from the start: then there is
nothing to scatter, replicate or gather, and the gradients need one all-reduce.

Trap:  without grad_sbp a gradient crosses a to_global in the SBP that it has: that of out would come as B, and each
       rank would go back through the whole batch.
Moves: (n-1)/n of x, out and the gradient of out, n-1 replicas of the weights from rank 0 and n-1 gradients to it, which
       eager mode does by collectives that send more: each of n ranks sends (n-1)/n of x, twice that of out, and
       2 (n-1)/n x the weights, and the replicas go down a tree. --way sbp: 2 (n-1)/n x the weights from each rank.
Run:   ./launch.sh recipes/by_hand/replicate_scatter_gather.py [--graph] [--way steps|sbp]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/replicate_scatter_gather.py [--graph]
Use it to read nn.DataParallel code; train with --way sbp, as train_data_parallel.py: rank 0 is no bottleneck there.
Source: PyTorch documentation, torch.nn.DataParallel.
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
FITS = {"batch": lambda given, ranks: given.batch >= ranks, "way": ("steps", "sbp")}  # no empty shards
ALPHABET = " abcdefghijklmnopqrstuvwxyz"


class StepByStep(flow.nn.Module):
    def __init__(self, table, w, ranks):
        super().__init__()
        self.table = flow.nn.Parameter(table.clone())
        self.w = flow.nn.Parameter(w.clone())
        self.ranks = ranks

    def forward(self, x, y):
        x = x.to_global(placement=self.ranks, sbp=flow.sbp.split(0))  # scatter
        table, w = flow._C.identity(self.table), flow._C.identity(self.w)  # else a graph aborts: register.cpp:75
        table = table.to_global(
            placement=self.ranks, sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.partial_sum
        )  # replicate
        w = w.to_global(placement=self.ranks, sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.partial_sum)
        out = flow.matmul(flow.nn.functional.embedding(x, table), w)  # each rank its own rows
        gathered = out.to_global(placement=y.placement, sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))  # gather
        return flow.nn.functional.mse_loss(gathered, y), x, table, w, out, gathered


class BySBP(flow.nn.Module):
    def __init__(self, table, w):
        super().__init__()
        self.table = flow.nn.Parameter(table.clone())
        self.w = flow.nn.Parameter(w.clone())

    def forward(self, x, y):
        out = flow.matmul(flow.nn.functional.embedding(x, self.table), self.w)
        return (flow.nn.functional.mse_loss(out, y),)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss, *between = self.module(x, y)
        loss.backward()
        module = self.module.to(flow.nn.Module)
        return loss, between, module.table.grad, module.w.grad


def run(graph=False, device="cpu", seed=0, steps=3, way="steps", batch=8, hidden=4):
    """Some steps of SGD; returns x, y, the weights, what moves in the last step, gradients, new weights, the losses."""
    from pydoc_data.topics import topics

    rng = np.random.default_rng(seed)
    letters = np.array([ALPHABET.index(letter) for letter in topics["assignment"].lower() if letter in ALPHABET])
    letters = np.resize(letters, batch + 1).astype(np.int32)
    x, y = letters[:-1], np.eye(len(ALPHABET), dtype=np.float32)[letters[1:]]  # from each letter to the next
    table = rng.standard_normal((len(ALPHABET), hidden), dtype=np.float32)
    w = rng.standard_normal((hidden, len(ALPHABET)), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    if way == "sbp":
        x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
        y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
        table = flow.tensor(table, placement=ranks, sbp=flow.sbp.broadcast)
        w = flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast)
        module = BySBP(table, w)
    else:
        first = flow.placement(device, [0])
        x = flow.tensor(x, placement=first, sbp=flow.sbp.broadcast)
        y = flow.tensor(y, placement=first, sbp=flow.sbp.broadcast)
        table = flow.tensor(table, placement=first, sbp=flow.sbp.broadcast)
        w = flow.tensor(w, placement=first, sbp=flow.sbp.broadcast)
        module = StepByStep(table, w, ranks)
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = run.kept = TrainingGraph(module, update) if graph else module  # a freed graph may abort OneFlow
    losses = []
    for _ in range(steps):
        if graph:
            loss, between, table_grad, w_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            loss, *between = model(x, y)
            loss.backward()
            update.step()
            table_grad, w_grad = module.table.grad, module.w.grad
        losses.append(loss)
    tensors = {"x": x, "y": y, "table": table, "w": w}
    tensors.update(zip(("scattered x", "replicated table", "replicated w", "out", "gathered out"), between))
    tensors.update({"table grad": table_grad, "w grad": w_grad, "new table": module.table, "new w": module.w})
    return {**tensors, "losses": flow.stack([loss.to_global(sbp=flow.sbp.broadcast) for loss in losses])}


def single_device(values, given):
    """What must come out: the same steps in numpy on one device."""
    x, table, w, losses = values["x"].astype(int), values["table"], values["w"], []
    for _ in range(given.steps):
        replicated = {"scattered x": x, "replicated table": table, "replicated w": w}
        out = table[x] @ w
        error = out - values["y"]
        losses.append((error**2).mean())
        error *= 2 / error.size
        table_grad, w_grad = np.zeros_like(table), table[x].T @ error
        np.add.at(table_grad, x, error @ w.T)
        table, w = table - 0.1 * table_grad, w - 0.1 * w_grad
    between = {**replicated, "out": out, "gathered out": out} if given.way == "steps" else {}
    tensors = {"table grad": table_grad, "w grad": w_grad, "new table": table, "new w": w}
    return {**between, **tensors, "losses": np.array(losses)}


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
