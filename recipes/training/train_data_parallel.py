"""Train data parallel: all-reduce the gradients; all replicas stay equal.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      SBP
    x          (8, 4)                         rows 0-3    rows 4-7    S(0)
    y          (8, 4)                         rows 0-3    rows 4-7    S(0)
    w0         (4, 8)                         whole       whole       B
    w1         (8, 4)                         whole       whole       B
    w0 grad    (4, 8)                         whole       whole       B
    w1 grad    (8, 4)                         whole       whole       B

Each rank's rows give one part of each gradient: a partial sum, P. A weight that is B wants its gradient B, and P -> B
is the all-reduce. Eager mode runs it in backward(); a graph runs it before the update, so the gradients that the graph
returns are still P. The optimizer's state is B, like the weights.

Moves: an all-reduce of each weight's gradient every step: 2 (n-1)/n x the bytes of the weights from each of n ranks.
Run:   ./launch.sh recipes/training/train_data_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/train_data_parallel.py [--graph]
Use it when weights, gradients and optimizer state fit on every device; else see zero_optimizer.py, fully_sharded.py.
Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)
OPTIMIZERS = {  # class, its options, and the names of its state: in eager mode, and in a graph
    "sgd": (flow.optim.SGD, {"lr": 0.1}, {}),
    "momentum": (flow.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buf": "momentum"}),
    "adam": (flow.optim.Adam, {"lr": 0.1}, {"exp_avg": "m", "exp_avg_sq": "v"}),
    "adamw": (flow.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}, {"exp_avg": "m", "exp_avg_sq": "v"}),
}


class Network(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, x, y):
        out = flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)
        return flow.nn.functional.mse_loss(out, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        return loss, module.w0.grad, module.w1.grad


def run(
    graph=False, device="cpu", seed=0, steps=3, optimizer="adam", batch=None, in_features=4, hidden=8, out_features=4
):
    """Some steps in float32; returns x, y, the weights before and after, gradients, optimizer state, and the losses."""
    batch = batch or max(8, flow.env.get_world_size())  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    w0 = flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast)
    module = Network(w0, w1)
    kind, options, state_names = OPTIMIZERS[optimizer]
    update = kind(module.parameters(), **options)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            loss, w0_grad, w1_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            loss = model(x, y)
            loss.backward()
            update.step()
            w0_grad, w1_grad = module.w0.grad, module.w1.grad
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, "w0": w0, "w1": w1, "w0 grad": w0_grad, "w1 grad": w1_grad}
    state = model.state_dict() if graph else update.state_dict()["state"]
    for i in (0, 1):
        for name, in_graph in state_names.items():
            tensors[f"w{i} {name}"] = state[f"module.w{i}-{in_graph}"] if graph else state[i][name]
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for kind, word in {"weights": "new w", "gradients": "grad", "Adam's state": "exp_avg"}.items():
        held = flow.tensor([sum(4 * tensor.to_local().numel() for name, tensor in tensors.items() if word in name)])
        held = held.to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{kind:13} bytes on each rank:", *held)

    x, y, *weights = (tensors[name].numpy() for name in ("x", "y", "w0", "w1"))  # collective: all ranks call it
    losses, m, v = tensors["losses"].numpy(), [0, 0], [0, 0]
    for step, loss in enumerate(losses, 1):  # Adam on a single device
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        error *= 2 / error.size
        for i, gradient in enumerate([x.T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]):
            m[i], v[i] = 0.9 * m[i] + 0.1 * gradient, 0.999 * v[i] + 0.001 * gradient**2
            weights[i] -= 0.1 * m[i] / (1 - 0.9**step) / (np.sqrt(v[i] / (1 - 0.999**step)) + 1e-8)
    for i in (0, 1):
        np.testing.assert_allclose(tensors[f"new w{i}"].numpy(), weights[i], rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
