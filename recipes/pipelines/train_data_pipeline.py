"""Train data x pipeline parallel: each of two stages splits the batch.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      rank 2      rank 3      SBP
    x          (8, 4)                         rows 0-3    rows 4-7    nothing     nothing     S(0)
    y          (8, 4)                         nothing     nothing     rows 0-3    rows 4-7    S(0)
    w0         (4, 8)                         whole       whole       nothing     nothing     B
    w1         (8, 4)                         nothing     nothing     whole       whole       B

Each stage is train_data_parallel.py on its own two ranks. Its output keeps its SBP on the way to the next stage, so
rank 0 sends its rows to rank 2, and rank 1 to rank 3. One stage works at a time; train_pipeline.py overlaps them.

Why:   ranks that split the batch of a stage make it faster, and each sends on only its own rows.
Moves: within a stage an all-reduce of its weight's gradient: each rank sends w0 or w1. Between the stages half of
       relu(x @ w0) from each of ranks 0 and 1, and backward half of its gradient from each of ranks 2 and 3.
Run:   ./launch.sh recipes/pipelines/train_data_pipeline.py [--graph]
Use it when each layer fits on one device and the model does not; put each stage inside a host.
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4,)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, stages):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=stages[0], sbp=flow.sbp.broadcast))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=stages[1], sbp=flow.sbp.broadcast))
        self.stages = stages

    def forward(self, x):
        hidden = flow.relu(flow.matmul(x, self.w0))
        hidden = hidden.to_global(placement=self.stages[1])  # to the next stage; the SBP stays
        return flow.matmul(hidden, self.w1)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        # for micro-batches, first read each weight through flow._C.identity, as gradient_accumulation.py does

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the update
        return loss


def placements(device, n):
    """The ranks of the two stages: each has half of them."""
    return [flow.placement(device, ranks.tolist()) for ranks in np.split(np.arange(n), 2)]


def train(stages, graph=False, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement for each stage; returns the model and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=stages[0], sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=stages[1], sbp=flow.sbp.split(0))
    model = MLP(w0, w1, stages)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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

    model, losses = train(placements(args.device, flow.env.get_world_size()), args.graph)
    for name, w in model.named_parameters():
        if flow.env.get_rank() in w.placement.ranks:
            print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}, and nothing of the other stage")
    _, alone = train([flow.placement(args.device, [0])] * 2, args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
