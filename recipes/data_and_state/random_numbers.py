"""Random numbers: nn.Dropout repeats its mask on every shard; draw a global one.

    dropout of x, keep 0.5    rank 0       rank 1       SBP
    x           (16, 8)       rows 0-7     rows 8-15    S(0)
    weight      (8, 8)        whole        whole        B
    repeated    (16, 8)       rows 0-7     rows 8-15    S(0)
    mask        (16, 8)       rows 0-7     rows 8-15    S(0)
    out         (16, 8)       rows 0-7     rows 8-15    S(0)

nn.Dropout sees only its shard, and its generator starts in the same state on every rank: repeated has its zeros at the
same places of every shard. flow.rand draws for the global tensor: different numbers for each shard of a split one, and
the same on all ranks for a B one, even if the ranks have different seeds. So does flow.nn.init, for weight.

Why:   a layer sees only its rank's shard, and equal generators draw equal numbers; a global draw is one draw.
Moves: nothing, 0 bytes.
Run:   ./launch.sh recipes/data_and_state/random_numbers.py [--graph]
Use it for dropout and noise in split tensors. A different number of ranks draws different numbers in S(0) and S(1).
Source: N. Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15 (2014).
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others
KEEP = 0.5


class Dropout(flow.nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        mask = (flow.rand(*x.shape, placement=x.placement, sbp=x.sbp) < KEEP).to(x.dtype)
        return x * mask / KEEP


class DropoutGraph(flow.nn.Graph):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def build(self, x):
        return self.dropout(x)


def run(ranks, graph=False, seed=0, batch=16, features=8, dim=0):
    """Draw a weight, and drop elements of x, split along `dim`; returns x, weight, nn.Dropout's output and our own."""
    x = np.random.default_rng(seed).standard_normal((batch, features), dtype=np.float32)

    flow.manual_seed(seed)  # nn.Dropout ignores it
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(dim))
    weight = flow.nn.init.normal_(flow.empty(features, features, placement=ranks, sbp=flow.sbp.broadcast))
    built_in, own = flow.nn.Dropout(p=1 - KEEP), Dropout()
    if graph:
        built_in, own = DropoutGraph(built_in), DropoutGraph(own)
    repeated, out = built_in(x), own(x)
    return x, weight, repeated, out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the layers inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x, _, repeated, out = run(flow.placement.all(args.device), args.graph)
    by_built_in = repeated.to_local().numpy().ravel()[:8] != 0  # which of this rank's first 8 numbers are kept
    by_mask = out.to_local().numpy().ravel()[:8] != 0
    print(f"nn.Dropout keeps {by_built_in.astype(int)}, a global mask keeps {by_mask.astype(int)}")
    x, repeated, out = (tensor.numpy() for tensor in (x, repeated, out))  # collective: all ranks call it
    for shard in np.array_split(repeated, flow.env.get_world_size()):
        np.testing.assert_array_equal(shard.ravel()[:8] != 0, by_built_in)
    np.testing.assert_allclose(out, x * (out != 0) / KEEP, rtol=1e-6)
    if flow.env.get_rank() == 0:
        print("nn.Dropout keeps the same places of every shard; out is x * mask / 0.5, as on a single device")


if __name__ == "__main__":
    main()
