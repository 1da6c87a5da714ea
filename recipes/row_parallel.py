"""Tensor parallelism by rows: split the contracted dimension, then add the partial sums.

    out = x @ w           rank 0                   rank 1                   SBP
    x        (4, 5)       columns 0-2              columns 3-4              S(1)
    w        (5, 8)       rows 0-2                 rows 3-4                 S(0)
    partial  (4, 8)       x[:, 0:3] @ w[0:3]       x[:, 3:5] @ w[3:5]       P
    out      (4, 8)       whole                    whole                    B

Moves: P -> B is one all-reduce of out: 2 (n-1)/n of its bytes leave each of n ranks.
Run:   ./launch.sh recipes/row_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/row_parallel.py [--graph]
Use it after model_parallel.py, whose out is split by columns already. Alone it needs an all-reduce; columns do not.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 5)  # numbers of ranks; launch.sh refuses others


class Layer(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.split(0)))

    def forward(self, x):
        partial = flow.matmul(x, self.w)
        return partial.to_global(sbp=flow.sbp.broadcast)


class LayerGraph(flow.nn.Graph):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, x):
        return self.layer(x)


def run(ranks, graph=False, seed=0, batch=4, in_features=5, out_features=8):
    """One forward pass in float32 on a placement; returns x (batch, in), w (in, out) and out (batch, out)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(1))
    layer = Layer(w, ranks)
    model = LayerGraph(layer) if graph else layer
    out = model(x)
    return x, layer.w, out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the layer inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x, w, out = run(flow.placement.all(args.device), args.graph)
    for name, tensor in {"x": x, "w": w, "out": out}.items():
        print(f"{name} {tuple(tensor.to_local().shape)} of {tuple(tensor.shape)}")
    np.testing.assert_allclose(out.numpy(), x.numpy() @ w.numpy(), rtol=1e-5, atol=1e-6)  # collective: on all ranks
    if flow.env.get_rank() == 0:
        print("out is", *out.sbp, "and equals x @ w on a single device")


if __name__ == "__main__":
    main()
