"""SBP conversions: convert between B, S(0), S(1) and P on the same ranks.

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

Why:   cutting needs nobody, as a rank takes its slice of what it has; joining and adding need all ranks.
Moves: of x from each of n ranks: all-gather, reduce-scatter (n-1)/n; all-to-all (n-1)/n^2; all-reduce 2(n-1)/n. With *
       one mode sends more: eager S(1) -> B and P -> S(1) add an all-to-all, a graph runs S -> P as an all-gather.
Run:   ./launch.sh recipes/layouts/sbp_conversions.py [--graph]
Use it to look up what a `to_global` costs before you write it.
Source: J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 5)  # numbers of ranks; launch.sh refuses others
SBPS = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1), "P": flow.sbp.partial_sum}


class Conversions(flow.nn.Module):
    def forward(self, x):
        return {f"{old} -> {new}": x[old].to_global(sbp=SBPS[new]) for old in SBPS for new in SBPS}


class ConversionsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def run(ranks, graph=False, seed=0, rows=4, columns=6):
    """Returns x (rows, columns) in each SBP, by its name, and its 16 conversions, by names such as "S(0) -> B"."""
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    rng = np.random.default_rng(seed)
    parts = rng.integers(-9, 10, (n, rows, columns)).astype(np.float32)  # small integers, so nothing rounds

    total = parts[ranks.ranks].sum(axis=0)
    x = {sbp: flow.tensor(total, placement=ranks, sbp=SBPS[sbp]) for sbp in ("B", "S(0)", "S(1)")}
    part = flow.tensor(parts[rank], device=ranks.type)  # local: each rank has its own
    x["P"] = part.to_global(placement=ranks, sbp=flow.sbp.partial_sum)
    module = Conversions()
    model = ConversionsGraph(module) if graph else module
    conversions = model(x)
    return x, conversions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="convert inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x, conversions = run(flow.placement.all(args.device), args.graph)
    own = flow.tensor([[tensor.to_local().sum().item() for tensor in conversions.values()]])
    sums = own.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)).numpy()  # a row for each rank
    if flow.env.get_rank() == 0:
        print("sum of the block on each rank: B has that of x everywhere; S(0), S(1) and P add up to it")
        for name, by_rank in zip(conversions, sums.astype(int).T):
            print(f"{name:12}", *by_rank)
    for name, tensor in conversions.items():
        np.testing.assert_array_equal(tensor.numpy(), x["B"].numpy(), err_msg=name)  # collective: on all ranks
    if flow.env.get_rank() == 0:
        print("each of the 16 equals x = sum(parts) on a single device")


if __name__ == "__main__":
    main()
