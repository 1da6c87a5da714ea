"""Activation checkpointing: keep each block's input, compute the rest again in backward.

    loss = mean((block(block(x)) - y)^2)    rank 0      rank 1      SBP
    x     (8, 4)                            rows 0-3    rows 4-7    S(0)
    y     (8, 4)                            rows 0-3    rows 4-7    S(0)
    w0    (4, 8)                            whole       whole       B
    w1    (8, 4)                            whole       whole       B
    w2    (4, 8)                            whole       whole       B
    w3    (8, 4)                            whole       whole       B

A block is relu(x @ w0) @ w1. In a graph on CPU the peak rises: OneFlow 0.9.0 reuses a graph's memory on GPUs only.

Moves: an all-reduce of each weight's gradient every step: 2 (n-1)/n x the bytes of the weights from each of n ranks.
Run:   ./launch.sh recipes/memory/activation_checkpointing.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/memory/activation_checkpointing.py [--graph]
Use it when activations, which grow with batch and depth, are what does not fit; it costs one more forward each step.
Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

import argparse
from unittest import mock

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Block(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, x):
        return flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)


class Network(flow.nn.Module):
    def __init__(self, w0, w1, w2, w3, checkpointing):
        super().__init__()
        self.first, self.second = Block(w0, w1), Block(w2, w3)
        self.checkpointing = checkpointing

    def forward(self, x, y):
        for block in (self.first, self.second):
            x = flow.utils.checkpoint.checkpoint(block, x) if self.checkpointing else block(x)
        return flow.nn.functional.mse_loss(x, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer, checkpointing):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)
        for block in (self.module.first, self.module.second):
            block.to(flow.nn.graph.GraphModule).activation_checkpointing = checkpointing

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        return loss, *(w.grad for w in self.module.to(flow.nn.Module).parameters())  # the module itself has them


def run(
    graph=False, device="cpu", seed=0, steps=3, checkpointing=True, batch=None, in_features=4, hidden=8, out_features=4
):
    """Some steps in float32; returns x, y, the weights before and after, gradients, and the losses."""
    batch = batch or max(8, flow.env.get_world_size())  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    shapes = [(in_features, hidden), (hidden, in_features), (in_features, hidden), (hidden, out_features)]
    weights = [rng.standard_normal(shape, dtype=np.float32) / 4 for shape in shapes]

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    weights = [flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast) for w in weights]
    module = Network(*weights, checkpointing=checkpointing and not graph)  # a graph has its own way
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update, checkpointing) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            loss, *gradients = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            loss = model(x, y)
            loss.backward()
            update.step()
            gradients = [w.grad for w in module.parameters()]
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, **{f"w{i}": w for i, w in enumerate(weights)}}
    tensors.update({f"w{i} grad": gradient for i, gradient in enumerate(gradients)})
    return {**tensors, **{f"new w{i}": w for i, w in enumerate(module.parameters())}, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options, gradients = vars(parser.parse_args()), []
    for checkpointing in (False, True):
        save = mock.Mock(side_effect=lambda tensor: tensor)  # autograd calls it for each tensor that it saves
        hooks = flow.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with hooks, mock.patch("oneflow.matmul", wraps=flow.matmul) as matmul:
            tensors = run(steps=1, checkpointing=checkpointing, **options)
        gradients.append([tensors[f"w{i} grad"].numpy() for i in range(4)])  # collective: all ranks call it
        if flow.env.get_rank() == 0 and not options["graph"]:  # in a graph OneFlow's compiler adds the second forward
            words = f"{matmul.call_count} forward matmuls, {save.call_count} tensors saved for backward"
            print("checkpointing:   " if checkpointing else "no checkpointing:", words)

    x, y, w0, w1, w2, w3 = (tensors[name].numpy() for name in ("x", "y", "w0", "w1", "w2", "w3"))
    a0 = np.maximum(x @ w0, 0)
    a1 = a0 @ w1
    a2 = np.maximum(a1 @ w2, 0)
    error = (a2 @ w3 - y) * 2 / y.size
    a2_grad = error @ w3.T * (a2 > 0)
    a1_grad = a2_grad @ w2.T
    a0_grad = a1_grad @ w1.T * (a0 > 0)
    for wanted, *found in zip([x.T @ a0_grad, a0.T @ a1_grad, a1.T @ a2_grad, a2.T @ error], *gradients):
        np.testing.assert_allclose(found, [wanted, wanted], rtol=1e-5, atol=1e-7)
    if flow.env.get_rank() == 0:
        print("with and without checkpointing the gradients equal those on a single device")


if __name__ == "__main__":
    main()
