"""SBP conversions: between B, S(0), S(1) and P on the same ranks.

    x = sum(parts)       rank 0         rank 1         SBP
    B       (4, 6)       whole          whole          B
    S(0)    (4, 6)       rows 0-1       rows 2-3       S(0)
    S(1)    (4, 6)       columns 0-2    columns 3-5    S(1)
    P       (4, 6)       parts[0]       parts[1]       P

    from, to     B              S(0)              S(1)              P
    B            nothing        local slice       local slice       local fill
    S(0)         all-gather     nothing           all-to-all        local fill *
    S(1)         all-gather *   all-to-all        nothing           local fill *
    P            all-reduce     reduce-scatter    reduce-scatter *  nothing

Moves: of x from each of n ranks: all-gather, reduce-scatter (n-1)/n; all-to-all (n-1)/n^2; all-reduce 2(n-1)/n. With *
       one mode sends more: eager S(1) -> B and P -> S(1) add an all-to-all, a graph runs S -> P as an all-gather.
Run:   ./launch.sh recipes/layouts/sbp_conversions.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/layouts/sbp_conversions.py [--graph]
Use it to look up what a `to_global` costs before you write it.
Source: J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)
SBPS = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1), "P": flow.sbp.partial_sum}


class Conversions(flow.nn.Module):
    def forward(self, x):
        return {f"{old} -> {new}": x[old].to_global(sbp=SBPS[new]) for old in x for new in SBPS}


class ConversionsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def run(graph=False, device="cpu", seed=0, rows=None, columns=None):
    """x (rows, columns) in each SBP, then the 16 conversions, named "S(0) -> B"; small integers, so nothing rounds."""
    n = flow.env.get_world_size()
    rows, columns = rows or max(4, n), columns or max(6, n)  # a row and a column for each rank, at least
    parts = np.random.default_rng(seed).integers(-9, 10, (n, rows, columns)).astype(np.float32)
    x = parts.sum(axis=0)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    sources = {name: flow.tensor(x, placement=ranks, sbp=sbp) for name, sbp in SBPS.items() if name != "P"}
    part = flow.tensor(parts[flow.env.get_rank()], device=device)  # local: each rank has its own
    sources["P"] = part.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    module = Conversions()
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
        width = 5 * flow.env.get_world_size() + 2
        print("the sum of each rank's block: B repeats the sum of x; S(0), S(1) and P add up to it")
        print("from, to      ", *(f"{new:>{width}}" for new in SBPS))
        print("rank 0's shape", *(f"{str(tuple(tensors[new].to_local().shape)):>{width}}" for new in SBPS))
        for old in SBPS:
            print(f"{old:14}", *(f"{str(sums[f'{old} -> {new}']):>{width}}" for new in SBPS))
        print("each of the 16 equals x = sum(parts) on a single device")


if __name__ == "__main__":
    main()
