"""Pipeline parallelism: a layer on each rank; activations travel between them.

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

WORLD_SIZES = range(2, 65)


class Stage(flow.nn.Module):
    def __init__(self, w, rank):
        super().__init__()
        self.rank = rank
        self.w = flow.nn.Parameter(flow.tensor(w, placement=rank, sbp=flow.sbp.broadcast))

    def forward(self, x):
        x = x.to_global(placement=self.rank, sbp=flow.sbp.broadcast)  # from the rank of the stage before
        return flow.matmul(x, self.w)


class PipelineGraph(flow.nn.Graph):
    def __init__(self, stages):
        super().__init__()
        self.stages = stages
        for k, stage in enumerate(stages):
            self.stages[k].to(flow.nn.graph.GraphModule).set_stage(k, stage.rank)

    def build(self, x):
        return self.stages(x)


def run(graph=False, device="cpu", seed=0, batch=4, in_features=5, out_features=8):
    """One forward pass in float32; returns x, w0, w1, ..., out by name; the widths are in, out, 3, out, 3, ..."""
    rng, n = np.random.default_rng(seed), flow.env.get_world_size()
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    widths = [in_features, *([out_features, 3] * n)[:n]]
    weights = [rng.standard_normal(shape, dtype=np.float32) for shape in zip(widths, widths[1:])]

    ranks = [flow.placement(device, [rank]) for rank in range(n)]
    x = flow.tensor(x, placement=ranks[0], sbp=flow.sbp.broadcast)
    stages = flow.nn.Sequential(*[Stage(w, rank) for w, rank in zip(weights, ranks)])
    model = PipelineGraph(stages) if graph else stages
    return {"x": x, **{f"w{k}": stage.w for k, stage in enumerate(stages)}, "out": model(x)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name, tensor in tensors.items():  # a row for each rank: the shape of what it holds
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name:5}{str(tuple(tensor.shape)):8}{tensor.sbp[0]!s:26}local shapes", *map(tuple, held.tolist()))

    x, *weights, out = (tensor.numpy() for tensor in tensors.values())  # collective: all ranks call it
    np.testing.assert_allclose(out, np.linalg.multi_dot([x, *weights]), rtol=1e-5, atol=1e-5)
    if flow.env.get_rank() == 0:
        print("out equals x @ w0 @ w1 ... on a single device")


if __name__ == "__main__":
    main()
