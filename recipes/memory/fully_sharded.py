"""Fully sharded (FSDP): split every weight; gather it only during a step.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      SBP
    x          (8, 4)                         rows 0-3    rows 4-7    S(0)
    y          (8, 4)                         rows 0-3    rows 4-7    S(0)
    w0         (4, 8)                         rows 0-1    rows 2-3    S(0)
    w1         (8, 4)                         rows 0-3    rows 4-7    S(0)
    w0 grad    (4, 8)                         rows 0-1    rows 2-3    S(0)
    w1 grad    (8, 4)                         rows 0-3    rows 4-7    S(0)

Between steps weights, gradients and Adam's state take 1/n of their bytes. As PyTorch's fully_shard with
reshard_after_forward=False: the unsharded weights stay in memory after forward, so backward needs no second all-gather.

Why:   the update of a row needs only the gradient and the state of that row; only the matmuls need the whole weight.
Moves: an all-gather of each weight, a reduce-scatter of its gradient: each (n-1)/n x the weights from each of n ranks.
Run:   ./launch.sh recipes/memory/fully_sharded.py [--graph]
Use it when the weights alone fit on a device, but not with gradients and optimizer state: a step gathers all weights.
Source: Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = range(2, 5)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, ranks):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=ranks, sbp=flow.sbp.split(0)))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=ranks, sbp=flow.sbp.split(0)))

    def forward(self, x):
        # without identity OneFlow 0.9.0 aborts a graph that gathers a parameter: "register.cpp:75 Check failed"
        w0 = flow._C.identity(self.w0).to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))  # all-gather
        hidden = flow.relu(flow.matmul(x, w0))
        w1 = flow._C.identity(self.w1).to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))
        return flow.matmul(hidden, w1)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the reduce-scatters and the update
        return loss


def train(ranks, graph=False, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MLP(w0, w1, ranks)
    del w0, w1  # from here on each rank holds its rows only
    optimizer = flow.optim.Adam(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(x, y)
        else:
            optimizer.zero_grad(set_to_none=True)  # first, to free the old gradients before the weights are gathered
            loss = flow.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    model, losses = train(flow.placement.all(args.device), args.graph)
    for name, w in model.named_parameters():
        share = w.to_local().numel() / w.numel()
        print(
            f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}: {share:.0%} of it, its gradient and Adam's state"
        )
    _, alone = train(flow.placement(args.device, [0]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
