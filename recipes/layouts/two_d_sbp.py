"""2-D SBP: one mesh axis splits the batch, the other the weight.

    mesh [[0, 1], [2, 3]]    rank 0         rank 1         rank 2         rank 3         SBP
    x        (4, 4)          rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B
    w        (4, 8)          columns 0-3    columns 4-7    columns 0-3    columns 4-7    B, S(1)
    out      (4, 8)          0-1, 0-3       0-1, 4-7       2-3, 0-3       2-3, 4-7       S(0), S(1)
    rows     (4, 8)          rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B
    columns  (4, 8)          columns 0-3    columns 4-7    columns 0-3    columns 4-7    B, S(1)

A tensor has one SBP for each axis: the first between ranks 0 and 2, 1 and 3; the second between 0 and 1, 2 and 3.

Why:   one block of out needs only some rows of x and some columns of w, and a rank has both.
Moves: nothing for out. Each rank sends out/4 for rows, an all-gather along axis 1, and out/4 for columns, an
       all-gather along axis 0. Eager mode sends half as much again for rows: its S(1) -> B adds an all-to-all.
Run:   ./launch.sh recipes/layouts/two_d_sbp.py [--graph]
Use it where the batch alone cannot feed all ranks. Put the axis that splits the weight where links are fast.
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4,)  # numbers of ranks; launch.sh refuses others


class Layer(flow.nn.Module):
    def __init__(self, w, mesh):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(1))))

    def forward(self, x):
        out = flow.matmul(x, self.w)
        rows = out.to_global(sbp=(flow.sbp.split(0), flow.sbp.broadcast))  # moves along axis 1
        columns = out.to_global(sbp=(flow.sbp.broadcast, flow.sbp.split(1)))  # moves along axis 0
        return out, rows, columns


class LayerGraph(flow.nn.Graph):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, x):
        return self.layer(x)


def placements(device, n):
    """The mesh. OneFlow 0.9.0 sorts the ranks of a placement silently, so they are in ascending order."""
    return flow.placement(device, [[0, 1], [2, 3]])


def run(mesh, graph=False, seed=0, batch=4, in_features=4, out_features=8):
    """One forward pass on a mesh; returns x (batch, in), w (in, out) and out (batch, out) in three layouts."""
    if any(size % mesh.ranks.size for size in (batch, in_features, out_features)):
        raise ValueError("the number of ranks must divide each size: a graph of OneFlow 0.9.0 would hang or abort")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    layer = Layer(w, mesh)
    model = LayerGraph(layer) if graph else layer
    out, rows, columns = model(x)
    return x, layer.w, out, rows, columns


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the layer inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x, w, out, rows, columns = run(placements(args.device, flow.env.get_world_size()), args.graph)
    for name, tensor in {"x": x, "w": w, "out": out, "rows": rows, "columns": columns}.items():
        print(f"{name} {tuple(tensor.to_local().shape)} of {tuple(tensor.shape)}")
    for tensor in (out, rows, columns):
        np.testing.assert_allclose(tensor.numpy(), x.numpy() @ w.numpy(), rtol=1e-5, atol=1e-5)  # on all ranks
    if flow.env.get_rank() == 0:
        print("out, rows and columns equal x @ w on a single device")


if __name__ == "__main__":
    main()
