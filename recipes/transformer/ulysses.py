"""Ulysses: for context parallelism, all-to-alls turn a split sequence into split heads and back.

    out = softmax(q @ k^T + mask) @ v    rank 0        rank 1        SBP
    q       (8, 8, 4)                    rows 0-3      rows 4-7      S(0)
    k       (8, 8, 4)                    rows 0-3      rows 4-7      S(0)
    v       (8, 8, 4)                    rows 0-3      rows 4-7      S(0)
    mask    (8, 8)                       whole         whole         B
    out     (8, 8, 4)                    rows 0-3      rows 4-7      S(0)

q is (seq_len, num_heads, head_size). Attention runs on all rows of q, k and v, each split by heads: S(1).
Why:   attention needs all tokens of a head but no other head, everything else a token alone; so the split changes.
Moves: forward an all-to-all of q, k, v and of the result, backward of their gradients: 8 (n-1)/n^2 x q from each of n
       ranks. The more ranks, the less that is; an all-gather of k and v does not shrink.
Run:   ./launch.sh recipes/transformer/ulysses.py [--graph]
Use it when a sequence is too long for one device, and queries, keys and values each have n heads or more.
Source: S. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class Attention(flow.nn.Module):
    """q, k and v are parameters: a step sends what attention sends, forward and backward."""

    def __init__(self, q, k, v, y, ranks):
        super().__init__()
        rows = flow.sbp.split(0)
        self.q = flow.nn.Parameter(flow.tensor(q, placement=ranks, sbp=rows))
        self.k = flow.nn.Parameter(flow.tensor(k, placement=ranks, sbp=rows))
        self.v = flow.nn.Parameter(flow.tensor(v, placement=ranks, sbp=rows))
        self.register_buffer("y", flow.tensor(y, placement=ranks, sbp=rows))
        mask = np.triu(np.full((len(q), len(q)), -1e9, dtype=np.float32), k=1)  # no query sees a later key
        self.register_buffer("mask", flow.tensor(mask, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self):
        rows, heads = flow.sbp.split(0), flow.sbp.split(1)
        q = self.q.to_global(sbp=heads, grad_sbp=rows)
        k = self.k.to_global(sbp=heads, grad_sbp=rows)
        v = self.v.to_global(sbp=heads, grad_sbp=rows)
        out = attention(q, k, v, self.mask).to_global(sbp=rows, grad_sbp=heads)
        return flow.nn.functional.mse_loss(out, self.y, reduction="sum")


def attention(q, k, v, mask):
    """Attention of each head; q, k, v and the result are (seq_len, num_heads, head_size)."""
    # transpose_b: OneFlow 0.9.0 loses digits in k.permute(1, 2, 0) where that is an 8 x 8 transpose (on CPU)
    scores = flow.matmul(q.permute(1, 0, 2), k.permute(1, 0, 2), transpose_b=True) * q.shape[-1] ** -0.5
    probs = (scores + mask).softmax(dim=-1)
    return flow.matmul(probs, v.permute(1, 0, 2)).permute(1, 0, 2)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self):
        loss = self.model()
        loss.backward()  # in a graph this includes the update
        return loss


def train(ranks, graph=False, seed=0, steps=3, seq_len=8, num_heads=8, head_size=4):
    """Train q, k and v to bring out closer to y; returns the model and the loss, sum((out - y)^2), of each step."""
    if num_heads < ranks.ranks.size:
        raise ValueError(f"{num_heads} heads are too few for {ranks.ranks.size} ranks: a rank would have none")
    rng = np.random.default_rng(seed)
    q, k, v, y = rng.standard_normal((4, seq_len, num_heads, head_size), dtype=np.float32)

    model = Attention(q, k, v, y, ranks)
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
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, alone = train(flow.placement(args.device, [0]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        seq_len, num_heads, _ = model.q.shape
        heads = -(-num_heads // flow.env.get_world_size())  # OneFlow gives the first ranks one more
        print(f"rank 0 computes the scores of {heads} of {num_heads} heads, with all {seq_len} queries and keys")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
