"""Train data parallel: all-reduce the gradients; all replicas stay equal.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      SBP
    x          (8, 4)                         rows 0-3    rows 4-7    S(0)
    y          (8, 4)                         rows 0-3    rows 4-7    S(0)
    w0         (4, 8)                         whole       whole       B
    w1         (8, 4)                         whole       whole       B
    w0 grad    (4, 8)                         whole       whole       B
    w1 grad    (8, 4)                         whole       whole       B

The all-reduce runs in backward() in eager mode, before the update in a graph. The optimizer's state is B as well.

Why:   each rank's rows give one addend of each gradient: it is P. A weight in B needs it in B, and P -> B adds it up.
Moves: an all-reduce of each weight's gradient every step: 2 (n-1)/n x the bytes of the weights from each of n ranks.
Run:   ./launch.sh recipes/training/train_data_parallel.py [--graph]
Use it when weights, gradients and optimizer state fit on every device; else see zero_optimizer.py, fully_sharded.py.
Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704.
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
        # for micro-batches, first read each weight through flow._C.identity, as gradient_accumulation.py does

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the all-reduce and the update
        return loss


def make_optimizer(name, parameters):
    if name == "sgd":
        return flow.optim.SGD(parameters, lr=0.1)
    if name == "momentum":
        return flow.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if name == "adam":
        return flow.optim.Adam(parameters, lr=0.1)
    return flow.optim.AdamW(parameters, lr=0.1, weight_decay=0.2)


def train(ranks, graph=False, steps=3, optimizer="adam", batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MLP(w0, w1, ranks)
    optimizer = make_optimizer(optimizer, model.parameters())
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
    parser.add_argument("--optimizer", choices=["sgd", "momentum", "adam", "adamw"], default="adam")
    args = parser.parse_args()

    model, losses = train(flow.placement.all(args.device), args.graph, optimizer=args.optimizer)
    for name, w in model.named_parameters():
        local = w.to_local()
        print(f"{name} {tuple(local.shape)} of {tuple(w.shape)}, its sum after training {local.sum().item():.4f}")
    _, alone = train(flow.placement(args.device, [0]), args.graph, optimizer=args.optimizer)  # on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
