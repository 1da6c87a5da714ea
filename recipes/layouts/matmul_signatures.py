"""Matmul signatures: find which SBP pairs multiply without communication, and which make OneFlow move an input.

    x (w likewise)        rank 0         rank 1         SBP
    x B       (4, 4)      whole          whole          B
    x S(0)    (4, 4)      rows 0-1       rows 2-3       S(0)
    x S(1)    (4, 4)      columns 0-1    columns 2-3    S(1)
    x P       (4, 4)      whole          zeros          P

    x, w      B                  S(0)               S(1)               P
    B         B                  S(1), w to S(1)    S(1)               P
    S(0)      S(0)               S(0), w to B       S(0), w to B       S(0), w to B
    S(1)      S(0), x to S(0)    P                  S(1), x to B       P, w to S(0)
    P         P                  P, x to S(1)       S(1), x to B       P, x or w to B

Why:   rows of x give rows of out, columns of w columns of out; splitting what is summed over gives addends.
Moves: nothing for the six legal signatures, where the table has only the SBP of out. For the other ten OneFlow moves an
       input silently. Which one depends on the sizes, here equal: with a w of three times the size S(0) @ S(0) is P.
Run:   ./launch.sh recipes/layouts/matmul_signatures.py [--graph]
Use it to find which SBPs go together: split a dimension of out, or the contracted one on both sides, or nothing.
Source: J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 5)  # numbers of ranks; launch.sh refuses others
SBPS = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1), "P": flow.sbp.partial_sum}


class Products(flow.nn.Module):
    def forward(self, x, w):  # w is an input: a parameter that a graph must move aborts OneFlow 0.9.0
        return {f"{i} @ {j}": flow.matmul(x[i], w[j]) for i in SBPS for j in SBPS}


class ProductsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x, w):
        return self.module(x, w)


def run(ranks, graph=False, seed=0, batch=4, in_features=4, out_features=4):
    """Returns x (batch, in) and w (in, out) by SBP, and their 16 products by names such as "S(0) @ B"."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    x = {name: flow.tensor(x, placement=ranks, sbp=sbp) for name, sbp in SBPS.items()}
    w = {name: flow.tensor(w, placement=ranks, sbp=sbp) for name, sbp in SBPS.items()}
    module = Products()
    model = ProductsGraph(module) if graph else module
    products = model(x, w)
    return x, w, products


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="multiply inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x, w, products = run(flow.placement.all(args.device), args.graph)
    names = {sbp: name for name, sbp in SBPS.items()}
    if flow.env.get_rank() == 0:
        print("the SBP of x @ w, a row for each SBP of x, a column for each of w")
        print("x, w" + "".join(f"{j:>6}" for j in SBPS))
        for i in SBPS:
            print(f"{i:4}" + "".join(f"{names[products[f'{i} @ {j}'].sbp[0]]:>6}" for j in SBPS))
    wanted = x["B"].numpy() @ w["B"].numpy()
    for name, product in products.items():
        np.testing.assert_allclose(product.numpy(), wanted, rtol=1e-5, atol=1e-5, err_msg=name)  # on all ranks
    if flow.env.get_rank() == 0:
        print("each of the 16 equals x @ w on a single device")


if __name__ == "__main__":
    main()
