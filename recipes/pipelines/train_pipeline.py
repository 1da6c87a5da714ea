"""Train a pipeline: micro-batches overlap the stages.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0     rank 1     SBP
    x          (8, 4)                         whole      nothing    B
    y          (8, 4)                         nothing    whole      B
    w0         (4, 8)                         whole      nothing    B
    w1         (8, 4)                         nothing    whole      B

With one batch, one stage works at a time. With m micro-batches, stage 0 takes the next while stage 1 has the first:
the bubble, when stages wait, is (n-1)/(m+n-1) of the time; the weights come out the same. Eager mode runs GPipe: first
forward of all micro-batches, then backward, and a stage holds what backward needs of all m. In a graph it holds a fixed
number of them. pipeline_schedules.py has other orders, such as 1F1B.

Why:   a stage that waits for a whole batch is idle; with small parts, all stages work at once, each on another part.
Moves: forward each stage's output, backward its gradient, (batch, hidden) between neighbours, for any m.
Run:   ./launch.sh recipes/pipelines/train_pipeline.py [--graph] [--micro-batches 4]
Use it when there are many layers, or links are slow: it usually moves the least. Choose m several times n.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = range(2, 65)  # numbers of ranks; launch.sh refuses others


class Stage(flow.nn.Module):
    def __init__(self, w, ranks, last):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))
        self.ranks = ranks
        self.last = last

    def forward(self, x):
        w = flow._C.identity(self.w)  # without it a graph with micro-batches trains wrongly, silently (OneFlow 0.9.0)
        out = flow.matmul(x.to_global(placement=self.ranks), w)
        return out if self.last else flow.relu(out)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer, micro_batches):
        super().__init__()
        self.model = model
        for k, stage in enumerate(model):
            self.model[k].to(flow.nn.graph.GraphModule).set_stage(k, stage.ranks)
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the mean over micro-batches and the update
        return loss


def placements(device, n):
    """The ranks of each stage: one rank a stage."""
    return [flow.placement(device, [rank]) for rank in range(n)]


def train(stages, graph=False, steps=3, micro_batches=2, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement for each stage; returns the model and the loss of each step."""
    if batch % micro_batches:  # parts of different sizes would count the same
        raise ValueError(f"{micro_batches} micro-batches must divide the {batch} rows of a batch")
    features = [in_features, *[hidden_size] * (len(stages) - 1), out_features]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    weights = [rng.standard_normal(shape, dtype=np.float32) / 2 for shape in zip(features, features[1:])]

    x = flow.tensor(x, placement=stages[0], sbp=flow.sbp.broadcast)
    y = flow.tensor(y, placement=stages[-1], sbp=flow.sbp.broadcast)
    last = len(stages) - 1
    model = flow.nn.Sequential(*[Stage(w, stages[k], last=k == last) for k, w in enumerate(weights)])
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = TrainingGraph(model, optimizer, micro_batches) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(x, y).mean()  # of the micro-batches
        else:
            parts = zip(x.chunk(micro_batches), y.chunk(micro_batches))
            loss = sum(flow.nn.functional.mse_loss(model(x_part), y_part) for x_part, y_part in parts) / micro_batches
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batches", type=int, choices=[1, 2, 4, 8], default=2)
    args = parser.parse_args()

    n, m = flow.env.get_world_size(), args.micro_batches
    model, losses = train(placements(args.device, n), args.graph, micro_batches=m)
    rank = flow.env.get_rank()
    print(
        f"w{rank} {tuple(model[rank].w.to_local().shape)} of {tuple(model[rank].w.shape)}, and nothing of other stages"
    )
    _, alone = train([flow.placement(args.device, [0])] * n, args.graph, micro_batches=m)  # on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        print(f"pipeline bubble, (n-1)/(m+n-1) with n = {n} and m = {m}: {(n - 1) / (m + n - 1):.0%} of the time")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
