"""Activation checkpointing: keep each block's input, compute the rest again in backward.

    loss = mean((block(block(x)) - y)^2)    rank 0      rank 1      SBP
    x          (8, 4)                       rows 0-3    rows 4-7    S(0)
    y          (8, 4)                       rows 0-3    rows 4-7    S(0)
    w_up0      (4, 8)                       whole       whole       B
    w_down0    (8, 4)                       whole       whole       B
    w_up1      (4, 8)                       whole       whole       B
    w_down1    (8, 4)                       whole       whole       B

A block is relu(x @ w_up) @ w_down. On CPU it raises a graph's peak memory: OneFlow 0.9.0 reuses memory on GPUs only.
In eager mode a block must not contain dropout: backward would draw another mask. Draw the mask outside, and pass it in.

Why:   a block's activations follow from its input, so they need not be kept, only computed twice.
Moves: an all-reduce of each weight's gradient every step: 2 (n-1)/n x the bytes of the weights from each of n ranks.
Run:   ./launch.sh recipes/memory/activation_checkpointing.py [--graph]
Use it when activations, which grow with batch and depth, are what does not fit; it costs one more forward each step.
Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class Block(flow.nn.Module):
    def __init__(self, w_up, w_down, ranks):
        super().__init__()
        self.w_up = flow.nn.Parameter(flow.tensor(w_up, placement=ranks, sbp=flow.sbp.broadcast))
        self.w_down = flow.nn.Parameter(flow.tensor(w_down, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        hidden = flow.relu(flow.matmul(x, self.w_up))
        return flow.matmul(hidden, self.w_down)


class MLP(flow.nn.Module):
    def __init__(self, blocks, checkpointing):
        super().__init__()
        self.blocks = flow.nn.ModuleList(blocks)
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            x = flow.utils.checkpoint.checkpoint(block, x) if self.checkpointing else block(x)
        return x


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer, checkpointing):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        for block in self.model.blocks:
            block.to(flow.nn.graph.GraphModule).activation_checkpointing = checkpointing

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the second forward and the update
        return loss


def count_saved(work):
    """How many tensors autograd saves for backward while work() runs."""
    count = 0

    def save(tensor):
        nonlocal count
        count += 1
        return tensor

    with flow.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        work()
    return count


def train(ranks, graph=False, steps=3, checkpointing=True, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement; returns the model and the loss of each step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    blocks = []
    for features in (in_features, out_features):  # the features of each block's output
        w_up = rng.standard_normal((in_features, hidden_size), dtype=np.float32) / 4
        w_down = rng.standard_normal((hidden_size, features), dtype=np.float32) / 4
        blocks.append(Block(w_up, w_down, ranks))

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MLP(blocks, checkpointing and not graph)  # a graph has its own switch
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer, checkpointing) if graph else None
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

    ranks = flow.placement.all(args.device)
    model, losses = train(ranks, args.graph)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, without = train(ranks, args.graph, checkpointing=False)
    _, alone = train(flow.placement(args.device, [0]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, without, rtol=1e-5)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if not args.graph:  # OneFlow's compiler decides what a graph saves
        few = count_saved(lambda: train(ranks, steps=1))
        many = count_saved(lambda: train(ranks, steps=1, checkpointing=False))
        print(f"a step saves {few} tensors for backward, {many} without checkpointing")
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
