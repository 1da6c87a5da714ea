"""Tensor parallelism by columns: replicate the batch, split the weight.

    out = x @ w           rank 0         rank 1         SBP
    x     (4, 5)          whole          whole          B
    w     (5, 8)          columns 0-3    columns 4-7    S(1)
    out   (4, 8)          columns 0-3    columns 4-7    S(1)

Moves: nothing, 0 bytes: each rank computes its own columns of out. (Training adds one all-reduce of x's gradient.)
Run:   ./launch.sh recipes/model_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/model_parallel.py [--graph]
Use it when w is too big for one device, and follow it with row_parallel.py, which takes x split by columns as it is.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 5)  # numbers of ranks; launch.sh refuses others


class Layer(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.split(1)))

    def forward(self, x):
        return flow.matmul(x, self.w)


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

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.broadcast)
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
