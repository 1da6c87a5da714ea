"""Context parallel: attention over a split sequence, by all-gather, all-to-all or a ring.

    out = softmax(q @ k^T + mask) @ v    rank 0        rank 1        SBP
    q       (8, 2, 4)                    rows 0-3      rows 4-7      S(0)
    k       (8, 2, 4)                    rows 0-3      rows 4-7      S(0)
    v       (8, 2, 4)                    rows 0-3      rows 4-7      S(0)
    out     (8, 2, 4)                    rows 0-3      rows 4-7      S(0)

q is (seq_len, num_heads, head_size). For the ring each rank has tensors of its own: q0, k0 and v0 on rank 0, and so on.
Moves: all_gather: all of k and v, and back their gradients: 4 (n-1)/n x q from each of n ranks.
       all_to_all (Ulysses): q, k and v from rows to heads, out back, and again backward: 8 (n-1)/n^2 x q from each.
       ring: k and v of a rank to the next, on to the last, and back their gradients: 2 (2r+1)/n x q from rank r, and
       2 (n-1)/n x q from the last. A graph sends them straight to each later rank: 2 (n-1)/n x q from each.
Run:   ./launch.sh recipes/transformer/context_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/transformer/context_parallel.py [--graph]
Use it when a sequence is too long for one device. all_to_all needs n to divide the heads. The ring has one block of k,
v and scores at a time, but autograd keeps all of them for backward; the paper computes them again.
The ring is unbalanced: no query needs later keys, so rank 0 computes 1 block of scores, and rank n-1 computes n. In
zigzag order rank r would hold chunks r and 2n-1-r of 2n, an early and a late one, and all ranks would do equal work.
Source: H. Liu et al., arXiv:2310.01889 (ring); S. Jacobs et al., arXiv:2309.14509 (DeepSpeed Ulysses).
"""

import argparse
from typing import NamedTuple

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)  # numbers of ranks; launch.sh refuses others


def all_gather(q, k, v, mask):
    """Each rank has some rows of q, and gets all rows of k and v."""
    k = k.to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))
    v = v.to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))
    return attention(q, k, v, mask)


def all_to_all(q, k, v, mask):
    """Each rank gives away its rows of q, k and v for all rows of some heads, and gets its rows of the result back."""
    rows, heads = flow.sbp.split(0), flow.sbp.split(1)
    q = q.to_global(sbp=heads, grad_sbp=rows)
    k = k.to_global(sbp=heads, grad_sbp=rows)
    v = v.to_global(sbp=heads, grad_sbp=rows)
    return attention(q, k, v, mask).to_global(sbp=rows, grad_sbp=heads)


def attention(q, k, v, mask):
    """Attention of each head; q, k, v and the result are (seq_len, num_heads, head_size)."""
    probs = (scores_of(q, k) + mask).softmax(dim=-1)
    return flow.matmul(probs, v.permute(1, 0, 2)).permute(1, 0, 2)


def scores_of(q, k):
    """(num_heads, rows of q, rows of k)."""
    # transpose_b: OneFlow 0.9.0 loses digits in k.permute(1, 2, 0) where that is an 8 x 8 transpose (on CPU)
    scores = flow.matmul(q.permute(1, 0, 2), k.permute(1, 0, 2), transpose_b=True) * q.shape[-1] ** -0.5
    return scores


class State(NamedTuple):
    """Online softmax: attention over the keys so far; at the end the result is out / denominator."""

    row_max: flow.Tensor  # the largest score of each query
    denominator: flow.Tensor  # the sum of exp(score - row_max)
    out: flow.Tensor  # the sum of exp(score - row_max) * v


def attend(q, k, v, mask=0):
    """The state of one block of keys."""
    scores = scores_of(q, k) + mask
    row_max = scores.amax(dim=-1, keepdim=True)
    powers = flow.exp(scores - row_max)
    denominator = powers.sum(dim=-1, keepdim=True)
    return State(row_max, denominator, flow.matmul(powers, v.permute(1, 0, 2)))


def merge(state, new):
    """The state of the keys of both: sums that were taken relative to one row_max are scaled to the larger one."""
    row_max = flow.maximum(state.row_max, new.row_max)
    state_scale = flow.exp(state.row_max - row_max)
    new_scale = flow.exp(new.row_max - row_max)
    denominator = state_scale * state.denominator + new_scale * new.denominator
    return State(row_max, denominator, state_scale * state.out + new_scale * new.out)


def ring(q, k, v, mask):
    """k and v go from rank to rank; q[r], k[r], v[r] and mask[r] are on rank r, and so is block r of the result.

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


class QKV(flow.nn.Module):
    """q, k and v as parameters, so that a step moves what it moves inside a layer, forward and backward."""

    def __init__(self, q, k, v, y, mask, placement, sbp):
        super().__init__()
        self.q = flow.nn.Parameter(flow.tensor(q, placement=placement, sbp=sbp))
        self.k = flow.nn.Parameter(flow.tensor(k, placement=placement, sbp=sbp))
        self.v = flow.nn.Parameter(flow.tensor(v, placement=placement, sbp=sbp))
        self.register_buffer("y", flow.tensor(y, placement=placement, sbp=sbp))
        self.register_buffer("mask", mask)

    def inputs(self):
        # without identity OneFlow 0.9.0 aborts a graph that gathers a parameter: "register.cpp:75 Check failed"
        return self.q, flow._C.identity(self.k), flow._C.identity(self.v)


class Attention(QKV):
    """All-gather or all-to-all: q, k and v are split by rows over all ranks."""

    def __init__(self, q, k, v, y, ranks, method):
        rows = flow.sbp.split(0)
        mask_sbp = rows if method == "all_gather" else flow.sbp.broadcast  # for the scores that each rank computes
        super().__init__(q, k, v, y, causal_mask(len(q), ranks, mask_sbp), ranks, rows)
        self.method = method

    def forward(self):
        q, k, v = self.inputs()
        if self.method == "all_gather":
            out = all_gather(q, k, v, self.mask)
        else:
            out = all_to_all(q, k, v, self.mask)
        return flow.nn.functional.mse_loss(out, self.y, reduction="sum")


class RingAttention(flow.nn.Module):
    """A ring: each rank has rows of q, k and v as tensors of its own."""

    def __init__(self, q, k, v, y, ranks):
        super().__init__()
        self.blocks = flow.nn.ModuleList()
        for rank, rows in zip(ranks.ranks.tolist(), np.array_split(np.arange(len(q)), ranks.ranks.size)):
            own = flow.placement(ranks.type, [rank])
            mask = causal_mask(len(rows), own, flow.sbp.broadcast)
            self.blocks.append(QKV(q[rows], k[rows], v[rows], y[rows], mask, own, flow.sbp.broadcast))

    def forward(self):
        inputs = [block.inputs() for block in self.blocks]
        q, k, v = zip(*inputs)
        out = ring(q, k, v, [block.mask for block in self.blocks])
        loss = 0  # summed on rank 0
        for rank, block in enumerate(self.blocks):
            own_loss = flow.nn.functional.mse_loss(out[rank], block.y, reduction="sum")
            loss = loss + own_loss.to_global(placement=out[0].placement)
        return loss


def causal_mask(rows, placement, sbp):
    """What is added to the scores, so that no query sees a later key."""
    mask = np.triu(np.full((rows, rows), -1e9, dtype=np.float32), k=1)
    return flow.tensor(mask, placement=placement, sbp=sbp)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self):
        loss = self.model()
        loss.backward()  # in a graph this includes the update
        return loss


def train(ranks, graph=False, method="all_gather", seed=0, steps=3, seq_len=None, num_heads=None, head_size=4):
    """Train q, k and v to bring out closer to y; returns the model and the loss, sum((out - y)^2), of each step."""
    seq_len = seq_len or 4 * flow.env.get_world_size()
    num_heads = num_heads or flow.env.get_world_size()  # a head for each rank
    rng = np.random.default_rng(seed)
    q, k, v, y = rng.standard_normal((4, seq_len, num_heads, head_size), dtype=np.float32)

    if method == "ring":
        model = RingAttention(q, k, v, y, ranks)
    else:
        model = Attention(q, k, v, y, ranks, method)
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

    _, alone = train(flow.placement(args.device, [0]), args.graph)  # plain attention on a single device
    for method in ("all_gather", "all_to_all", "ring"):
        model, losses = train(flow.placement.all(args.device), args.graph, method)
        held = [f"{name} {tuple(w.to_local().shape)}" for name, w in model.named_parameters() if w.to_local().numel()]
        print(f"{method}: {', '.join(held)}")
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        if flow.env.get_rank() == 0:
            print(f"{method}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
