"""Hybrid parallelism: a data-parallel stage, then a model-parallel one.

    out0 = x0 @ w0, out1 = x1 @ w1    rank 0      rank 1      rank 2         rank 3         SBP
    x0    (4, 5)                      rows 0-1    rows 2-3    nothing        nothing        S(0)
    w0    (5, 8)                      whole       whole       nothing        nothing        B
    out0  (4, 8)                      rows 0-1    rows 2-3    nothing        nothing        S(0)
    x1    (4, 8)                      nothing     nothing     whole          whole          B
    w1    (8, 3)                      nothing     nothing     columns 0-1    column 2       S(1)
    out1  (4, 3)                      nothing     nothing     columns 0-1    column 2       S(1)

Moves: out0 S(0) on [0, 1] -> x1 B on [2, 3]: each row goes to two ranks, so 2 times its bytes in all. In a graph it
       goes to one of them, as set_stage says, and an all-gather between ranks 2 and 3 does the rest.
Run:   ./launch.sh recipes/hybrid_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/hybrid_parallel.py [--graph]
Use it when no single strategy fits: small layers early (split the batch), big ones late (split the weight).
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4,)


class Stage(flow.nn.Module):
    def __init__(self, w, ranks, x_sbp, w_sbp):
        super().__init__()
        self.ranks, self.x_sbp = ranks, x_sbp
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=w_sbp))

    def forward(self, out):
        x = out.to_global(placement=self.ranks, sbp=self.x_sbp)
        return x, flow.matmul(x, self.w)


class HybridParallel(flow.nn.Module):
    def __init__(self, w0, w1, ranks):
        super().__init__()
        self.data_parallel = Stage(w0, ranks[0], x_sbp=flow.sbp.split(0), w_sbp=flow.sbp.broadcast)
        self.model_parallel = Stage(w1, ranks[1], x_sbp=flow.sbp.broadcast, w_sbp=flow.sbp.split(1))

    def forward(self, x):
        x0, out0 = self.data_parallel(x)
        x1, out1 = self.model_parallel(out0)
        return x0, out0, x1, out1


class HybridParallelGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.module.data_parallel.to(flow.nn.graph.GraphModule).set_stage(0, module.data_parallel.ranks)
        self.module.model_parallel.to(flow.nn.graph.GraphModule).set_stage(1, module.model_parallel.ranks)

    def build(self, x):
        return self.module(x)


def run(graph=False, device="cpu", seed=0, batch=4, in_features=5, out_features=8):
    """One forward pass in float32; returns x0 (batch, in), w0 (in, out), out0, x1 (batch, out), w1 (out, 3), out1."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, out_features), dtype=np.float32)
    w1 = rng.standard_normal((out_features, 3), dtype=np.float32)

    ranks = [flow.placement(device, [0, 1]), flow.placement(device, [2, 3])]
    x = flow.tensor(x, placement=ranks[0], sbp=flow.sbp.split(0))
    module = HybridParallel(w0, w1, ranks)
    model = HybridParallelGraph(module) if graph else module
    x0, out0, x1, out1 = model(x)
    return {"x0": x0, "w0": module.data_parallel.w, "out0": out0, "x1": x1, "w1": module.model_parallel.w, "out1": out1}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name, tensor in tensors.items():  # a row for each rank: the shape of what it holds
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name:6}{str(tuple(tensor.shape)):8}{tensor.sbp[0]!s:26}local shapes", *map(tuple, held.tolist()))

    x0, w0, w1, out1 = (tensors[name].numpy() for name in ("x0", "w0", "w1", "out1"))  # collective: all ranks call it
    np.testing.assert_allclose(out1, x0 @ w0 @ w1, rtol=1e-5, atol=1e-5)
    if flow.env.get_rank() == 0:
        print("out1 equals x0 @ w0 @ w1 on a single device")


if __name__ == "__main__":
    main()
