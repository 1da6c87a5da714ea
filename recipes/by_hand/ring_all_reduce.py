"""Ring all-reduce: neighbours send and receive until every rank has the sum.

    rank r sends to r+1    rank 0                   rank 1                   SBP
    own        (8, 4)      whole, a local tensor    whole, a local tensor
    summed     (8, 4)      whole, a local tensor    whole, a local tensor
    partial    (8, 4)      its own                  its own                  P
    reduced    (8, 4)      whole                    whole                    B

The ring sums the tensors own into summed; reduced is the same sum in one line, P -> B. After n-1 rounds that add what
arrives (reduce-scatter) each rank has one finished chunk; in n-1 more these go round the ring (all-gather).

Why:   each rank passes on 1/n of the tensor at a time, so all links work at once, and none carries 2 x or more.
Moves: 2 (n-1) chunks from each of n ranks to the next: 2 (n-1)/n x the bytes of the tensor, below 2 x for any n.
Run:   ./launch.sh recipes/by_hand/ring_all_reduce.py
Use it to see what an all-reduce does; in a program write to_global(sbp=flow.sbp.broadcast) or flow.comm.all_reduce.
Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


def pass_on(chunk):
    """Send a chunk to the next rank of the ring; return the chunk that the rank before sends."""
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    if rank % 2 == 0:  # if all ranks sent first, none would receive, and all would wait forever
        flow.comm.send(chunk, (rank + 1) % n)
        return flow.comm.recv((rank - 1) % n)
    arrived = flow.comm.recv((rank - 1) % n)
    flow.comm.send(chunk, (rank + 1) % n)
    return arrived


def ring_all_reduce(tensor):
    """The sum of the local tensors of all ranks, on each of them."""
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    cuts = [len(tensor) * i // n for i in range(n + 1)]
    chunks = [tensor[start:stop] for start, stop in zip(cuts, cuts[1:])]
    for i in range(n - 1):  # reduce-scatter
        arrived = pass_on(chunks[(rank - i) % n])
        k = (rank - i - 1) % n  # the chunk that the rank before sends in this round
        chunks[k] = chunks[k] + arrived
    for i in range(n - 1):  # all-gather: the first to pass on is the chunk that is finished here
        arrived = pass_on(chunks[(rank + 1 - i) % n])
        chunks[(rank - i) % n] = arrived
    return flow.cat(chunks)


def run(ranks, seed=0, in_features=8, out_features=4):
    """All-reduce a local tensor (in, out) of each rank, by the ring and by P -> B; returns own and both sums."""
    rng = np.random.default_rng([seed, flow.env.get_rank()])  # different values on each rank
    own = flow.tensor(rng.standard_normal((in_features, out_features), dtype=np.float32), device=ranks.type)

    summed = ring_all_reduce(own)
    partial = own.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    reduced = partial.to_global(sbp=flow.sbp.broadcast)
    return own, summed, reduced


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    ranks = flow.placement.all(args.device)
    own, summed, reduced = run(ranks)
    sent = [str((rank - i) % n) for i in range(2 * (n - 1))]
    print("sends chunks", *sent[: n - 1], "to add, then finished chunks", *sent[n - 1 :])

    stacked = own.to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()  # those of all ranks, stacked
    expected = stacked.reshape(n, *own.shape).sum(axis=0)
    np.testing.assert_allclose(summed.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(reduced.numpy(), expected, rtol=1e-5, atol=1e-5)
    if rank == 0:
        print("the ring's sum and P -> B equal the sum in numpy")


if __name__ == "__main__":
    main()
