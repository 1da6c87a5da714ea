"""Parameter server: rank 0 keeps the weights; copies go out, gradients come back.

    loss = part of rank 0 + part of rank 1 + ...    rank 0     rank 1     SBP
    x0         (4, 4)                               whole      nothing    B
    x1         (4, 4)                               nothing    whole      B
    w0         (4, 8)                               whole      nothing    B
    w1         (8, 4)                               whole      nothing    B
    w0 grad    (4, 8)                               whole      nothing    B
    w1 grad    (8, 4)                               whole      nothing    B

Moves: (n-1) x the weights' bytes from rank 0 and as many back, each step: the total of an all-reduce, through one rank.
Run:   ./launch.sh recipes/by_hand/parameter_server.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/parameter_server.py [--graph]
Use it when there are few workers, or only one rank can keep the optimizer state; else see train_data_parallel.py.
Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Network(flow.nn.Module):
    def __init__(self, w0, w1, ranks, size):
        super().__init__()
        self.ranks, self.size = ranks, size
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, xs, ys):
        # without identity a graph aborts OneFlow 0.9.0 (register.cpp:75) when a parameter itself moves to other ranks
        weights, loss = [flow._C.identity(self.w0), flow._C.identity(self.w1)], 0
        for rank, x, y in zip(self.ranks, xs, ys):
            # one to_global to all ranks at once costs more: OneFlow 0.9.0 returns its gradient by an all-reduce
            w0, w1 = (w.to_global(placement=rank, sbp=flow.sbp.broadcast) for w in weights)
            out = flow.matmul(flow.relu(flow.matmul(x, w0)), w1)
            part = flow.nn.functional.mse_loss(out, y, reduction="sum") / self.size  # ranks may differ in rows
            loss = loss + part.to_global(placement=self.ranks[0], sbp=flow.sbp.broadcast)
        return loss


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, xs, ys):
        loss = self.module(xs, ys)
        loss.backward()  # in a graph this includes the update
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        return loss, module.w0.grad, module.w1.grad


def run(graph=False, device="cpu", seed=0, steps=3, batch=None, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns the rows of each rank, weights before and after, gradients, momentum, losses."""
    n = flow.env.get_world_size()
    batch = batch or max(8, n)  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = [flow.placement(device, [rank]) for rank in range(n)]
    xs = [flow.tensor(rows, placement=rank, sbp=flow.sbp.broadcast) for rank, rows in zip(ranks, np.array_split(x, n))]
    ys = [flow.tensor(rows, placement=rank, sbp=flow.sbp.broadcast) for rank, rows in zip(ranks, np.array_split(y, n))]
    w0, w1 = (flow.tensor(w, placement=ranks[0], sbp=flow.sbp.broadcast) for w in (w0, w1))  # on the server
    module = Network(w0, w1, ranks, y.size)
    update = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            loss, w0_grad, w1_grad = model(xs, ys)
        else:
            update.zero_grad(set_to_none=True)
            loss = model(xs, ys)
            loss.backward()
            update.step()
            w0_grad, w1_grad = module.w0.grad, module.w1.grad
        losses.append(loss)

    tensors = {f"{name}{k}": rows for k, pair in enumerate(zip(xs, ys)) for name, rows in zip("xy", pair)}
    tensors.update({"w0": w0, "w1": w1, "w0 grad": w0_grad, "w1 grad": w1_grad})
    state = model.state_dict() if graph else update.state_dict()["state"]
    for i in (0, 1):
        tensors[f"w{i} momentum_buf"] = state[f"module.w{i}-momentum"] if graph else state[i]["momentum_buf"]
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    n = flow.env.get_world_size()
    ranks = flow.placement("cpu", list(range(n)))
    for kind, word in {"weights": "new w", "gradients": "grad", "momentum": "momentum"}.items():
        held = flow.tensor([sum(4 * tensor.to_local().numel() for name, tensor in tensors.items() if word in name)])
        held = held.to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{kind:9} bytes on each rank:", *held)

    values = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    x, y = (np.concatenate([values[f"{name}{k}"] for k in range(n)]) for name in "xy")
    weights, momentum, losses = [values["w0"], values["w1"]], [0, 0], values["losses"]
    for loss in losses:  # on a single device
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        error *= 2 / error.size
        for i, gradient in enumerate([x.T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]):
            momentum[i] = 0.9 * momentum[i] + gradient
            weights[i] = weights[i] - 0.1 * momentum[i]
    for i in (0, 1):
        np.testing.assert_allclose(values[f"new w{i}"], weights[i], rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        size = (n - 1) * sum(w.nbytes for w in weights)
        print(f"in each step rank 0 sends (n-1) x the weights = {size} bytes, and receives {size} bytes of gradients")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
