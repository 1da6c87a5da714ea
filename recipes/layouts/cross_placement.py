"""Conversions between placements: move a tensor to other ranks, under every pair of SBPs.

    x = sum(parts)       rank 0         rank 1         rank 2         rank 3         SBP
    B       (4, 6)       whole          whole          nothing        nothing        B
    S(0)    (4, 6)       rows 0-1       rows 2-3       nothing        nothing        S(0)
    S(1)    (4, 6)       columns 0-2    columns 3-5    nothing        nothing        S(1)
    P       (4, 6)       parts[0]       parts[1]       nothing        nothing        P

    p1 -> p2 other ranks    B              S(0), S(1)    P
    B                       p2             1             1
    S(0), S(1)              p2             1             1
    P                       p1 + p2 - 1    p1            p1

Why:   a rank that is to hold B needs the whole tensor, so each gets a copy; of a split tensor it needs only its part.
Moves: the table, times the bytes of x, in all, from p1 ranks to p2 others. A graph sends p2 for S -> P. Eager mode
       sends more: B -> B 2 p2 - 1 (p2 > 1), P -> P 2 p1 - 1 (p1 > 1), P -> B p1 p2 (both > 1).
Run:   ./launch.sh recipes/layouts/cross_placement.py [--graph]
Use it where two groups of ranks meet, as pipeline stages do; split the tensor on at least one side.
Source: J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4, 2, 3)  # numbers of ranks; launch.sh refuses others
SBPS = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1), "P": flow.sbp.partial_sum}


class Conversions(flow.nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target

    def forward(self, x):
        pairs = [(old, new) for old in SBPS for new in SBPS]
        return {f"{old} -> {new}": x[old].to_global(placement=self.target, sbp=SBPS[new]) for old, new in pairs}


class ConversionsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def placements(device, n, source=(), target=()):
    """The ranks of x and those of its conversions: by default one half each."""
    source = list(source or range(n // 2))
    target = list(target or range(n // 2, n))
    return flow.placement(device, source), flow.placement(device, target)


def run(source, target, graph=False, seed=0, rows=4, columns=6):
    """Returns x (rows, columns) in each SBP, by its name, and its 16 conversions, by names such as "S(0) -> B"."""
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    rng = np.random.default_rng(seed)
    parts = rng.integers(-9, 10, (n, rows, columns)).astype(np.float32)  # small integers, so nothing rounds

    total = parts[source.ranks].sum(axis=0)
    x = {sbp: flow.tensor(total, placement=source, sbp=SBPS[sbp]) for sbp in ("B", "S(0)", "S(1)")}
    part = flow.tensor(parts[rank], device=source.type)  # local: each rank has its own
    x["P"] = part.to_global(placement=source, sbp=flow.sbp.partial_sum)
    module = Conversions(target)
    model = ConversionsGraph(module) if graph else module
    conversions = model(x)
    return x, conversions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="convert inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    source, target = placements(args.device, flow.env.get_world_size())
    x, conversions = run(source, target, args.graph)
    tensors = {**x, **conversions}
    own = flow.tensor([[tensor.to_local().sum().item() for tensor in tensors.values()]])
    sums = own.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)).numpy()  # a row for each rank
    if flow.env.get_rank() == 0:
        print("sum of the block on each rank, 0 for none: of x, then of its conversions on the other ranks")
        for name, by_rank in zip(tensors, sums.astype(int).T):
            print(f"{name:12}", *by_rank)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), x["B"].numpy(), err_msg=name)  # collective: on all ranks
    if flow.env.get_rank() == 0:
        print("each of the 16 equals x = sum(parts) on a single device")


if __name__ == "__main__":
    main()
