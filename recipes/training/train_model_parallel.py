"""Train model parallel: split the first weight by columns and the second by rows, and add up once each way.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0         rank 1         SBP
    x                  (8, 4)                 whole          whole          B
    y                  (8, 4)                 whole          whole          B
    w0                 (4, 8)                 columns 0-3    columns 4-7    S(1)
    w1                 (8, 4)                 rows 0-3       rows 4-7       S(0)
    w0 grad            (4, 8)                 columns 0-3    columns 4-7    S(1)
    w1 grad            (8, 4)                 rows 0-3       rows 4-7       S(0)
    x grad             (8, 4)                 whole          whole          B
    w0 momentum_buf    (4, 8)                 columns 0-3    columns 4-7    S(1)
    w1 momentum_buf    (8, 4)                 rows 0-3       rows 4-7       S(0)

x @ w0 is split by columns, and so is its relu: just what w1, split by rows, multiplies without moving. The product is a
partial sum, and P -> B is the only all-reduce forward. Backward, a layer before this one needs the gradient of x, a
partial sum again: the only all-reduce backward. A first layer does not, and sends nothing: --input-gradient no.

Moves: forward an all-reduce of out, 2 (n-1)/n x (batch, out_features) from each of n ranks; backward one of x's
       gradient, 2 (n-1)/n x (batch, in_features). Weights, gradients and optimizer state stay where they are.
Run:   ./launch.sh recipes/training/train_model_parallel.py [--graph] [--input-gradient yes|no]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/train_model_parallel.py [--graph]
Use it when a layer does not fit on one device and links are fast: it sends activations in every layer.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
        arXiv:1909.08053, section 3.
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
FITS = {"hidden": lambda given, ranks: given.hidden >= ranks, "input_gradient": ("yes", "no")}  # no empty shards


class ModelParallel(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, x, y):
        hidden = flow.relu(flow.matmul(x, self.w0))
        out = flow.matmul(hidden, self.w1).to_global(sbp=flow.sbp.broadcast)
        return flow.nn.functional.mse_loss(out, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        if x.requires_grad:
            x.retain_grad()  # an input of a graph is no leaf, and would lose its gradient
        loss = self.module(x, y)
        loss.backward()  # in a graph this stands for the update too
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        x_grad = x.grad.to_global(sbp=flow.sbp.broadcast) if x.requires_grad else None  # a graph would leave it P
        return loss, module.w0.grad, module.w1.grad, x_grad


def run(
    graph=False, device="cpu", seed=0, steps=3, input_gradient="yes", batch=8, in_features=4, hidden=8, out_features=4
):
    """Some steps in float32; returns x, y, the weights before and after, gradients, optimizer state, and the losses."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.broadcast, requires_grad=input_gradient == "yes")
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.broadcast)
    w0 = flow.tensor(w0, placement=ranks, sbp=flow.sbp.split(1))
    w1 = flow.tensor(w1, placement=ranks, sbp=flow.sbp.split(0))
    module = ModelParallel(w0, w1)
    update = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = run.kept = TrainingGraph(module, update) if graph else module  # a freed graph may abort OneFlow
    losses = []
    for _ in range(steps):
        if graph:
            loss, w0_grad, w1_grad, x_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            x.grad = None
            loss = model(x, y)
            loss.backward()
            update.step()
            w0_grad, w1_grad, x_grad = module.w0.grad, module.w1.grad, x.grad
        losses.append(loss)

    tensors = {"x": x, "y": y, "w0": w0, "w1": w1, "w0 grad": w0_grad, "w1 grad": w1_grad}
    if x_grad is not None:
        tensors["x grad"] = x_grad
    for i in (0, 1):
        in_graph, eager = f"module.w{i}-momentum", "momentum_buf"
        state = model.state_dict()[in_graph] if graph else update.state_dict()["state"][i][eager]
        tensors[f"w{i} momentum_buf"] = state
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "losses": flow.stack(losses)}


def single_device(values, given):
    """What must come out: the same steps in numpy on one device."""
    weights, momentum, losses = [values["w0"], values["w1"]], [0, 0], []
    for _ in range(given.steps):
        hidden = np.maximum(values["x"] @ weights[0], 0)
        error = hidden @ weights[1] - values["y"]
        losses.append((error**2).mean())
        error *= 2 / error.size
        back = error @ weights[1].T * (hidden > 0)
        gradients = [values["x"].T @ back, hidden.T @ error, back @ weights[0].T]
        for i in (0, 1):
            momentum[i] = 0.9 * momentum[i] + gradients[i]
            weights[i] = weights[i] - 0.1 * momentum[i]
    expected = {"losses": np.array(losses), "new w0": weights[0], "new w1": weights[1]}
    expected.update(zip(("w0 grad", "w1 grad", "x grad"), gradients))
    return {name: value for name, value in expected.items() if name in values}


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
