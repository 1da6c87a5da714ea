"""Ring attention: each rank keeps its rows of q, and blocks of k and v pass from rank to rank.

    out = softmax(q @ k^T + mask) @ v    rank 0       rank 1       SBP
    q0     (4, 2, 4)                     whole        nothing      B
    k0     (4, 2, 4)                     whole        nothing      B
    out0   (4, 2, 4)                     whole        nothing      B
    q1     (4, 2, 4)                     nothing      whole        B
    k1     (4, 2, 4)                     nothing      whole        B
    out1   (4, 2, 4)                     nothing      whole        B

Each rank has tensors of its own: q0 is rows 0-3 of q, (seq_len, num_heads, head_size). v is placed as k is.
Why:   a softmax can be computed block by block, so no rank needs all keys and values at once.
Moves: k and v of a rank to the next and on to the last, and back their gradients: 2 (2r+1)/n x q from rank r, and
       2 (n-1)/n x q from the last. A graph sends them straight to each later rank: 2 (n-1)/n x q from each.
Run:   ./launch.sh recipes/transformer/ring_attention.py [--graph]
Use it forward only, when all keys and values do not fit on one device, or to learn how a ring works. In training it
does not save memory here: autograd keeps all blocks; the paper computes them again. The work is uneven: no query sees
later keys, so rank 0 computes 1 block of scores, and rank n-1 computes n. In zigzag order, with chunks r and 2n-1-r of
2n on rank r, all work equally.
Source: H. Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889.
"""

import argparse
from typing import NamedTuple

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class RingAttention(flow.nn.Module):
    def __init__(self, q, k, v, y, ranks):
        super().__init__()
        self.blocks = flow.nn.ModuleList()
        for rank, rows in zip(ranks.ranks.tolist(), np.array_split(np.arange(len(q)), ranks.ranks.size)):
            own = flow.placement(ranks.type, [rank])
            self.blocks.append(Block(q[rows], k[rows], v[rows], y[rows], own))

    def forward(self):
        q = [block.q for block in self.blocks]
        # without identity OneFlow 0.9.0 aborts a graph that moves a parameter: "register.cpp:75 Check failed"
        k = [flow._C.identity(block.k) for block in self.blocks]
        v = [flow._C.identity(block.v) for block in self.blocks]
        out = ring(q, k, v, [block.mask for block in self.blocks])
        loss = 0  # summed on rank 0
        for rank, block in enumerate(self.blocks):
            own_loss = flow.nn.functional.mse_loss(out[rank], block.y, reduction="sum")
            loss = loss + own_loss.to_global(placement=out[0].placement)
        return loss


class Block(flow.nn.Module):
    """The rows of one rank. q, k and v are parameters: a step sends what attention sends, forward and backward."""

    def __init__(self, q, k, v, y, own):
        super().__init__()
        replicated = flow.sbp.broadcast
        self.q = flow.nn.Parameter(flow.tensor(q, placement=own, sbp=replicated))
        self.k = flow.nn.Parameter(flow.tensor(k, placement=own, sbp=replicated))
        self.v = flow.nn.Parameter(flow.tensor(v, placement=own, sbp=replicated))
        self.register_buffer("y", flow.tensor(y, placement=own, sbp=replicated))
        mask = np.triu(np.full((len(q), len(q)), -1e9, dtype=np.float32), k=1)  # no query sees a later key
        self.register_buffer("mask", flow.tensor(mask, placement=own, sbp=replicated))


def ring(q, k, v, mask):
    """Causal attention: k and v go from rank to rank, and to none with earlier queries.

    q[r], k[r], v[r] and mask[r] are on rank r, and so is block r of the result.

    The block of k and v that each of 3 ranks attends to:

                rank 0    rank 1    rank 2
        step 0  0, mask   1, mask   2, mask
        step 1            0         1
        step 2                      0

    Every process runs this loop over all ranks; an operation is computed on the rank that holds its tensors.
    """
    n = len(q)
    k, v = list(k), list(v)
    states = [attend(q[rank], k[rank], v[rank], mask[rank]) for rank in range(n)]
    for step in range(1, n):
        for rank in range(step, n):
            block = rank - step  # began on rank `block`, is now on rank - 1; its keys are earlier than all queries here
            k[block] = k[block].to_global(placement=q[rank].placement)
            v[block] = v[block].to_global(placement=q[rank].placement)
            states[rank] = merge(states[rank], attend(q[rank], k[block], v[block]))
    return [(state.out / state.denominator).permute(1, 0, 2) for state in states]


class State(NamedTuple):
    """Online softmax: attention over the keys so far; at the end the result is out / denominator."""

    row_max: flow.Tensor  # the largest score of each query
    denominator: flow.Tensor  # the sum of exp(score - row_max)
    out: flow.Tensor  # the sum of exp(score - row_max) * v


def attend(q, k, v, mask=0):
    """The state of one block of keys."""
    # transpose_b: OneFlow 0.9.0 loses digits in k.permute(1, 2, 0) where that is an 8 x 8 transpose (on CPU)
    scores = flow.matmul(q.permute(1, 0, 2), k.permute(1, 0, 2), transpose_b=True) * q.shape[-1] ** -0.5
    scores = scores + mask
    row_max = scores.amax(dim=-1, keepdim=True)
    powers = flow.exp(scores - row_max)
    denominator = powers.sum(dim=-1, keepdim=True)
    return State(row_max, denominator, flow.matmul(powers, v.permute(1, 0, 2)))


def merge(state, new):
    """The state of the keys of both. Each sum is relative to its row_max, and is rescaled to the larger one."""
    row_max = flow.maximum(state.row_max, new.row_max)
    state_scale = flow.exp(state.row_max - row_max)
    new_scale = flow.exp(new.row_max - row_max)
    denominator = state_scale * state.denominator + new_scale * new.denominator
    return State(row_max, denominator, state_scale * state.out + new_scale * new.out)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self):
        loss = self.model()
        loss.backward()  # in a graph this includes the update
        return loss


def train(ranks, graph=False, seed=0, steps=3, seq_len=8, num_heads=2, head_size=4):
    """Train q, k and v to bring out closer to y; returns the model and the loss, sum((out - y)^2), of each step."""
    rng = np.random.default_rng(seed)
    q, k, v, y = rng.standard_normal((4, seq_len, num_heads, head_size), dtype=np.float32)

    model = RingAttention(q, k, v, y, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training()
        else:
            loss = model()
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

    model, losses = train(flow.placement.all(args.device), args.graph)
    rank, n = flow.env.get_rank(), flow.env.get_world_size()
    own = model.blocks[rank]
    print(f"q{rank} {tuple(own.q.shape)}, k{rank} {tuple(own.k.shape)}, v{rank} {tuple(own.v.shape)}")
    print(f"rank {rank} computes {rank + 1} of {n} x {n} blocks of scores")
    _, alone = train(flow.placement(args.device, [0]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
