"""Metrics: loss and accuracy over all samples are sums and counts over the ranks, not the mean of the ranks' means.

    kind of the next letter      rank 0          rank 1          SBP
    x            (25, 26)        rows 0-12       rows 13-24      S(0)
    y            (25, 3)         rows 0-12       rows 13-24      S(0)
    w            (26, 3)         whole           whole           B
    out          (25, 3)         rows 0-12       rows 13-24      S(0)
    samples      (25, 2)         rows 0-12       rows 13-24      S(0)
    sums         (1, 2)          of its rows     of its rows     P
    means        (1, 2)          whole           whole           B

Each rank evaluates its own rows: samples has the squared error of each and whether it is right. Their sum over rows
that are split is a partial sum, P, and P -> B adds it up; divided by all rows it is what one device computes. `mean()`
of a global tensor does the same by itself, as `built_in` shows, in P until it is taken to B.

The same by hand, in local tensors: all_reduce the sums *and* the count, then divide (`by_hand`; flow.comm.all_reduce
changes its tensor and returns None).

Trap:  the mean of the ranks' means (`of_means`) counts a sample more on a rank that has fewer, and is another number
       as soon as the ranks do not divide the batch. Nothing warns.
Moves: an all-reduce of two numbers, or three; never the samples.
Run:   ./launch.sh recipes/data_and_state/metrics.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/metrics.py [--graph]
Use it whenever a rank reports a loss or an accuracy; log means.numpy() on all ranks, as numpy() needs every rank.
Source: OneFlow documentation, "Global Tensor"; OneFlow API reference, oneflow.comm.all_reduce.
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
FITS = {"batch": lambda given, ranks: given.batch >= ranks}  # an empty shard would abort OneFlow


class Metrics(flow.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = flow.nn.Parameter(w)

    def forward(self, x, y):
        out = flow.matmul(x, self.w)
        errors = (out - y) * (out - y)
        right = out.argmax(dim=1, keepdim=True) == y.argmax(dim=1, keepdim=True)
        samples = flow.cat([errors.sum(dim=1, keepdim=True), right.to(flow.float32)], dim=1)
        sums = samples.sum(dim=0, keepdim=True)
        means = sums.to_global(sbp=flow.sbp.broadcast) / len(samples)  # the rows of all ranks
        return out, samples, sums, means, samples.mean(dim=0, keepdim=True)


class MetricsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x, y):
        return self.module(x, y)


def run(graph=False, device="cpu", seed=0, batch=25):
    """Evaluate in float32; returns the tensors of the table, built_in, and the local by_hand and of_means."""
    from pydoc_data.topics import topics

    text = list("".join(topics.values()).lower())  # the help texts that come with Python
    pieces = np.resize(text, (batch + 1, 100))
    shares = [(pieces[:-1] == letter).mean(axis=1) for letter in "abcdefghijklmnopqrstuvwxyz"]
    following = pieces[1:, 0]  # vowel, other letter, or no letter: what is to be told from the letters before
    kinds = np.where(np.isin(following, list("aeiou")), 0, np.where(np.char.isalpha(following), 1, 2))
    x, y = np.stack(shares, axis=1).astype(np.float32), np.eye(3, dtype=np.float32)[kinds]
    w = np.random.default_rng(seed).standard_normal((26, 3), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    w = flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast)
    module = Metrics(w)
    model = run.kept = MetricsGraph(module) if graph else module  # a freed graph may abort OneFlow
    with flow.no_grad():
        out, samples, sums, means, built_in = model(x, y)

    mine = samples.to_local()
    totals = flow.cat([mine, flow.ones(len(mine), 1, device=device)], dim=1).sum(dim=0)  # the last is the count
    flow.comm.all_reduce(totals)
    by_hand = totals[:2] / totals[2]
    of_means = mine.mean(dim=0)  # the wrong way
    flow.comm.all_reduce(of_means)
    of_means = of_means / flow.env.get_world_size()

    tensors = {"x": x, "y": y, "w": w, "out": out, "samples": samples, "sums": sums, "means": means}
    return {**tensors, "built_in": built_in, "by_hand": by_hand, "of_means": of_means}


def single_device(values, given):
    """What one device computes that has all rows; of_means is not that, and is left out."""
    out = values["x"] @ values["w"]
    right = out.argmax(axis=1) == values["y"].argmax(axis=1)
    samples = np.stack([((out - values["y"]) ** 2).sum(axis=1), right], axis=1)
    sums = samples.sum(axis=0, keepdims=True)
    means = sums / len(samples)
    return {"out": out, "samples": samples, "sums": sums, "means": means, "built_in": means, "by_hand": means[0]}


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
