"""Auto parallel: nn.Graph chooses each weight's SBP by its cost.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0           rank 1              SBP
    x         (8, 256)                        rows 0-3         rows 4-7            S(0)
    y         (8, 256)                        rows 0-3         rows 4-7            S(0)
    w0        (256, 1024)                     whole            whole               B
    w1        (1024, 256)                     whole            whole               B
    new w0    (256, 1024)                     columns 0-511    columns 512-1023    S(1)
    new w1    (1024, 256)                     rows 0-511       rows 512-1023       S(0)

After the first call the weights have the SBP that OneFlow chose: at batch 8 columns, then rows, as in Megatron-LM,
which sends activations and no weight's gradient. At batch 1024 they stay B, data parallel; so do small weights.

Why:   data parallel sends gradients, tensor parallel activations; which are smaller depends on the batch.
Moves: at batch 8, x and y gathered, out all-reduced: (n-1)/n x (bytes of x + 3 x those of y) from each of n ranks.
Run:   ./launch.sh recipes/memory/auto_parallel.py [--batch 1024]
Use it to check your own layout against OneFlow's choice, which depends on the sizes.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", arXiv:1909.08053, section 3.
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
        hidden = flow.relu(flow.matmul(x, self.w0))
        return flow.matmul(hidden, self.w1)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        # with a large batch and large weights OneFlow 0.9.0 may choose to gather a weight, and abort
        self.config.enable_auto_parallel(True)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the update
        return loss


def train(ranks, steps=3, batch=8, in_features=256, hidden_size=1024, out_features=256):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32) / 16
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32) / 16

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MLP(w0, w1, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = training(x, y)
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=8, help="rows of x: what OneFlow chooses depends on it")
    args = parser.parse_args()
    n = flow.env.get_world_size()
    if args.batch < n:
        parser.error(f"--batch {args.batch}: {n} or more, a row for each rank")

    model, losses = train(flow.placement.all(args.device), batch=args.batch)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}: OneFlow chose {w.sbp[0]}")
    _, alone = train(flow.placement(args.device, [0]), batch=args.batch)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
