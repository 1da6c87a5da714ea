"""Random numbers: nn.Dropout drops the same places of every shard; a mask drawn as a global tensor is one mask.

    dropout of x, keep 0.8      rank 0          rank 1          SBP
    x                (16, 8)    rows 0-7        rows 8-15       S(0)
    repeated         (16, 8)    rows 0-7        rows 8-15       S(0)
    again            (16, 8)    rows 0-7        rows 8-15       S(0)
    mask             (16, 8)    rows 0-7        rows 8-15       S(0)
    out              (16, 8)    rows 0-7        rows 8-15       S(0)
    x_columns        (16, 8)    columns 0-3     columns 4-7     S(1)
    repeated_columns (16, 8)    columns 0-3     columns 4-7     S(1)
    mask_columns     (16, 8)    columns 0-3     columns 4-7     S(1)
    out_columns      (16, 8)    columns 0-3     columns 4-7     S(1)
    weight           (8, 8)     whole           whole           B

nn.Dropout draws for the shard, knowing nothing of the others, from a generator of its own that begins alike on every
rank: each shard of repeated has zeros at the same places. It begins alike in every nn.Dropout, too: again comes from
another module, and lacks what the first one dropped. flow.manual_seed changes neither.

flow.rand with placement and sbp draws for the global tensor: each shard in S(0) or S(1) gets numbers of its own, and B
the same on every rank, whatever their seeds. So mask is right, and out = x * mask / 0.8 has the mean of x, but for
chance; flow.nn.init makes a B weight alike on all ranks. With flow.manual_seed each run draws the same mask and weight.

Trap:  flow.nn.functional.dropout obeys manual_seed in eager mode, which is no cure: with one seed on all ranks the
       shards of S(0) repeat, and with a seed for each rank a B tensor is dropped differently on each.
Moves: nothing.
Run:   ./launch.sh recipes/data_and_state/random_numbers.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/random_numbers.py [--graph]
Use it for dropout and noise in tensors that are split; another number of ranks draws other numbers in S(0) and S(1).
Source: N. Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15 (2014).
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
FITS = {
    "batch": lambda given, ranks: given.batch >= ranks,  # an empty shard would abort OneFlow
    "features": lambda given, ranks: given.features >= ranks,
}
KEEP = 0.8


class Dropouts(flow.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (flow.nn.Dropout(p=1 - KEEP) for _ in range(3))

    def forward(self, x, x_columns):
        outputs = [self.first(x), self.second(x), self.third(x_columns)]  # the wrong way
        for one in (x, x_columns):
            mask = (flow.rand(*one.shape, placement=one.placement, sbp=one.sbp) < KEEP).to(flow.float32)
            outputs += [mask, one * mask / KEEP]
        return outputs


class DropoutsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x, x_columns):
        return self.module(x, x_columns)


def run(graph=False, device="cpu", seed=0, batch=16, features=8):
    """Returns the tensors of the table: x is drawn by numpy, mask and weight are drawn by OneFlow."""
    x = np.random.default_rng(seed).standard_normal((batch, features), dtype=np.float32)

    flow.manual_seed(seed)
    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x_columns = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(1))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    weight = flow.nn.init.normal_(flow.empty(features, features, placement=ranks, sbp=flow.sbp.broadcast))
    module = Dropouts()
    model = run.kept = DropoutsGraph(module) if graph else module  # a freed graph may abort OneFlow
    repeated, again, repeated_columns, mask, out, mask_columns, out_columns = model(x, x_columns)

    tensors = {"x": x, "repeated": repeated, "again": again, "mask": mask, "out": out}
    tensors.update({"x_columns": x_columns, "repeated_columns": repeated_columns})
    return {**tensors, "mask_columns": mask_columns, "out_columns": out_columns, "weight": weight}


def single_device(values, given):
    """What dropout by these masks gives; that of nn.Dropout is no mask of one device, and is left out."""
    out, out_columns = (values[x] * values[mask] / KEEP for x, mask in (("x", "mask"), ("x_columns", "mask_columns")))
    return {"out": out, "out_columns": out_columns}


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
