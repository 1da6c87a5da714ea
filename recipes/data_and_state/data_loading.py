"""Data loading: a DistributedSampler gives each rank samples of its own, and one to_global makes them one batch.

    24 samples of text      rank 0          rank 1          SBP
    order 0    (24, 1)      rows 0-11       rows 12-23      S(0)
    order 1    (24, 1)      rows 0-11       rows 12-23      S(0)
    numbers    (8, 1)       rows 0-3        rows 4-7        S(0)
    letters    (8, 16)      rows 0-3        rows 4-7        S(0)
    doubled    (48, 1)      rows 0-23       rows 24-47      S(0)

Each rank loads a part of the data, as local tensors; in S(0) the ranks' batches become one, one below the other, that a
model with global weights takes: letters, with the sample numbers. An epoch feeds each sample once, rank r the numbers
in the rows of order that are its shard. If the ranks do not divide the samples, some are fed twice, so that all ranks
have batches of one size: to_global refuses blocks that are not an even split. The order comes from the sampler's seed
and the epoch that set_epoch sets, not from manual_seed; without set_epoch every epoch has the order of the first.

Trap:  a DataLoader on every rank without a sampler reads all data on each; in S(0) that is n times the data, as doubled
       is, and n equal parts in every batch. Without a sampler go through B, as sliced does in global_and_local.py.
Trap:  the last batch of an epoch is smaller, and an nn.Graph takes one shape only: DataLoader(..., drop_last=True).
Moves: only what to_global tells of the shapes of the ranks' blocks; the data stays on the rank that loaded it.
Run:   ./launch.sh recipes/data_and_state/data_loading.py
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/data_loading.py
Use it wherever each rank can read the data set; `samples` and `batch` (of one rank) are options.
Source: OneFlow documentation, "Global Tensor"; the doubled data: github.com/Oneflow-Inc/oneflow/issues/9704.
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
FITS = {"samples": lambda given, ranks: given.samples > 1}  # the sampler pads: they may be fewer than the ranks


class Text(flow.utils.data.Dataset):
    """The help texts that come with Python, cut into samples: each is its number and the codes of `width` letters."""

    def __init__(self, samples, width):
        from pydoc_data.topics import topics

        codes = np.array([ord(letter) for letter in "".join(topics.values())], dtype=np.float32)
        self.letters = np.resize(codes, (samples, width))

    def __len__(self):
        return len(self.letters)

    def __getitem__(self, number):
        return np.array([number], dtype=np.float32), self.letters[number]


def run(device="cpu", seed=0, samples=24, batch=4, width=16):
    """Two epochs; returns the tensors of the table, and the local `text`, all samples, and `mine`, fed to this rank."""
    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    data = Text(samples, width)
    sampler = flow.utils.data.distributed.DistributedSampler(data, seed=seed)  # shuffles; the same seed on every rank
    loader = flow.utils.data.DataLoader(data, batch_size=batch, sampler=sampler)
    tensors = {"text": flow.tensor(data.letters, device=device)}
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        fed = []
        for mine, my_letters in loader:  # local tensors, (4, 1) and (4, 16), the last ones perhaps fewer rows
            numbers = mine.to(device).to_global(placement=ranks, sbp=flow.sbp.split(0))
            letters = my_letters.to(device).to_global(placement=ranks, sbp=flow.sbp.split(0))
            fed.append(numbers.to_local())  # here a model would take a step with these letters
        tensors[f"order {epoch}"] = flow.cat(fed).to_global(placement=ranks, sbp=flow.sbp.split(0))
    tensors.update({"numbers": numbers, "letters": letters, "mine": flow.cat(fed)})  # the last batch

    every_rank_reads_all = flow.utils.data.DataLoader(data, batch_size=batch)
    repeated = flow.cat([number for number, _ in every_rank_reads_all]).to(device)
    tensors["doubled"] = repeated.to_global(placement=ranks, sbp=flow.sbp.split(0))
    return tensors


def single_device(values, given):
    """What one device would read: the letters of each number; and of the wrong way, all samples once for each rank."""
    ranks = values["doubled"].size // given.samples
    by_rank = values["order 1"].reshape(ranks, -1)
    last = (by_rank.shape[1] - 1) // given.batch * given.batch  # where the last batch of each rank begins
    numbers = by_rank[:, last:].reshape(-1, 1)
    doubled = np.tile(np.arange(given.samples, dtype=np.float64), ranks)
    return {"numbers": numbers, "letters": values["text"][numbers[:, 0].astype(int)], "doubled": doubled[:, None]}


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
