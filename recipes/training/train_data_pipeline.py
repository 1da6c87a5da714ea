"""Train data x pipeline parallel: two stages; each splits the batch.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      rank 2      rank 3      SBP
    x          (8, 4)                         rows 0-3    rows 4-7    nothing     nothing     S(0)
    y          (8, 4)                         nothing     nothing     rows 0-3    rows 4-7    S(0)
    w0         (4, 8)                         whole       whole       nothing     nothing     B
    w1         (8, 4)                         nothing     nothing     whole       whole       B
    w0 grad    (4, 8)                         whole       whole       nothing     nothing     B
    w1 grad    (8, 4)                         nothing     nothing     whole       whole       B

Each stage is train_data_parallel.py on its own two ranks. Its output keeps its SBP on the way to the next stage, so
rank 0 sends its rows to rank 2, and rank 1 to rank 3. train_pipeline.py adds micro-batches, which overlap the stages.

Moves: within a stage an all-reduce of its weight's gradient: each rank sends w0 or w1. Between the stages hidden/2 from
       each of ranks 0 and 1, and backward its gradient, hidden/2 from each of ranks 2 and 3.
Run:   ./launch.sh recipes/training/train_data_pipeline.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/training/train_data_pipeline.py [--graph]
Use it when the batch alone cannot feed all ranks and links are slow: put each stage inside a host.
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4,)


class Network(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, x, y):
        hidden = flow.relu(flow.matmul(x, self.w0))
        hidden = hidden.to_global(placement=y.placement)  # to the next stage; the SBP stays
        return flow.nn.functional.mse_loss(flow.matmul(hidden, self.w1), y)


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


def run(graph=False, device="cpu", seed=0, steps=3, batch=8, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns x, y, the weights before and after, gradients, optimizer state, and the losses."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = [flow.placement(device, [0, 1]), flow.placement(device, [2, 3])]
    x = flow.tensor(x, placement=ranks[0], sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks[1], sbp=flow.sbp.split(0))
    w0 = flow.tensor(w0, placement=ranks[0], sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=ranks[1], sbp=flow.sbp.broadcast)
    module = Network(w0, w1)
    update = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
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
        tensors[f"w{i} momentum_buf"] = state[f"module.w{i}-momentum"] if graph else state[i]["momentum_buf"]
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name, tensor in list(tensors.items())[:4]:  # x, y, w0, w1; a row for each rank: its local shape
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name:5}{str(tuple(tensor.shape)):8}{tensor.sbp[0]!s:26}local shapes", *map(tuple, held.tolist()))

    x, y, *weights = (tensors[name].numpy() for name in ("x", "y", "w0", "w1"))  # collective: all ranks call it
    losses, momentum = tensors["losses"].numpy(), [0, 0]
    for loss in losses:  # SGD with momentum on a single device
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        error *= 2 / error.size
        for i, gradient in enumerate([x.T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]):
            momentum[i] = 0.9 * momentum[i] + gradient
            weights[i] -= 0.1 * momentum[i]
    for i in (0, 1):
        np.testing.assert_allclose(tensors[f"new w{i}"].numpy(), weights[i], rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        inside, between = weights[0].nbytes, hidden.nbytes // 2
        print(f"by formula each rank sends {inside} bytes inside its stage and {between} to the other stage")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
