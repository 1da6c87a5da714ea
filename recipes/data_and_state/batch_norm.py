"""Batch norm: normalize by the whole batch, not by each rank's rows.

    h = x @ w, out = (h - mean) / sqrt(var)    rank 0      rank 1      SBP
    x              (8, 4)                      rows 0-3    rows 4-7    S(0)
    y              (8, 8)                      rows 0-3    rows 4-7    S(0)
    w              (4, 8)                      whole       whole       B
    mean           (1, 8)                      whole       whole       B
    var            (1, 8)                      whole       whole       B
    out            (8, 8)                      rows 0-3    rows 4-7    S(0)

mean and var are those of each column of h. Each rank computes a partial sum from its rows, and P -> B adds them up. In
backward their gradients are added up too.

Why:   a mean over all rows is a sum over the ranks, and each rank has one addend of it, from its own rows.
Moves: 4 all-reduces of a row, mean and var forward and backward, and one of w's gradient every step.
Run:   ./launch.sh recipes/data_and_state/batch_norm.py [--graph]
Use it when a rank has too few rows for good statistics. Scale, shift and running statistics (for eval mode) are left
out. nn.LayerNorm is right with S(0).
Source: S. Ioffe and C. Szegedy, "Batch Normalization", arXiv:1502.03167.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class NormalizedLayer(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        h = flow.matmul(x, self.w)
        # by hand: nn.BatchNorm1d silently takes mean and var of each shard, and nn.SyncBatchNorm needs a GPU
        mean = h.mean(dim=0, keepdim=True).to_global(sbp=flow.sbp.broadcast)
        centered = h - mean
        var = (centered * centered).mean(dim=0, keepdim=True).to_global(sbp=flow.sbp.broadcast)
        out = centered / flow.sqrt(var + 1e-5)
        return out


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the update
        return loss


def train(ranks, graph=False, seed=0, steps=3, batch=8, in_features=4, out_features=8):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = NormalizedLayer(w, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(x, y)
        else:
            loss = flow.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    ranks = flow.placement.all(args.device)
    model, losses = train(ranks, args.graph)
    flow.manual_seed(0)
    x = flow.randn(4 * flow.env.get_world_size(), len(model.w), placement=ranks, sbp=flow.sbp.split(0))
    out = model(x).detach()
    own, column = out.to_local().numpy()[:, 0], out.numpy()[:, 0]  # collective: all ranks call it
    print(f"column 0 of out, {len(own)} of {len(column)} rows: mean {own.mean():.2f}, variance {own.var():.2f}")
    np.testing.assert_allclose([column.mean(), column.var()], [0, 1], atol=1e-4)
    _, alone = train(flow.placement(args.device, [0]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"column 0 of out, all rows: mean {abs(column.mean()):.2f}, variance {column.var():.2f}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
