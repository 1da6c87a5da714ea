"""Ring all-reduce: neighbours send and receive until every rank has the sum.

    rank r sends to r+1    rank 0                   rank 1                   SBP
    gradient   (8, 4)      its own                  its own                  P
    own        (8, 4)      whole, a local tensor    whole, a local tensor
    summed     (8, 4)      whole, a local tensor    whole, a local tensor
    reduced    (8, 4)      whole                    whole                    B

The ring sums the tensors own into summed; reduced is the same sum in one line, P -> B. After n-1 rounds that add what
arrives (reduce-scatter) each rank has one finished chunk; in n-1 more these go round the ring (all-gather).

Moves: 2 (n-1) chunks from each of n ranks to the next: 2 (n-1)/n x the bytes of the tensor, below 2 x for any n.
Run:   ./launch.sh recipes/by_hand/ring_all_reduce.py
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/ring_all_reduce.py
Use it to see what an all-reduce does; in a program write to_global(sbp=flow.sbp.broadcast) or flow.comm.all_reduce.
Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


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
    for i in range(2 * (n - 1)):
        arrived = pass_on(chunks[(rank - i) % n])
        k = (rank - i - 1) % n  # the chunk that the rank before sends in this round
        chunks[k] = chunks[k] + arrived if i < n - 1 else arrived
    return flow.cat(chunks)


def run(device="cpu", seed=0, steps=1, in_features=None, out_features=4):
    """All-reduces one local tensor (in, out) of each rank, by the ring and by P -> B; returns the table by name."""
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    in_features = in_features or max(8, n)  # a row for each chunk, at least
    rng = np.random.default_rng([seed, rank])  # other values on each rank
    own = flow.tensor(rng.standard_normal((in_features, out_features), dtype=np.float32), device=device)
    for _ in range(steps):
        summed = ring_all_reduce(own)

    gradient = own.to_global(placement=flow.placement(device, list(range(n))), sbp=flow.sbp.partial_sum)
    reduced = gradient.to_global(sbp=flow.sbp.broadcast)
    return {"gradient": gradient, "own": own, "summed": summed, "reduced": reduced}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    n = flow.env.get_world_size()
    summed, reduced = tensors["summed"].numpy(), tensors["reduced"].numpy()  # collective: all ranks call it
    own = tensors["own"].to_global(placement=tensors["reduced"].placement, sbp=flow.sbp.split(0)).numpy()
    own = own.reshape(n, *summed.shape)  # rank 0's first
    np.testing.assert_allclose(summed, own.sum(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(summed, reduced, rtol=1e-5, atol=1e-5)
    if flow.env.get_rank() == 0:
        for rank in range(n):
            sent = [(rank - i) % n for i in range(2 * (n - 1))]
            print(f"rank {rank} sends chunks", *sent[: n - 1], "to add, then finished chunks", *sent[n - 1 :])
        same = "bit for bit" if np.array_equal(summed, reduced) else "within rounding (n does not divide the rows)"
        print(f"summed equals the sum in numpy within rounding, and P -> B {same}")


if __name__ == "__main__":
    main()
