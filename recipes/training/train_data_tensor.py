"""Train data x tensor parallel: one mesh axis splits the batch, the other the weights.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0         rank 1         rank 2         rank 3         SBP
    x          (8, 4)                         rows 0-3       rows 0-3       rows 4-7       rows 4-7       S(0), B
    y          (8, 4)                         rows 0-3       rows 0-3       rows 4-7       rows 4-7       S(0), B
    w0         (4, 8)                         columns 0-3    columns 4-7    columns 0-3    columns 4-7    B, S(1)
    w1         (8, 4)                         rows 0-3       rows 4-7       rows 0-3       rows 4-7       B, S(0)

On the mesh [[0, 1], [2, 3]] a tensor has one SBP for each axis. Along axis 0 this is train_data_parallel.py, between
ranks 0 and 2, and between 1 and 3; along axis 1 it is train_tensor_parallel.py, between ranks 0 and 1, and 2 and 3.
Ranks 0 and 2 are replicas, and so are 1 and 3: what they hold is equal before and after each step.

Why:   tensor parallel sends in each layer, so few ranks with fast links share a layer, and the others split the batch.
Moves: each rank sends (w0 + w1)/2 along axis 0, to all-reduce the gradients, and half of the output along axis 1.
Run:   ./launch.sh recipes/training/train_data_tensor.py [--graph]
Use it when the batch alone cannot feed all ranks: put axis 1 inside a host, where links are fast.
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4,)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, mesh):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(1))))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(0))))

    def forward(self, x):
        hidden = flow.relu(flow.matmul(x, self.w0))
        return flow.matmul(hidden, self.w1).to_global(sbp=(flow.sbp.split(0), flow.sbp.broadcast))


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
    """The mesh: two replicas of the model, each split over the ranks of a row."""
    return flow.placement(device, np.arange(n).reshape(2, -1).tolist())


def train(mesh, graph=False, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a mesh; returns the model and the loss of each step."""
    if any(size % mesh.ranks.size for size in (batch, in_features, hidden_size, out_features)):
        raise ValueError("the number of ranks must divide each size: a graph of OneFlow 0.9.0 would hang or abort")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(x, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    y = flow.tensor(y, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    model = MLP(w0, w1, mesh)
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
        local = w.to_local()
        print(f"{name} {tuple(local.shape)} of {tuple(w.shape)}, its sum after training {local.sum().item():.4f}")
    _, alone = train(flow.placement(args.device, [[0]]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
