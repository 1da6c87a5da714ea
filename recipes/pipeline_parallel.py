"""Pipeline parallelism: each rank holds one layer and passes its activations on.

    out = x @ w0 @ w1    rank 0      rank 1      SBP
    x     (4, 5)         whole       nothing     B
    w0    (5, 8)         whole       nothing     B
    w1    (8, 3)         nothing     whole       B
    out   (4, 3)         nothing     whole       B

Moves: x @ w0 from rank 0 to rank 1, point to point, its own size once; the same between any two stages.
Run:   ./launch.sh recipes/pipeline_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/pipeline_parallel.py [--graph]
Use it when the layers together are too big for one device and the links are slow. With one batch only one rank works
at a time; train_pipeline.py fills the pipeline with micro-batches. More ranks make more stages.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)  # numbers of ranks; launch.sh refuses others


class Stage(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.ranks = ranks
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        x = x.to_global(placement=self.ranks, sbp=flow.sbp.broadcast)  # from the rank of the stage before
        return flow.matmul(x, self.w)


class PipelineGraph(flow.nn.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        for k, stage in enumerate(model):
            self.model[k].to(flow.nn.graph.GraphModule).set_stage(k, stage.ranks)

    def build(self, x):
        return self.model(x)


def placements(device, n):
    """One rank for each stage."""
    return [flow.placement(device, [rank]) for rank in range(n)]


def run(stages, graph=False, seed=0, batch=4, in_features=5, hidden_size=8, out_features=3):
    """One forward pass in float32, a layer on each stage; returns x (batch, in), the model and out (batch, out)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    features = [in_features] + [hidden_size] * (len(stages) - 1) + [out_features]
    weights = [rng.standard_normal(shape, dtype=np.float32) for shape in zip(features, features[1:])]

    x = flow.tensor(x, placement=stages[0], sbp=flow.sbp.broadcast)
    model = flow.nn.Sequential(*[Stage(w, ranks) for w, ranks in zip(weights, stages)])
    pipeline = PipelineGraph(model) if graph else model
    out = pipeline(x)
    return x, model, out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the stages inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    stages = placements(args.device, flow.env.get_world_size())
    x, model, out = run(stages, args.graph)
    for name, tensor in {"x": x, **{f"w{k}": stage.w for k, stage in enumerate(model)}, "out": out}.items():
        if flow.env.get_rank() in tensor.placement.ranks:
            print(f"{name} {tuple(tensor.to_local().shape)} of {tuple(tensor.shape)}")
    _, _, alone = run([flow.placement(args.device, [0])] * len(stages), args.graph)  # the same code on a single device
    np.testing.assert_allclose(out.numpy(), alone.numpy(), rtol=1e-5, atol=1e-5)  # collective: on all ranks
    if flow.env.get_rank() == 0:
        print("out is", *out.sbp, "on rank", *out.placement.ranks, "and equals x @ w0 @ w1 ... on a single device")


if __name__ == "__main__":
    main()
