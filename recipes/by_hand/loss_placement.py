"""Loss placement: compute the loss on one rank, or a part of it on each.

    --loss first        rank 0      rank 1      SBP
    x         (8, 4)    rows 0-3    rows 4-7    S(0)
    y         (8, 4)    whole       nothing     B
    out       (8, 4)    rows 0-3    rows 4-7    S(0)
    moved     (8, 4)    whole       nothing     B
    w0 grad   (4, 8)    whole       whole       B
    w1 grad   (8, 4)    whole       whole       B

out moves to where the labels y are. --loss first: all of y is on rank 0. --loss other: all of y is on the last rank,
which does nothing else. --loss each: y is split like out, and each rank's loss is an addend of a partial sum, P.

Why:   a loss needs outputs and labels on one rank; where each rank has its labels, only a number is left to add up.
Moves: first: (n-1)/n of out to rank 0, (n-1)/n of its gradient back; eager mode sends as much from each of n ranks.
       other: out and its gradient, once. each: neither. All: the all-reduce of train_data_parallel.py.
Run:   ./launch.sh recipes/by_hand/loss_placement.py [--graph] [--loss each|first|other]
Use it to choose: use "each" unless the loss needs all outputs in one place, as a ranking loss does.
Source: OneFlow documentation, oneflow.Tensor.to_global (grad_sbp).
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, ranks):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        return flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)


def loss_of(model, x, y):
    """The mean squared error, where y is."""
    out = model(x)
    # without grad_sbp each rank gets the whole gradient of out, and runs backward for the whole batch
    moved = out.to_global(placement=y.placement, sbp=y.sbp, grad_sbp=flow.sbp.split(0))
    return flow.nn.functional.mse_loss(moved, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = loss_of(self.model, x, y)
        loss.backward()  # in a graph this includes the update
        return loss


def placements(device, n, loss="first"):
    """Two stages: where the model is, and where the loss is."""
    if loss == "first":
        return [flow.placement.all(device), flow.placement(device, [0])]
    if loss == "other":
        return [flow.placement(device, list(range(n - 1))), flow.placement(device, [n - 1])]
    return [flow.placement.all(device), flow.placement.all(device)]


def train(stages, graph=False, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on the placements of the model and the loss; returns the model and the loss of each step."""
    ranks, loss_ranks = stages
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=loss_ranks, sbp=flow.sbp.split(0) if loss_ranks == ranks else flow.sbp.broadcast)
    model = MLP(w0, w1, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(x, y)
        else:
            loss = loss_of(model, x, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    words = "on every rank, on the first, or on the last, which has no part of the model"
    parser.add_argument("--loss", choices=["each", "first", "other"], default="first", help=words)
    args = parser.parse_args()

    stages = placements(args.device, flow.env.get_world_size(), args.loss)
    model, losses = train(stages, args.graph)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, alone = train([flow.placement(args.device, [0])] * 2, args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print("the model is on ranks", *stages[0].ranks, "and the loss on", *stages[1].ranks)
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
