"""Hybrid parallelism: combine a data-parallel stage with a tensor-parallel one.

    out0 = x0 @ w0, out1 = x1 @ w1    rank 0      rank 1      rank 2         rank 3         SBP
    x0    (4, 5)                      rows 0-1    rows 2-3    nothing        nothing        S(0)
    w0    (5, 8)                      whole       whole       nothing        nothing        B
    out0  (4, 8)                      rows 0-1    rows 2-3    nothing        nothing        S(0)
    x1    (4, 8)                      nothing     nothing     whole          whole          B
    w1    (8, 3)                      nothing     nothing     columns 0-1    column 2       S(1)
    out1  (4, 3)                      nothing     nothing     columns 0-1    column 2       S(1)

Moves: out0 S(0) on [0, 1] -> x1 B on [2, 3]: each row goes to two ranks, so 2 times its bytes in all. In a graph, with
       set_stage, it goes to one of them, and an all-gather between ranks 2 and 3 does the rest.
Run:   ./launch.sh recipes/hybrid_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/hybrid_parallel.py [--graph]
Use it when no single strategy fits: small layers early (split the batch), big ones late (split the weight).
Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4,)  # numbers of ranks; launch.sh refuses others


class DataParallel(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.ranks = ranks
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x0):
        return flow.matmul(x0, self.w)


class ModelParallel(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.ranks = ranks
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.split(1)))

    def forward(self, out0):
        x1 = out0.to_global(placement=self.ranks, sbp=flow.sbp.broadcast)  # from the ranks of the stage before
        return flow.matmul(x1, self.w)


class HybridGraph(flow.nn.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        for k, stage in enumerate(model):
            self.model[k].to(flow.nn.graph.GraphModule).set_stage(k, stage.ranks)

    def build(self, x):
        return self.model(x)


def placements(device, n):
    """The ranks of each stage."""
    return [flow.placement(device, [0, 1]), flow.placement(device, [2, 3])]


def run(stages, graph=False, seed=0, batch=4, in_features=5, hidden_size=8, out_features=3):
    """One forward pass in float32 on two placements; returns x0 (batch, in), the model and out1 (batch, out)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x0 = flow.tensor(x, placement=stages[0], sbp=flow.sbp.split(0))
    model = flow.nn.Sequential(DataParallel(w0, stages[0]), ModelParallel(w1, stages[1]))
    hybrid = HybridGraph(model) if graph else model
    out1 = hybrid(x0)
    return x0, model, out1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the stages inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x0, model, out1 = run(placements(args.device, flow.env.get_world_size()), args.graph)
    for name, tensor in {"x0": x0, "w0": model[0].w, "w1": model[1].w, "out1": out1}.items():
        if flow.env.get_rank() in tensor.placement.ranks:
            print(f"{name} {tuple(tensor.to_local().shape)} of {tuple(tensor.shape)}")
    _, _, alone = run([flow.placement(args.device, [0])] * 2, args.graph)  # the same code on a single device
    np.testing.assert_allclose(out1.numpy(), alone.numpy(), rtol=1e-5, atol=1e-5)  # collective: on all ranks
    if flow.env.get_rank() == 0:
        print("out1 is", *out1.sbp, "on ranks", *out1.placement.ranks, "and equals x0 @ w0 @ w1 on a single device")


if __name__ == "__main__":
    main()
