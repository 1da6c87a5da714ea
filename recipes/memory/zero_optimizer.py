"""ZeRO: a data-parallel graph splits weights and optimizer state.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      SBP
    x            (8, 4)                       rows 0-3    rows 4-7    S(0)
    y            (8, 4)                       rows 0-3    rows 4-7    S(0)
    w0           (4, 8)                       whole       whole       B
    w1           (8, 4)                       whole       whole       B
    w0 exp_avg   (4, 8)                       rows 0-1    rows 2-3    S(0)
    w1 exp_avg   (8, 4)                       rows 0-3    rows 4-7    S(0)
    new w0       (4, 8)                       rows 0-1    rows 2-3    S(0)
    new w1       (8, 4)                       rows 0-3    rows 4-7    S(0)

From the first step on each rank keeps its rows of each weight and of Adam's state. Backward gives each rank an addend
of every whole gradient; the reduce-scatter leaves it the sum of its rows. Stages 1, 2 and 3 are the same graph on CPU.

Why:   n replicas would keep the same moments and make the same update n times; 1/n of it on each rank is enough.
Moves: an all-gather of each weight, a reduce-scatter of its gradient: each (n-1)/n x the weights from each of n ranks.
Run:   ./launch.sh recipes/memory/zero_optimizer.py [--shard-min-size 1024]
Use it when Adam's two moments do not fit on each device; fully_sharded.py does the same by hand, and in eager mode.
Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = range(2, 5)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, ranks):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        # without identity OneFlow 0.9.0 aborts a graph that gathers a parameter: "register.cpp:75 Check failed"
        hidden = flow.relu(flow.matmul(x, flow._C.identity(self.w0)))
        return flow.matmul(hidden, flow._C.identity(self.w1))


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer, shard_min_size):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        # a weight stays whole, silently, if a rank would get fewer than shard_min_size elements (by default 1024)
        self.config.enable_zero(True, shard_min_size=shard_min_size)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the reduce-scatters and the update
        return loss


def train(ranks, steps=3, shard_min_size=1, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MLP(w0, w1, ranks)
    optimizer = flow.optim.Adam(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer, shard_min_size)
    losses = []
    for _ in range(steps):
        loss = training(x, y)
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shard-min-size", type=int, default=1, help="elements; OneFlow's own default is 1024")
    args = parser.parse_args()
    if args.shard_min_size < 1:
        parser.error(f"--shard-min-size {args.shard_min_size}: 1 or more")

    model, losses = train(flow.placement.all(args.device), shard_min_size=args.shard_min_size)
    for name, w in model.named_parameters():
        share = w.to_local().numel() / w.numel()
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}: {share:.0%} of it and of Adam's state")
    _, alone = train(flow.placement(args.device, [0]))  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
