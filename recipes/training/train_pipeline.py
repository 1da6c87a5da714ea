"""Train a pipeline: a layer on each rank, and micro-batches, so that all ranks work at the same time.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0     rank 1     SBP
    x                  (8, 4)                 whole      nothing    B
    y                  (8, 4)                 nothing    whole      B
    w0                 (4, 8)                 whole      nothing    B
    w1                 (8, 4)                 nothing    whole      B
    w0 momentum_buf    (4, 8)                 whole      nothing    B
    w1 momentum_buf    (8, 4)                 nothing    whole      B

Autograd crosses placements as to_global does: the gradient of a stage's input goes back to the rank that it came from.
Weights, gradients and optimizer state never move. With one batch one stage works at a time; a graph cuts the batch into
m micro-batches (set_gradient_accumulation_steps), and stage 0 takes the next while stage 1 has the first. The share of
time in which the n stages are idle falls from (n-1)/n to (n-1)/(m+n-1), and the weights come out the same. Eager mode
runs one micro-batch after the other, through all stages: the same values, and no overlap.

Moves: forward each stage's output, backward its gradient, once: (batch, hidden) from each rank to each neighbour.
Run:   ./launch.sh recipes/training/train_pipeline.py [--graph] [--micro-batches 4]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/train_pipeline.py [--graph]
Use it when there are many layers, or links are slow: it moves the least. Take m some times n.
Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
        arXiv:1811.06965.
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
FITS = {"batch": lambda given, ranks: given.batch % given.micro_batches == 0}


class Stage(flow.nn.Module):
    def __init__(self, w, rank, last):
        super().__init__()
        self.rank, self.last = rank, last
        self.w = flow.nn.Parameter(w.clone())

    def forward(self, x):
        w = flow._C.identity(
            self.w
        )  # without it, in a graph with stages and more micro-batches than stages, the weights
        out = flow.matmul(x.to_global(placement=self.rank), w)  # come out wrong now and then, and nothing says so
        return out if self.last else flow.relu(out)


class Pipeline(flow.nn.Module):
    def __init__(self, weights, ranks):
        super().__init__()
        for k, w in enumerate(weights):
            setattr(self, f"stage{k}", Stage(w, ranks[k], last=k == len(weights) - 1))
        self.stages = len(weights)

    def forward(self, x, y):
        for k in range(self.stages):
            x = getattr(self, f"stage{k}")(x)
        return flow.nn.functional.mse_loss(x, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer, micro_batches):
        super().__init__()
        self.module = module
        for k in range(module.stages):
            stage = getattr(module, f"stage{k}")
            getattr(self.module, f"stage{k}").to(flow.nn.graph.GraphModule).set_stage(k, stage.rank)
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this stands for the division by m, the sum and the update too
        return loss


def run(graph=False, device="cpu", seed=0, steps=3, micro_batches=2, batch=8, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns x, y, weights, gradients (eager), optimizer state, and losses."""
    rng, n = np.random.default_rng(seed), flow.env.get_world_size()
    widths = [in_features, *[hidden] * (n - 1), out_features]
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    weights = [rng.standard_normal(shape, dtype=np.float32) for shape in zip(widths, widths[1:])]

    ranks = [flow.placement(device, [rank]) for rank in range(n)]
    x = flow.tensor(x, placement=ranks[0], sbp=flow.sbp.broadcast)
    y = flow.tensor(y, placement=ranks[-1], sbp=flow.sbp.broadcast)
    weights = [flow.tensor(w, placement=rank, sbp=flow.sbp.broadcast) for w, rank in zip(weights, ranks)]
    module = Pipeline(weights, ranks)
    update = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = run.kept = TrainingGraph(module, update, micro_batches) if graph else module  # a freed graph may abort
    losses = []
    for _ in range(steps):
        if graph:
            losses.append(model(x, y).mean())  # of the m micro-batches
        else:
            update.zero_grad(set_to_none=True)
            parts = [model(*part) / micro_batches for part in zip(x.chunk(micro_batches), y.chunk(micro_batches))]
            for loss in parts:
                loss.backward()
            update.step()
            losses.append(sum(parts))

    tensors = {"x": x, "y": y, **{f"w{k}": w for k, w in enumerate(weights)}}
    stages = [getattr(module, f"stage{k}") for k in range(n)]
    if not graph:
        tensors.update({f"w{k} grad": stage.w.grad for k, stage in enumerate(stages)})
    for k in range(n):
        in_graph, eager = f"module.stage{k}.w-momentum", "momentum_buf"
        tensors[f"w{k} {eager}"] = model.state_dict()[in_graph] if graph else update.state_dict()["state"][k][eager]
    return {**tensors, **{f"new w{k}": stage.w for k, stage in enumerate(stages)}, "losses": flow.stack(losses)}


def single_device(values, given):
    """What must come out: the same steps with the whole batch in numpy on one device."""
    weights = [values[name] for name in sorted(values, key=len) if name[0] == "w" and name[1:].isdigit()]
    momentum, losses = [0] * len(weights), []
    for _ in range(given.steps):
        inputs = [values["x"]]
        for w in weights[:-1]:
            inputs.append(np.maximum(inputs[-1] @ w, 0))
        error = inputs[-1] @ weights[-1] - values["y"]
        losses.append((error**2).mean())
        back = 2 / error.size * error
        for k in reversed(range(len(weights))):
            momentum[k] = 0.9 * momentum[k] + inputs[k].T @ back
            back = back @ weights[k].T * (inputs[k] > 0)
            weights[k] = weights[k] - 0.1 * momentum[k]
    return {"losses": np.array(losses), **{f"new w{k}": w for k, w in enumerate(weights)}}


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
