"""Auto parallel: nn.Graph chooses each weight's SBP by its cost.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0           rank 1              SBP
    x         (8, 256)                        rows 0-3         rows 4-7            S(0)
    y         (8, 256)                        rows 0-3         rows 4-7            S(0)
    w0        (256, 1024)                     whole            whole               B
    w1        (1024, 256)                     whole            whole               B
    new w0    (256, 1024)                     columns 0-511    columns 512-1023    S(1)
    new w1    (1024, 256)                     rows 0-511       rows 512-1023       S(0)

After the first call the weights have the SBP that OneFlow chose: at batch 8 columns, then rows, as in Megatron-LM,
which moves activations and no gradient. At batch 1024 they stay B, data parallel, as written; so do small weights.

Moves: at batch 8, x and y gathered and an all-reduce of x @ w0 @ w1: (n-1)/n x (bytes of x + 3 x those of y) in all.
Run:   ./launch.sh recipes/memory/auto_parallel.py [--batch 1024]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/memory/auto_parallel.py
Use it to check a layout of yours against what OneFlow chooses, which depends on the sizes.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", arXiv:1909.08053, section 3.
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
        out = flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)
        return flow.nn.functional.mse_loss(out, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)
        # with a large batch and large weights OneFlow 0.9.0 may choose to gather a weight, and abort
        self.config.enable_auto_parallel(True)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        return loss  # a gradient returned would have to be P, as in data parallel, and would spoil the choice


def run(device="cpu", seed=0, steps=3, batch=None, in_features=256, hidden=1024, out_features=256):
    """Some steps in float32; returns x, y, the weights before and after, and the losses."""
    batch = batch or max(8, flow.env.get_world_size())  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32) / 16
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32) / 16

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    w0 = flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast)
    module = Network(w0, w1)
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update)
    losses = [model(x, y).to_global(sbp=flow.sbp.broadcast) for _ in range(steps)]

    tensors = {"x": x, "y": y, "w0": w0, "w1": w1}
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, help="rows of x: what OneFlow chooses depends on it (default: 8)")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name in ("w0", "w1"):  # a row for each rank: the shape of what it holds
        w = tensors[f"new {name}"]
        held = flow.tensor([list(w.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name} {tuple(w.shape)}: OneFlow chose {w.sbp[0]!s:26}local shapes", *map(tuple, held.tolist()))

    x, y, w0, w1 = (tensors[name].numpy() for name in ("x", "y", "w0", "w1"))  # collective: all ranks call it
    losses = tensors["losses"].numpy()
    for loss in losses:  # SGD on a single device
        hidden = np.maximum(x @ w0, 0)
        error = hidden @ w1 - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        error *= 2 / error.size
        w0_grad = x.T @ (error @ w1.T * (hidden > 0))
        w0, w1 = w0 - 0.1 * w0_grad, w1 - 0.1 * hidden.T @ error
    np.testing.assert_allclose(tensors["new w0"].numpy(), w0, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tensors["new w1"].numpy(), w1, rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
