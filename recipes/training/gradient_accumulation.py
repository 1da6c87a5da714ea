"""Gradient accumulation: the gradients of micro-batches add up before one update.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      SBP
    x          (8, 4)                         rows 0-3    rows 4-7    S(0)
    y          (8, 4)                         rows 0-3    rows 4-7    S(0)
    w0         (4, 8)                         whole       whole       B
    w1         (8, 4)                         whole       whole       B
    w0 grad    (4, 8)                         whole       whole       B
    w1 grad    (8, 4)                         whole       whole       B

Micro-batch i is the i-th part of each rank's rows, and only its activations are alive. The m losses, each divided by m,
have gradients that add up to that of the large batch. A graph takes the large batch and cuts it by itself.

Moves: in eager mode an all-reduce of the weights' gradients for each micro-batch, m x 2 (n-1)/n x the weights from each
       of n ranks. A graph adds up the partial sums first and pays once: 2 (n-1)/n x the weights.
Run:   ./launch.sh recipes/training/gradient_accumulation.py [--graph] [--micro-batches 4]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/gradient_accumulation.py [--graph]
Use it when the activations of the batch that you want do not fit; in eager mode only if links are fast.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965, section 2.2.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Network(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, x, y):
        # without identity OneFlow 0.9.0 updates the weights wrongly when a graph accumulates gradients, silently
        w0, w1 = flow._C.identity(self.w0), flow._C.identity(self.w1)
        out = flow.matmul(flow.relu(flow.matmul(x, w0)), w1)
        return flow.nn.functional.mse_loss(out, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer, micro_batches):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the division by m, the sum and the update
        return loss


def run(
    graph=False, device="cpu", seed=0, steps=3, micro_batches=2, batch=None, in_features=4, hidden=8, out_features=4
):
    """Some steps in float32; returns x, y, weights, gradients (eager), optimizer state, losses, also by micro-batch."""
    batch = batch or 4 * flow.env.get_world_size()  # 4 rows for each rank
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
    update = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = TrainingGraph(module, update, micro_batches) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            micro_losses = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            micro_losses = []
            for parts in zip(x.to_local().chunk(micro_batches), y.to_local().chunk(micro_batches)):
                loss = model(*[part.to_global(placement=ranks, sbp=flow.sbp.split(0)) for part in parts])
                (loss / micro_batches).backward()  # adds to .grad
                micro_losses.append(loss)
            update.step()
            micro_losses = flow.stack(micro_losses)
        losses.append(micro_losses.to_global(sbp=flow.sbp.broadcast))

    gradients = {} if graph else {"w0 grad": module.w0.grad, "w1 grad": module.w1.grad}
    tensors = {"x": x, "y": y, "w0": w0, "w1": w1, **gradients}
    state = model.state_dict() if graph else update.state_dict()["state"]
    for i in (0, 1):
        tensors[f"w{i} momentum_buf"] = state[f"module.w{i}-momentum"] if graph else state[i]["momentum_buf"]
    losses = flow.stack(losses)  # (steps, m)
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "micro losses": losses[-1], "losses": losses.mean(1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batches", type=int, choices=[1, 2, 4], default=2)
    args = parser.parse_args()
    tensors = run(**vars(args))

    x, y, *weights = (tensors[name].numpy() for name in ("x", "y", "w0", "w1"))  # collective: all ranks call it
    losses, momentum = tensors["losses"].numpy(), [0, 0]
    for loss in losses:  # SGD with momentum, the large batch on a single device
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        by_part = (error**2).reshape(flow.env.get_world_size(), args.micro_batches, -1)  # of each rank's rows
        np.testing.assert_allclose(loss, by_part.mean(), rtol=1e-5)
        error *= 2 / error.size
        for i, gradient in enumerate([x.T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]):
            momentum[i] = 0.9 * momentum[i] + gradient
            weights[i] -= 0.1 * momentum[i]
    micro_losses = tensors["micro losses"].numpy()
    np.testing.assert_allclose(micro_losses, by_part.mean(axis=(0, 2)), rtol=1e-5)
    for i in (0, 1):
        np.testing.assert_allclose(tensors[f"new w{i}"].numpy(), weights[i], rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        times, when = (1, "the last") if args.graph else (args.micro_batches, "each")
        print(f"all-reduces in a step: {2 * times}, of the gradients of 2 weights after {when} micro-batch")
        print("losses of the micro-batches in the last step:", *micro_losses.round(4), " mean", losses[-1].round(4))
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
