"""Parameter server: rank 0 keeps the weights; copies go out, gradients come back.

    loss = part of rank 0 + part of rank 1 + ...    rank 0     rank 1     SBP
    x0         (4, 4)                               whole      nothing    B
    x1         (4, 4)                               nothing    whole      B
    w0         (4, 8)                               whole      nothing    B
    w1         (8, 4)                               whole      nothing    B
    w0 grad    (4, 8)                               whole      nothing    B
    w1 grad    (8, 4)                               whole      nothing    B

Why:   only one rank needs room for the optimizer state, but all traffic passes through its link.
Moves: (n-1) x the weights' bytes from rank 0 and as many back, each step: the total of an all-reduce, through one rank.
Run:   ./launch.sh recipes/by_hand/parameter_server.py [--graph]
Use it when there are few workers, or only one rank can keep the optimizer state; else see train_data_parallel.py.
Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, server):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=server, sbp=flow.sbp.broadcast))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=server, sbp=flow.sbp.broadcast))

    def forward(self, x):
        # without identity OneFlow 0.9.0 aborts a graph that moves a parameter to other ranks (register.cpp:75)
        w0 = flow._C.identity(self.w0).to_global(placement=x.placement, sbp=flow.sbp.broadcast)
        w1 = flow._C.identity(self.w1).to_global(placement=x.placement, sbp=flow.sbp.broadcast)
        return flow.matmul(flow.relu(flow.matmul(x, w0)), w1)


def rows_of_workers(array, workers):
    parts = np.array_split(array, len(workers))
    return [flow.tensor(part, placement=worker, sbp=flow.sbp.broadcast) for part, worker in zip(parts, workers)]


def loss_on_server(model, x, y):
    """The mean squared error over the rows of all workers."""
    size = sum(rows.numel() for rows in y)
    loss = 0
    # one to_global to all ranks at once would cost more: OneFlow 0.9.0 returns its gradient by an all-reduce
    for x_rows, y_rows in zip(x, y):
        part = flow.nn.functional.mse_loss(model(x_rows), y_rows, reduction="sum") / size
        loss = loss + part.to_global(placement=model.w0.placement, sbp=flow.sbp.broadcast)
    return loss


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = loss_on_server(self.model, x, y)
        loss.backward()  # in a graph this includes the update
        return loss


def placements(device, n):
    """One rank for each worker; the first is also the server."""
    return [flow.placement(device, [rank]) for rank in range(n)]


def train(workers, graph=False, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 with a placement for each worker; returns the model, on the first, and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = rows_of_workers(x, workers)
    y = rows_of_workers(y, workers)
    model = MLP(w0, w1, server=workers[0])
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(x, y)
        else:
            loss = loss_on_server(model, x, y)
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

    n = flow.env.get_world_size()
    model, losses = train(placements(args.device, n), args.graph)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, alone = train([flow.placement(args.device, [0])], args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        size = (n - 1) * 4 * sum(w.numel() for w in model.parameters())
        print(f"in each step rank 0 sends (n-1) x the weights = {size} bytes, and receives {size} bytes of gradients")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
