"""Conversions between placements: every pair of SBPs, from some ranks to others.

    x = sum(parts)       rank 0         rank 1         rank 2         rank 3         SBP
    B       (4, 6)       whole          whole          nothing        nothing        B
    S(0)    (4, 6)       rows 0-1       rows 2-3       nothing        nothing        S(0)
    S(1)    (4, 6)       columns 0-2    columns 3-5    nothing        nothing        S(1)
    P       (4, 6)       parts[0]       parts[1]       nothing        nothing        P

    p1 -> p2 other ranks    B              S(0), S(1)    P
    B                       p2             1             1
    S(0), S(1)              p2             1             1
    P                       p1 + p2 - 1    p1            p1

Moves: the table, in units of x, from all ranks together; a graph keeps to it but for S -> P, which costs p2. Eager mode
       costs more where p1 or p2 > 1: B -> B 2 p2 - 1, P -> B p1 p2, P -> P 2 p1 - 1.
Run:   ./launch.sh recipes/layouts/cross_placement.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/layouts/cross_placement.py [--graph]
Use it where two groups of ranks meet, as pipeline stages do; split the tensor on at least one side.
Source: J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4, 2, 3)
SBPS = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1), "P": flow.sbp.partial_sum}


class Conversions(flow.nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target

    def forward(self, x):
        return {f"{old} -> {new}": x[old].to_global(placement=self.target, sbp=SBPS[new]) for old in x for new in SBPS}


class ConversionsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def run(graph=False, device="cpu", seed=0, rows=4, columns=6, source=(), target=()):
    """x (rows, columns) on the ranks `source`, then its 16 conversions to `target`; by default the halves of all."""
    n = flow.env.get_world_size()
    source, target = source or range(n // 2), target or range(n // 2, n)
    parts = np.random.default_rng(seed).integers(-9, 10, (n, rows, columns)).astype(np.float32)
    x = parts[list(source)].sum(axis=0)

    ranks = flow.placement(device, list(source))
    sources = {name: flow.tensor(x, placement=ranks, sbp=sbp) for name, sbp in SBPS.items() if name != "P"}
    part = flow.tensor(parts[flow.env.get_rank()], device=device)  # local: each rank has its own
    sources["P"] = part.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    module = Conversions(flow.placement(device, list(target)))
    model = ConversionsGraph(module) if graph else module
    return {**sources, **model(sources)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    sums = flow.tensor([[tensor.to_local().sum().item() for tensor in tensors.values()]])  # of this rank's blocks
    sums = dict(zip(tensors, sums.to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy().astype(int).T))
    for tensor in tensors.values():
        np.testing.assert_array_equal(tensor.numpy(), tensors["B"].numpy())  # collective: all ranks call it
    if flow.env.get_rank() == 0:
        print("the sum of each rank's block, 0 for none: x on its ranks, then moved to the other ranks")
        print("from, to", *(f"{new:>18}" for new in ("x", *SBPS)))
        for old in SBPS:
            print(f"{old:8}", *(f"{str(sums[name]):>18}" for name in sums if name.startswith(old)))
        print("each of the 16 equals x = sum(parts) on a single device")


if __name__ == "__main__":
    main()
