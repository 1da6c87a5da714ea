"""Metrics: compute loss and accuracy over all ranks from sums and counts.

    3 classes          rank 0          rank 1          SBP
    x        (25, 5)   rows 0-12       rows 13-24      S(0)
    y        (25, 3)   rows 0-12       rows 13-24      S(0)
    w        (5, 3)    whole           whole           B
    out      (25, 3)   rows 0-12       rows 13-24      S(0)
    samples  (25, 2)   rows 0-12       rows 13-24      S(0)
    sums     (1, 2)    of its rows     of its rows     P
    means    (1, 2)    whole           whole           B

samples has the squared error of each row and whether its class is right. Each rank has a partial sum of them, P, and
P -> B adds these up; samples.mean(dim=0) is the same, in P. by_hand does it with local tensors: the mean of the ranks'
means would be wrong, as some have fewer rows.

Why:   a sum of sums is right for any split; a mean of means only if all ranks have as many rows.
Moves: an all-reduce of two numbers, or of three by hand; never the samples.
Run:   ./launch.sh recipes/data_and_state/metrics.py [--graph]
Use it whenever a rank reports a loss or an accuracy. Over batches, add up the sums and the row counts, and divide once.
Source: OneFlow documentation, "Global Tensor"; OneFlow API reference, oneflow.comm.all_reduce.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 26)  # numbers of ranks; launch.sh refuses others


class Layer(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        return flow.matmul(x, self.w)


class EvaluationGraph(flow.nn.Graph):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, x, y):
        return evaluate(self.layer, x, y)


def evaluate(layer, x, y):
    """The error of each row and whether its class is right, (batch, 2), and the means of both, (1, 2)."""
    out = layer(x)
    errors = ((out - y) * (out - y)).sum(dim=1, keepdim=True)
    correct = out.argmax(dim=1, keepdim=True) == y.argmax(dim=1, keepdim=True)
    samples = flow.cat([errors, correct.to(flow.float32)], dim=1)
    sums = samples.sum(dim=0, keepdim=True)
    means = sums.to_global(sbp=flow.sbp.broadcast) / len(samples)  # len is that of the global tensor
    return samples, means


def average_by_hand(own):
    """The same means from the local rows of each rank."""
    count = flow.ones(len(own), 1, device=own.device)
    totals = flow.cat([own, count], dim=1).sum(dim=0)
    flow.comm.all_reduce(totals)  # changes totals and returns None
    return totals[:2] / totals[2]


def run(ranks, graph=False, seed=0, batch=25, in_features=5, classes=3):
    """Evaluate a layer in float32; returns x, y (one-hot), w, samples, means, and the means by hand."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, classes), dtype=np.float32)
    y = np.eye(classes, dtype=np.float32)[rng.integers(classes, size=batch)]

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    layer = Layer(w, ranks)
    evaluation = EvaluationGraph(layer) if graph else None
    with flow.no_grad():
        samples, means = evaluation(x, y) if graph else evaluate(layer, x, y)
        by_hand = average_by_hand(samples.to_local())
    return x, y, layer.w, samples, means, by_hand


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="evaluate inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    x, y, w, samples, means, by_hand = run(flow.placement.all(args.device), args.graph)
    own = samples.to_local().numpy()
    print(f"{len(own)} of {len(samples)} rows: loss {own[:, 0].mean():.4f}, accuracy {own[:, 1].mean():.4f}")
    x, y, w, samples, means = (tensor.numpy() for tensor in (x, y, w, samples, means))  # collective: all ranks call it
    out = x @ w
    expected = np.stack([((out - y) ** 2).sum(axis=1), out.argmax(axis=1) == y.argmax(axis=1)], axis=1)
    loss, accuracy = expected.mean(axis=0)
    np.testing.assert_allclose(samples, expected, rtol=1e-5)
    np.testing.assert_allclose(means, [[loss, accuracy]], rtol=1e-5)
    np.testing.assert_allclose(by_hand.numpy(), [loss, accuracy], rtol=1e-5)
    if flow.env.get_rank() == 0:
        by_rank = [rows.mean(axis=0) for rows in np.array_split(samples, flow.env.get_world_size())]
        print("mean of the ranks' means: loss {:.4f}, accuracy {:.4f}".format(*np.mean(by_rank, axis=0)))
        print(f"all rows: loss {loss:.4f}, accuracy {accuracy:.4f}, as on a single device")


if __name__ == "__main__":
    main()
