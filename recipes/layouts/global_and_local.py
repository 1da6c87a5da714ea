"""Local to global and back: the ranks' own tensors become one.

    mine, (4, 3), differs by rank       rank 0         rank 1         SBP
    rows    = mine in S(0)   (8, 3)     rows 0-3       rows 4-7       S(0)
    columns = mine in S(1)   (4, 6)     columns 0-2    columns 3-5    S(1)
    total   = mine in P      (4, 3)     its mine       its mine       P
    first   = mine in B      (4, 3)     whole          whole          B
    sliced  = first in S(0)  (4, 3)     rows 0-1       rows 2-3       S(0)
    noise   = randn in B     (4, 3)     whole          whole          B
    blocks  = randn in S(0)  (4, 3)     rows 0-1       rows 2-3       S(0)

S(0) and S(1) concatenate the ranks' tensors, P adds them, and B takes that of rank 0. `to_local` gives the block back:
block = rows.to_local() is mine. `numpy` gives the full value to every rank, here read = total.numpy().
Moves: for first, its size to each rank but rank 0; for read, an all-reduce, as for any P; nothing for the others.
Run:   ./launch.sh recipes/layouts/global_and_local.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/layouts/global_and_local.py [--graph]
Use it where data enters and leaves: each rank reads its own batch (S(0)), every rank makes the same weight (B).
Source: OneFlow documentation, "Global Tensor".
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Slice(flow.nn.Module):
    def forward(self, first):
        return first.to_global(sbp=flow.sbp.split(0))


class SliceGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, first):  # a graph takes global tensors: with local ones OneFlow 0.9.0 is wrong, then aborts
        return self.module(first)


def run(graph=False, device="cpu", seed=0, rows=None, columns=3):
    """Returns the tensors of the table by name, and the local mine, block and read; mine is (rows, columns)."""
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    rows = rows or max(4, n)  # a row for each rank, at least
    mine = np.arange(n * rows * columns, dtype=np.float32).reshape(n, rows, columns)[rank]
    mine = flow.tensor(mine, device=device)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    rows_of_all = mine.to_global(placement=ranks, sbp=flow.sbp.split(0))
    columns_of_all = mine.to_global(placement=ranks, sbp=flow.sbp.split(1))
    total = mine.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    first = mine.to_global(placement=ranks, sbp=flow.sbp.broadcast)
    # to split what every rank has whole, go through B: straight to S(0), Linear(8, 12) would have 24 outputs
    module = Slice()
    model = SliceGraph(module) if graph else module
    sliced = model(first)
    flow.manual_seed(seed)  # on each rank: so noise is the same everywhere, but of blocks each rank draws its own
    noise = flow.randn(rows, columns, placement=ranks, sbp=flow.sbp.broadcast)
    blocks = flow.randn(rows, columns, placement=ranks, sbp=flow.sbp.split(0))
    # numpy(), item() and print need every rank: `if rank == 0: print(total)` hangs
    read = flow.tensor(total.numpy(), device=device)

    tensors = {"mine": mine, "rows": rows_of_all, "columns": columns_of_all, "total": total, "first": first}
    tensors.update({"sliced": sliced, "noise": noise, "blocks": blocks})
    return {**tensors, "block": rows_of_all.to_local(), "read": read}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    last = flow.tensor(tensors["mine"].numpy()[-1:]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
    if flow.env.get_rank() == 0:
        print(f"{'mine':23}", tuple(tensors["mine"].shape), "last row on each rank", *last.astype(int).tolist())
    for name in ("rows", "columns", "total", "first"):
        value = tensors[name].numpy()  # collective: all ranks call it
        if flow.env.get_rank() == 0:
            sbp = str(tensors[name].sbp[0]).replace("oneflow.sbp.", "")
            print(f"{name:9}{sbp:14}", value.shape, "last row", value[-1].astype(int).tolist())
    for name in ("noise", "blocks"):
        drawn = flow.tensor([tensors[name].to_local()[0, 0].item()]).to_global(placement=ranks, sbp=flow.sbp.split(0))
        drawn = drawn.numpy()
        if flow.env.get_rank() == 0:
            sbp = str(tensors[name].sbp[0]).replace("oneflow.sbp.", "")
            print(f"{name:9}{sbp:14}", tuple(tensors[name].shape), "first number on each rank", *drawn.round(3))

    mine = np.arange(tensors["rows"].numel()).reshape(-1, *tensors["mine"].shape)  # of all ranks, in numpy
    expected = {"rows": np.concatenate(mine), "columns": np.concatenate(mine, axis=1), "total": mine.sum(axis=0)}
    expected.update({"first": mine[0], "sliced": mine[0], "block": mine[flow.env.get_rank()], "read": mine.sum(axis=0)})
    for name, value in expected.items():
        np.testing.assert_array_equal(tensors[name].numpy(), value, err_msg=name)
    if flow.env.get_rank() == 0:
        print("rows and columns equal the ranks' tensors concatenated, total their sum, first that of rank 0")


if __name__ == "__main__":
    main()
