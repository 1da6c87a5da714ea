"""Checkpoint: weights and optimizer state go whole to a folder, and from it onto any number of ranks, in any SBP.

                                      rank 0            rank 1            SBP
    w0                   (4, 8)       whole             whole             B
    saved w0             (4, 8)       whole             whole             B
    saved w0 momentum    (4, 8)       whole             whole             B
    loaded w0            (4, 8)       whole             nothing           B
    loaded w0 momentum   (4, 8)       whole             nothing           B
    new w0               (4, 8)       rows 0-1          rows 2-3          S(0)
    new w0 momentum      (4, 8)       rows 0-1          rows 2-3          S(0)
    w0 grad              (4, 8)       rows 0-1          rows 2-3          S(0)

By itself it trains in data parallel, saves, loads into a new module with split weights (--weights), and trains on. With
--folder it goes on from the checkpoint that is there, if any, and saves the next; the number of ranks and --weights may
be others each time. flow.load gives whole tensors on rank 0, and load_state_dict takes them to the ranks and SBP of the
model, bit by bit. Training goes on as if it had never stopped: bitwise with as many ranks and the same --weights, else
within the rounding of sums.

Crash: rank 0 writes to `unfinished`, which os.replace names by its step when it is complete. Then the older one goes.
Trap:  if flow.load fails on rank 0, the others wait for ever. So rank 0 first looks at all of it alone and tells them;
       a checkpoint that is cut short, or of another model or dtype, is refused by every rank before any loads it.
Moves: to save, an all-gather of each split tensor, (n-1)/n of it from each of n ranks, nothing of a whole one; to load,
       n-1 times each tensor from all ranks together; S(1) adds an all-to-all to both. A step: the all-reduce of data
       parallel or, with split weights, an all-gather and a reduce-scatter: 2 (n-1)/n x the weights from each rank.
Run:   ./launch.sh recipes/data_and_state/checkpoint.py [--graph] [--weights rows|columns|whole] [--folder FOLDER]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/checkpoint.py [--graph]
Use it in every run that must outlive its job. Only rank 0 needs to see the folder.
Source: OneFlow documentation, oneflow.save and oneflow.load.
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

WORLD_SIZES = (2, 1, *range(3, 65))
SBPS = {"rows": flow.sbp.split(0), "columns": flow.sbp.split(1), "whole": flow.sbp.broadcast}


class Sharded(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0)
        self.w1 = flow.nn.Parameter(w1)

    def forward(self, x, y):
        w0, w1 = flow._C.identity(self.w0), flow._C.identity(self.w1)  # else a graph aborts: register.cpp:75
        w0, w1 = w0.to_global(sbp=flow.sbp.broadcast), w1.to_global(sbp=flow.sbp.broadcast)
        return flow.nn.functional.mse_loss(flow.matmul(flow.relu(flow.matmul(x, w0)), w1), y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()
        module = self.module.to(flow.nn.Module)
        return loss, module.w0.grad, module.w1.grad


def save(state, folder, step):
    """Put a checkpoint into the folder, named by its step. Collective."""
    import shutil

    if flow.env.get_rank() == 0:
        shutil.rmtree(f"{folder}/unfinished", ignore_errors=True)  # a crash has left it
    flow.save(state, f"{folder}/unfinished", global_dst_rank=0)  # each tensor whole to rank 0, which alone writes
    if flow.env.get_rank() == 0:
        older = newest(folder)
        os.replace(f"{folder}/unfinished", f"{folder}/{step}")
        shutil.rmtree(f"{folder}/{older}", ignore_errors=True)
    flow.comm.barrier()  # no rank goes on before it is there


def newest(folder):
    """The step of the checkpoint in the folder, 0 if there is none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def by_name(state, graph):
    """The tensors in a checkpoint of this lesson."""
    kept = [state[f"module.w{i}-momentum"] if graph else state["optimizer"]["state"][i]["momentum_buf"] for i in (0, 1)]
    return {**state["module"], "w0 momentum": kept[0], "w1 momentum": kept[1]}


def from_rank_0(text):
    """The text that rank 0 gives, on every rank. Collective."""
    letters = np.zeros(1000, dtype=np.int32)
    letters[: len(text[:1000])] = [ord(letter) for letter in text[:1000]]
    letters = flow.tensor(letters)
    flow.comm.broadcast(letters, 0)
    return "".join(chr(letter) for letter in letters.numpy() if letter)


def wrong(given):
    """What is wrong with the newest checkpoint in given.folder, or "". Loads it on this rank alone, into no model."""
    try:
        os.makedirs(given.folder, exist_ok=True)
        step = newest(given.folder)
    except OSError as error:
        return f"{error.strerror}: name another folder"
    if not step:
        return ""
    try:
        state = flow.load(f"{given.folder}/{step}")
    except Exception as error:  # whatever a file that is cut short makes pickle, protobuf or OneFlow raise
        return f"checkpoint {step} is not whole ({type(error).__name__}): remove {given.folder}/{step}"
    try:
        found = {f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in by_name(state, given.graph).items()}
    except (AttributeError, IndexError, KeyError, TypeError):
        return f"checkpoint {step} is of another optimizer, or eager and not --graph: name another folder"
    shapes = {"w0": (given.in_features, given.hidden), "w1": (given.hidden, given.out_features)}
    if found != {f"{name}{kind} {shapes[name]} {flow.float32}" for name in shapes for kind in ("", " momentum")}:
        return f"checkpoint {step} is of another model, {', '.join(sorted(found))}: name another folder"
    return ""


FITS = {
    "weights": tuple(SBPS),
    "batch": lambda given, ranks: given.batch >= ranks,  # no empty shards, here and below
    "in_features": lambda given, ranks: given.weights != "rows" or given.in_features >= ranks,
    "hidden": lambda given, ranks: given.weights == "whole" or given.hidden >= ranks,
    "out_features": lambda given, ranks: given.weights != "columns" or given.out_features >= ranks,
    "folder": lambda given, ranks: given.folder and from_rank_0(wrong(given) if flow.env.get_rank() == 0 else ""),
}


def run(
    graph=False,
    device="cpu",
    seed=0,
    steps=2,
    weights="rows",
    batch=8,
    in_features=4,
    hidden=8,
    out_features=4,
    folder="",
):
    """Train, save, load and train on; returns the tensors of the table by name, w1's like w0's, x, y and the losses."""
    import tempfile

    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    tensors, losses, run.kept = {"x": x, "y": y}, [], []  # kept: a freed graph may abort OneFlow
    stages = {"new": SBPS[weights]} if folder else {"saved": flow.sbp.broadcast, "new": SBPS[weights]}
    temporary = None if folder else tempfile.TemporaryDirectory()
    folder = folder or temporary.name
    for stage, sbp in stages.items():
        module = Sharded(flow.tensor(w0, placement=ranks, sbp=sbp), flow.tensor(w1, placement=ranks, sbp=sbp))
        update = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = TrainingGraph(module, update) if graph else module
        run.kept.append(model)
        step = int(from_rank_0(str(newest(folder))))
        if step:
            state = flow.load(f"{folder}/{step}", global_src_rank=0)
            tensors.update({f"loaded {name}": tensor.clone() for name, tensor in by_name(state, graph).items()})
            if graph:
                model.load_state_dict(state)  # before the first call
            else:
                module.load_state_dict(state["module"])
                update.load_state_dict(state["optimizer"])
        else:
            tensors.update({"w0": module.w0.clone(), "w1": module.w1.clone()})
        for _ in range(steps):
            if graph:
                loss, w0_grad, w1_grad = model(x, y)
            else:
                update.zero_grad(set_to_none=True)
                loss = model(x, y)
                loss.backward()
                update.step()
                w0_grad, w1_grad = module.w0.grad, module.w1.grad
            losses.append(loss)
        state = model.state_dict() if graph else {"module": module.state_dict(), "optimizer": update.state_dict()}
        save(state, folder, step + steps)
        tensors.update({f"{stage} {name}": tensor for name, tensor in by_name(state, graph).items()})
    if temporary:
        temporary.cleanup()

    losses = flow.stack([loss.to_global(sbp=flow.sbp.broadcast) for loss in losses])
    return {**tensors, "w0 grad": w0_grad, "w1 grad": w1_grad, "losses": losses}


def single_device(values, given):
    """What must come out: the same steps in numpy on one device, all in one go."""
    names = ("loaded w0", "loaded w1") if given.folder and "loaded w0" in values else ("w0", "w1")
    weights = [values[name] for name in names]
    momentum = [values.get(f"{name} momentum", 0) for name in names]
    tensors, losses = {}, []
    while len(losses) < len(values["losses"]):
        hidden = np.maximum(values["x"] @ weights[0], 0)
        error = hidden @ weights[1] - values["y"]
        losses.append((error**2).mean())
        error *= 2 / error.size
        gradients = [values["x"].T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]
        for i, gradient in enumerate(gradients):
            momentum[i] = 0.9 * momentum[i] + gradient
            weights[i] = weights[i] - 0.1 * momentum[i]
        stages = ("saved", "loaded") if not given.folder and len(losses) == given.steps else ("new",)
        for stage in stages:
            tensors.update({f"{stage} w{i}": weights[i] for i in (0, 1)})
            tensors.update({f"{stage} w{i} momentum": momentum[i] for i in (0, 1)})
    return {**tensors, "w0 grad": gradients[0], "w1 grad": gradients[1], "losses": np.array(losses)}


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
