"""One device: compute the product that every parallel recipe must equal.

    out = x @ w           rank 0
    x     (4, 5)          whole, a local tensor
    w     (5, 8)          whole, a local tensor
    out   (4, 8)          whole, a local tensor

Moves: nothing, 0 bytes: there is only one rank.
Run:   ./launch.sh recipes/single_device.py [--graph]
       python recipes/single_device.py [--graph]
Use it as long as everything fits and is fast enough: nothing is faster than no communication.
Source: OneFlow documentation, nn.Module and nn.Graph.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (1,)  # numbers of ranks; launch.sh refuses others


class Layer(flow.nn.Module):
    def __init__(self, w, device):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, device=device))

    def forward(self, x):
        return flow.matmul(x, self.w)


class LayerGraph(flow.nn.Graph):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, x):
        return self.layer(x)


def run(device="cpu", graph=False, seed=0, batch=4, in_features=5, out_features=8):
    """One forward pass in float32 on a device; returns x (batch, in), w (in, out) and out (batch, out)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    x = flow.tensor(x, device=device)
    layer = Layer(w, device)
    model = LayerGraph(layer) if graph else layer
    out = model(x)
    return x, layer.w, out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the layer inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x, w, out = run(args.device, args.graph)
    for name, tensor in {"x": x, "w": w, "out": out}.items():
        print(f"{name} {tuple(tensor.shape)} on {tensor.device}")
    np.testing.assert_allclose(out.numpy(), x.numpy() @ w.numpy(), rtol=1e-5, atol=1e-6)
    print("out equals x @ w in numpy")


if __name__ == "__main__":
    main()
