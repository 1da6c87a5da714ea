"""Gradient accumulation: the gradients of micro-batches add up before one update.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1       SBP
    x          (16, 4)                        rows 0-7    rows 8-15    S(0)
    y          (16, 4)                        rows 0-7    rows 8-15    S(0)
    w0         (4, 8)                         whole       whole        B
    w1         (8, 4)                         whole       whole        B
    w0 grad    (4, 8)                         whole       whole        B
    w1 grad    (8, 4)                         whole       whole        B

Micro-batch i is the i-th part of each rank's rows, and only its activations are alive. The m losses, each divided by m,
have gradients that add up to that of the large batch. A graph takes the large batch and splits it itself.

Why:   the gradient of a mean is the mean of the gradients, so the parts may come one after the other.
Moves: in eager mode an all-reduce of the weights' gradients for each micro-batch, m x 2 (n-1)/n x the weights from each
       of n ranks. A graph adds up the partial sums first and sends once: 2 (n-1)/n x the weights.
Run:   ./launch.sh recipes/training/gradient_accumulation.py [--graph] [--micro-batches 4]
Use it when the activations of the batch that you want do not fit; in eager mode only if links are fast.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965, section 2.2.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (2, 4)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, ranks):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        w0 = flow._C.identity(self.w0)  # without it a graph with micro-batches trains wrongly, silently (OneFlow 0.9.0)
        w1 = flow._C.identity(self.w1)
        return flow.matmul(flow.relu(flow.matmul(x, w0)), w1)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer, micro_batches):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the division by m, the sum and the update
        return loss


def accumulate(model, x, y, micro_batches):
    """Add the gradients of all micro-batches to .grad; returns the loss of each."""
    losses = []
    for x_part, y_part in zip(x.to_local().chunk(micro_batches), y.to_local().chunk(micro_batches)):
        x_part = x_part.to_global(placement=x.placement, sbp=flow.sbp.split(0))
        y_part = y_part.to_global(placement=y.placement, sbp=flow.sbp.split(0))
        loss = flow.nn.functional.mse_loss(model(x_part), y_part)
        (loss / micro_batches).backward()
        losses.append(loss.numpy())  # collective: all ranks call it
    return losses


def train(ranks, graph=False, steps=3, micro_batches=2, batch=16, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    n = ranks.ranks.size
    if batch % (n * micro_batches):  # parts of different sizes would count the same
        raise ValueError(f"{n} ranks x {micro_batches} micro-batches must divide the {batch} rows of a batch")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MLP(w0, w1, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = TrainingGraph(model, optimizer, micro_batches) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            micro_losses = training(x, y).numpy()
        else:
            optimizer.zero_grad(set_to_none=True)
            micro_losses = accumulate(model, x, y, micro_batches)
            optimizer.step()
        losses.append(np.mean(micro_losses))
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batches", type=int, choices=[1, 2, 4], default=2)
    args = parser.parse_args()

    model, losses = train(flow.placement.all(args.device), args.graph, micro_batches=args.micro_batches)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, alone = train(flow.placement(args.device, [0]), args.graph, micro_batches=1)  # at once, on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        times, when = (1, "the last") if args.graph else (args.micro_batches, "each")
        print(f"all-reduces in a step: {2 * times}, of the gradients of 2 weights after {when} micro-batch")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
