"""Local to global and back: the ranks' own tensors become one global tensor.

    local, (4, 3), differs by rank       rank 0         rank 1         SBP
    rows    = local in S(0)    (8, 3)    rows 0-3       rows 4-7       S(0)
    columns = local in S(1)    (4, 6)    columns 0-2    columns 3-5    S(1)
    total   = local in P       (4, 3)    its local      its local      P
    first   = local in B       (4, 3)    whole          whole          B
    sliced  = first in S(0)    (4, 3)    rows 0-1       rows 2-3       S(0)

S(0) and S(1) concatenate the ranks' tensors, P adds them, and B takes that of rank 0. `to_local` gives a rank its block
back: block = rows.to_local() is local. `numpy` gives the full value to every rank: value = total.numpy().
Why:   files and other libraries know only a rank's own tensors; the SBP says how these make up the global one.
Moves: for first, its size to each rank but rank 0; for value, an all-reduce, as for any P; nothing for the others.
Run:   ./launch.sh recipes/layouts/global_and_local.py
Use it where data enters and leaves: each rank reads its own batch (S(0)), every rank creates the same weight (B). Make
tensors global before they enter an nn.Graph: one that is given local tensors computes wrong values, then aborts.
Source: OneFlow documentation, "Global Tensor".
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 5)  # numbers of ranks; launch.sh refuses others


def run(ranks, batch=4, in_features=3):
    """Each rank's own tensor is (batch, in_features); returns it and the tensors of the table, then block and value."""
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    values = np.arange(n * batch * in_features, dtype=np.float32).reshape(n, batch, in_features)

    local = flow.tensor(values[rank], device=ranks.type)
    rows = local.to_global(placement=ranks, sbp=flow.sbp.split(0))
    columns = local.to_global(placement=ranks, sbp=flow.sbp.split(1))
    total = local.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    first = local.to_global(placement=ranks, sbp=flow.sbp.broadcast)
    # first is whole on each rank, so it can be sliced; local in S(0) would be concatenated, as rows is
    sliced = first.to_global(sbp=flow.sbp.split(0))

    block = rows.to_local()
    value = total.numpy()  # needs every rank, as item() and print do: `if rank == 0: print(total)` hangs
    return local, rows, columns, total, first, sliced, block, value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    local, rows, columns, total, first, sliced, block, value = run(flow.placement.all(args.device))
    print(f"local {tuple(local.shape)}, last row {local.numpy()[-1]}")
    for name, tensor in {"rows": rows, "columns": columns, "total": total, "first": first, "sliced": sliced}.items():
        print(f"{name} {tuple(tensor.to_local().shape)} of {tuple(tensor.shape)}, last row {tensor.numpy()[-1]}")

    every = np.split(rows.numpy(), flow.env.get_world_size())  # the tensor of each rank
    np.testing.assert_array_equal(columns.numpy(), np.concatenate(every, axis=1))
    np.testing.assert_array_equal(value, sum(every))
    np.testing.assert_array_equal(first.numpy(), every[0])
    np.testing.assert_array_equal(sliced.numpy(), every[0])
    np.testing.assert_array_equal(block.numpy(), local.numpy())
    if flow.env.get_rank() == 0:
        print("rows and columns are the ranks' tensors concatenated, total is their sum, first that of rank 0")


if __name__ == "__main__":
    main()
