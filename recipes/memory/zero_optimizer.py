"""ZeRO: a data-parallel graph that splits weights and optimizer state.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0      rank 1      SBP
    x            (8, 4)                       rows 0-3    rows 4-7    S(0)
    y            (8, 4)                       rows 0-3    rows 4-7    S(0)
    w0           (4, 8)                       whole       whole       B
    w1           (8, 4)                       whole       whole       B
    w0 exp_avg   (4, 8)                       rows 0-1    rows 2-3    S(0)
    w1 exp_avg   (8, 4)                       rows 0-3    rows 4-7    S(0)
    new w0       (4, 8)                       rows 0-1    rows 2-3    S(0)
    new w1       (8, 4)                       rows 0-3    rows 4-7    S(0)

The script returns each gradient as a partial sum, P, whole on each rank; the update takes rows of its reduce-scatter.

Moves: an all-gather of each weight and a reduce-scatter of its gradient: (n-1)/n x the bytes of the weights each.
Run:   ./launch.sh recipes/memory/zero_optimizer.py [--shard-min-size 1024]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/memory/zero_optimizer.py
Use it when Adam's two moments do not fit on each device; fully_sharded.py does the same by hand, and in eager mode.
Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054.
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
        # without identity OneFlow 0.9.0 aborts a graph that gathers a parameter: "register.cpp:75 Check failed"
        hidden = flow.relu(flow.matmul(x, flow._C.identity(self.w0)))
        out = flow.matmul(hidden, flow._C.identity(self.w1))
        return flow.nn.functional.mse_loss(out, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer, shard_min_size):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)
        # stages 1, 2 and 3 compile to the same job on CPU
        # a weight stays whole, silently, if a rank would get fewer elements of it; OneFlow's default is 1024
        self.config.enable_zero(True, stage=2, shard_min_size=shard_min_size)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        return loss, module.w0.grad, module.w1.grad


def run(device="cpu", seed=0, steps=3, shard_min_size=1, batch=None, in_features=None, hidden=None, out_features=4):
    """Some steps in float32; returns x, y, the weights before and after, gradients, Adam's state, and the losses."""
    n = flow.env.get_world_size()  # a row of x, w0 and w1 for each rank, at least
    batch, in_features, hidden = batch or max(8, n), in_features or max(4, n), hidden or max(8, n)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(n)))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    w0 = flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast)
    module = Network(w0, w1)
    update = flow.optim.Adam(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update, shard_min_size)
    losses = []
    for _ in range(steps):
        loss, w0_grad, w1_grad = model(x, y)
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, "w0": w0, "w1": w1, "w0 grad": w0_grad, "w1 grad": w1_grad}
    state = model.state_dict()
    for i in (0, 1):
        tensors[f"w{i} exp_avg"] = state[f"module.w{i}-m"]
        tensors[f"w{i} exp_avg_sq"] = state[f"module.w{i}-v"]
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shard-min-size", type=int, default=1, help="elements; OneFlow's own default is 1024")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for kind, word in {"weights": "new w", "gradients (P)": "grad", "Adam's state": "exp_avg"}.items():
        own = [tensor for name, tensor in tensors.items() if word in name]
        held = flow.tensor([sum(4 * tensor.to_local().numel() for tensor in own)])
        held = held.to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            whole = sum(4 * tensor.numel() for tensor in own)
            print(f"{kind:13} bytes on each rank:", *held, f"(data parallel: {whole})")

    x, y, *weights = (tensors[name].numpy() for name in ("x", "y", "w0", "w1"))  # collective: all ranks call it
    losses, m, v = tensors["losses"].numpy(), [0, 0], [0, 0]
    for step, loss in enumerate(losses, 1):  # Adam on a single device
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-4)
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
