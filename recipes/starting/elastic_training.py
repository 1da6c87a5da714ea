"""Elastic training: a job that loses a rank starts again from its last checkpoint, also on fewer ranks.

                            rank 0            rank 1            SBP
    x              (8, 4)   rows 0-3          rows 4-7          S(0)
    y              (8, 4)   rows 0-3          rows 4-7          S(0)
    w0             (4, 8)   whole             whole             B
    w0 grad        (4, 8)   whole             whole             B
    w0 momentum    (4, 8)   whole             whole             B
    new w0         (4, 8)   whole             whole             B

Data parallel with a checkpoint after every `--every` steps. OneFlow cannot go on without a rank, so when one dies all
end and start anew, and at most the steps since the last checkpoint are done twice. What makes the end bitwise the same
on as many ranks: the batch of a step depends on the seed and the step alone, and a checkpoint has weights, momentum and
step. On another number of ranks sums round otherwise. Each rank says where it began, and the hash of the weights.

Crash: a checkpoint gets its name, such as step-4, when it is complete, on disk and with its sha256 in it; the one
       before is kept. One that is damaged all the same is put aside, and training goes on from that before it. If none
       is whole, or one cannot be read at all, nothing is touched and the run is refused; so too while another job
       trains in the folder. An error while it saves ends rank 0 at once: the others would wait for it for ever.
Moves: the all-reduce of data parallel, 2 (n-1)/n x the weights from each of n ranks, every step. To save, nothing: rank
       0 has it all. To load, n-1 times each tensor from all ranks together.
Run:   ./launch.sh recipes/starting/elastic_training.py [--graph]
       ./launch.sh --max-restarts 3 recipes/starting/elastic_training.py --folder FOLDER --die 3      (the last rank, in step 3)
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/starting/elastic_training.py [--graph]
Use it for every job that is longer than the time between two failures. Save every sqrt(2 x time to save x time between
failures), which loses least. Only rank 0 needs to see the folder, but rank 0 may start on another host.
Source: J. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
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


class TwoLayers(flow.nn.Module):
    def __init__(self, w0, w1, ranks):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x, y):
        return flow.nn.functional.mse_loss(flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1), y)


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


def drawn(given, step):
    """x and y of a step, from 1, as every run of this seed draws them; w0 and w1 for step 0."""
    rng, inner = np.random.default_rng([given.seed, step]), given.batch if step else given.hidden
    shapes = ((inner, given.in_features), (inner, given.out_features))
    one, other = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return (one, other) if step else (np.ascontiguousarray(one.T), other)


def sha256(folder):
    """Of all files of a checkpoint and their names, but for the one that has it."""
    import hashlib

    def failed(error):
        raise error

    places, total = os.walk(folder, onerror=failed), hashlib.sha256()
    for name in sorted(os.path.join(place, name) for place, _, files in places for name in files if name != "sha256"):
        with open(name, "rb") as file:
            total.update(os.fsencode(os.path.relpath(name, folder)) + file.read())
    return total.hexdigest()


def whole(checkpoint):
    """Whether it is as it was saved. An error of the disk says nothing about that, and is raised."""
    try:
        with open(f"{checkpoint}/sha256", "rb") as file:
            return file.read() == sha256(checkpoint).encode()
    except FileNotFoundError:
        return False


def steps_in(folder):
    """The steps after which there are checkpoints, the newest first. Whatever has another name is not ours."""
    import re

    found = (re.fullmatch("step-([1-9][0-9]*)", name) for name in os.listdir(folder))
    return sorted((int(one[1]) for one in found if one), reverse=True)


def save(state, folder, step):
    """Put a checkpoint into the folder, named by its step. Collective."""
    import shutil

    unfinished, first = f"{folder}/step-unfinished", flow.env.get_rank() == 0
    try:
        if first and os.path.exists(unfinished):  # a crash has left it
            shutil.rmtree(unfinished)
        flow.save(state, unfinished, global_dst_rank=0)
        if first:
            total = sha256(unfinished)
            with open(f"{unfinished}/sha256", "w") as file:
                file.write(total)
            for place, _, files in os.walk(unfinished):
                for name in (*files, "."):
                    to_disk(os.path.join(place, name))  # before it has its name
            os.replace(unfinished, f"{folder}/step-{step}")
            to_disk(folder)
            for older in steps_in(folder)[2:]:
                shutil.rmtree(f"{folder}/step-{older}")
    except OSError as error:
        says = f"checkpoint {step} could not be saved in {folder}: {error.strerror}: make room, and start again"
        print(f"{os.path.basename(sys.argv[0])}: {says}", file=sys.stderr, flush=True)
        os._exit(1)
    flow.comm.barrier()  # no rank goes on before it is there


def to_disk(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def last_checkpoint(folder):
    """The step of the newest checkpoint that is whole, 0 if there is none of any kind."""
    steps = steps_in(folder)
    last = next((step for step in steps if whole(f"{folder}/step-{step}")), 0)
    if steps and not last:
        raise FileNotFoundError(2, "no checkpoint in it is whole")
    return last


def begin_in(folder):
    """The step to go on from, on rank 0. Checkpoints after it, which are damaged, are put aside."""
    import shutil

    last = last_checkpoint(folder)
    for step in [step for step in steps_in(folder) if step > last]:
        aside = f"{folder}/step-{step}-damaged"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(f"{folder}/step-{step}", aside)
        says = f"checkpoint {step} is damaged: it is now {aside}, and training goes on from step {last}"
        print(f"{os.path.basename(sys.argv[0])}: {says}", file=sys.stderr, flush=True)
    return last


def model_of(given):
    """What must be the same in every run with one folder, but for the number of steps and ranks."""
    return ", ".join(f"{name} {getattr(given, name)}" for name in sorted(set(vars(given)) - {*FREE, "device"}))


def from_rank_0(text):
    """The text that rank 0 gives, on every rank. Collective."""
    letters = np.zeros(1000, dtype=np.int32)
    letters[: len(text[:1000])] = [ord(letter) for letter in text[:1000]]
    letters = flow.tensor(letters)
    flow.comm.broadcast(letters, 0)
    return "".join(chr(letter) for letter in letters.numpy() if letter)


def wrong(given):
    """What is wrong with the folder, or ""; on rank 0, which from now on has it for itself, until it ends."""
    import contextlib
    import fcntl

    try:
        os.makedirs(given.folder, exist_ok=True)
        if not os.access(given.folder, os.W_OK | os.X_OK):
            return "cannot be written: name another folder"
        wrong.lock = os.open(f"{given.folder}/step-lock", os.O_RDWR | os.O_CREAT, 0o644)
        with contextlib.suppress(OSError):  # on this file system there are no locks
            try:
                fcntl.flock(wrong.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "another job trains in it: end that one, or name another folder"
        step = last_checkpoint(given.folder)
    except OSError as error:
        return f"{error.strerror}: name another folder"
    there = flow.load(f"{given.folder}/step-{step}")["model"] if step else model_of(given)
    if there != model_of(given):
        return f"checkpoint {step} is of {there}: name another folder"
    return f"checkpoint {step} is of a later step: type --steps {step}" if step > given.steps else ""


def wrong_death(given):
    """What is wrong with --die: in a step before the first checkpoint, every new start would die again."""
    if not given.folder:
        return "needs a folder to go on from: type --folder FOLDER"
    after = given.die.isdecimal() and given.every < int(given.die) <= given.steps
    fits = f"--die {given.every + 1}" if given.every < given.steps else "--every 1 --die 2"
    return "" if after else f"takes a step after the first checkpoint, up to --steps: type {fits}"


FREE = ("steps", "every", "folder", "die")  # options that may differ from run to run
FITS = {
    "batch": lambda given, ranks: given.batch >= ranks,  # no empty shards
    "folder": lambda given, ranks: given.folder and from_rank_0(wrong(given) if flow.env.get_rank() == 0 else ""),
    "die": lambda given, ranks: given.die and wrong_death(given),
}


def run(
    graph=False,
    device="cpu",
    seed=0,
    steps=4,
    every=2,
    batch=8,
    in_features=4,
    hidden=8,
    out_features=4,
    folder="",
    die="",
):
    """Train up to a step, from the last checkpoint on; returns the table's tensors, w1's like w0's, and losses."""
    import hashlib
    import signal
    import tempfile

    given = argparse.Namespace(**{name: value for name, value in locals().items() if isinstance(value, (int, str))})
    w0, w1 = drawn(given, 0)
    temporary = None if folder else tempfile.TemporaryDirectory()
    folder = folder or temporary.name

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    module = TwoLayers(w0, w1, ranks)
    update = flow.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    model = TrainingGraph(module, update) if graph else module
    run.kept = model  # a freed graph may abort OneFlow
    begin = int(from_rank_0(str(begin_in(folder)) if flow.env.get_rank() == 0 else ""))
    if begin:
        state = flow.load(f"{folder}/step-{begin}", global_src_rank=0)
        if graph:
            model.load_state_dict(state["graph"])  # before the first call
        else:
            module.load_state_dict(state["module"])
            update.load_state_dict(state["optimizer"])
    tensors, losses = {"w0": module.w0.clone(), "w1": module.w1.clone()}, []
    for step in range(begin + 1, steps + 1):
        own = (np.array_split(one, flow.env.get_world_size())[flow.env.get_rank()] for one in drawn(given, step))
        x, y = (flow.tensor(one, device=device).to_global(placement=ranks, sbp=flow.sbp.split(0)) for one in own)
        if graph:
            loss, w0_grad, w1_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            loss = model(x, y)
            loss.backward()
            update.step()
            w0_grad, w1_grad = module.w0.grad, module.w1.grad
        losses.append(loss)
        if die and int(die) == step and begin == 0 and flow.env.get_rank() == flow.env.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)  # in the first run, not again in the one that goes on
        if step % every == 0 or step == steps:
            if graph:
                state = {"graph": model.state_dict(), "model": model_of(given)}
            else:
                state = {"module": module.state_dict(), "optimizer": update.state_dict(), "model": model_of(given)}
            save(state, folder, step)
    if temporary:
        temporary.cleanup()

    new = {"new w0": module.w0, "new w1": module.w1}
    hashed = hashlib.sha256(b"".join(w.to_local().detach().numpy().tobytes() for w in new.values())).hexdigest()
    done = f"steps {begin + 1} to {steps}" if losses else f"all {steps} steps were done before"
    run.says = [f"{done}; sha256 of the weights {hashed[:16]}"]
    if losses:  # else nothing was left to do
        kept = [
            state["graph"][f"module.w{i}-momentum"] if graph else state["optimizer"]["state"][i]["momentum_buf"]
            for i in (0, 1)
        ]
        tensors = {"x": x, "y": y, **tensors, "w0 grad": w0_grad, "w1 grad": w1_grad}
        tensors.update({"w0 momentum": kept[0], "w1 momentum": kept[1]})
        new["losses"] = flow.stack([loss.to_global(sbp=flow.sbp.broadcast) for loss in losses])
    return {**tensors, **new}


def single_device(values, given):
    """What must come out: all steps from the first in numpy on one device, as if nothing had happened."""
    weights, momentum, losses = [w.astype(np.float64) for w in drawn(given, 0)], [0, 0], []
    for step in range(1, given.steps + 1):
        x, y = (one.astype(np.float64) for one in drawn(given, step))
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        losses.append((error**2).mean())
        error *= 2 / error.size
        gradients = [x.T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]
        for i, gradient in enumerate(gradients):
            momentum[i] = 0.9 * momentum[i] + gradient
            weights[i] = weights[i] - 0.01 * momentum[i]
    tensors = {f"new w{i}": weights[i] for i in (0, 1)}
    if "losses" in values:
        tensors.update({f"w{i} grad": gradients[i] for i in (0, 1)})
        tensors.update({f"w{i} momentum": momentum[i] for i in (0, 1)})
        tensors["losses"] = np.array(losses[-len(values["losses"]) :])
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
