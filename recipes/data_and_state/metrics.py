"""Metrics: loss and accuracy over all ranks, from sums and counts.

    3 classes          rank 0          rank 1          SBP
    x        (25, 5)   rows 0-12       rows 13-24      S(0)
    y        (25, 3)   rows 0-12       rows 13-24      S(0)
    w        (5, 3)    whole           whole           B
    out      (25, 3)   rows 0-12       rows 13-24      S(0)
    samples  (25, 2)   rows 0-12       rows 13-24      S(0)
    sums     (1, 2)    of its rows     of its rows     P
    means    (1, 2)    whole           whole           B

samples has the squared error of each row and whether the class is right. The sum of split rows is a partial sum, P, and
P -> B adds it up. The mean of a global tensor, built_in, is the same, in P. by_hand does it with local tensors.

Moves: an all-reduce of two numbers, or of three by hand; never the samples.
Run:   ./launch.sh recipes/data_and_state/metrics.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/metrics.py [--graph]
Use it whenever a rank reports a loss or an accuracy. Call means.numpy() on all ranks, also where only one prints it.
Source: OneFlow documentation, "Global Tensor"; OneFlow API reference, oneflow.comm.all_reduce.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Metrics(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x, y):
        out = flow.matmul(x, self.w)
        errors = ((out - y) * (out - y)).sum(dim=1, keepdim=True)
        right = out.argmax(dim=1, keepdim=True) == y.argmax(dim=1, keepdim=True)
        samples = flow.cat([errors, right.to(flow.float32)], dim=1)
        sums = samples.sum(dim=0, keepdim=True)
        means = sums.to_global(sbp=flow.sbp.broadcast) / len(samples)  # len is that of the global tensor
        return out, samples, sums, means, samples.mean(dim=0, keepdim=True)


class MetricsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x, y):
        return self.module(x, y)


def run(graph=False, device="cpu", seed=0, batch=None, features=5, classes=3):
    """Evaluate in float32; returns the tensors of the table, built_in, and the local by_hand and of_means."""
    batch = batch or max(25, flow.env.get_world_size())  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, features), dtype=np.float32)
    w = rng.standard_normal((features, classes), dtype=np.float32)
    y = np.eye(classes, dtype=np.float32)[rng.integers(classes, size=batch)]

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    module = Metrics(w, ranks)
    model = MetricsGraph(module) if graph else module
    with flow.no_grad():
        out, samples, sums, means, built_in = model(x, y)

    mine = samples.to_local()
    totals = flow.cat([mine, flow.ones(len(mine), 1, device=device)], dim=1).sum(dim=0)  # the last one is the count
    flow.comm.all_reduce(totals)  # changes totals and returns None
    by_hand = totals[:2] / totals[2]
    of_means = mine.mean(dim=0)  # the wrong way: it ignores that some ranks have fewer rows, silently
    flow.comm.all_reduce(of_means)
    of_means = of_means / flow.env.get_world_size()

    tensors = {"x": x, "y": y, "w": module.w, "out": out, "samples": samples, "sums": sums, "means": means}
    return {**tensors, "built_in": built_in, "by_hand": by_hand, "of_means": of_means}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    values = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    n = flow.env.get_world_size()
    shards = np.array_split(values["samples"], n)
    if flow.env.get_rank() == 0:
        print("          ", *(f"rank {rank}".rjust(9) for rank in range(n)), "  all rows  mean of means")
        print("rows      ", *(f"{len(shard):9}" for shard in shards), f"{len(values['samples']):10}")
        for column, name in enumerate(("loss", "accuracy")):
            by_rank = (f"{shard[:, column].mean():9.4f}" for shard in shards)
            print(f"{name:10}", *by_rank, f"{values['means'][0, column]:10.4f} {values['of_means'][column]:14.4f}")

    out = values["x"] @ values["w"]
    right = out.argmax(axis=1) == values["y"].argmax(axis=1)
    expected = [((out - values["y"]) ** 2).sum(axis=1).mean(), right.mean()]
    for name in ("means", "built_in", "by_hand"):
        np.testing.assert_allclose(values[name].ravel(), expected, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print("loss and accuracy of all rows equal those of a single device; mean of means is wrong with uneven shards")


if __name__ == "__main__":
    main()
