"""Context parallel by all-gather: each rank keeps its rows of q and gathers all rows of k and v.

    out = softmax(q @ k^T + mask) @ v    rank 0        rank 1        SBP
    q       (8, 2, 4)                    rows 0-3      rows 4-7      S(0)
    k       (8, 2, 4)                    rows 0-3      rows 4-7      S(0)
    v       (8, 2, 4)                    rows 0-3      rows 4-7      S(0)
    mask    (8, 8)                       rows 0-3      rows 4-7      S(0)
    out     (8, 2, 4)                    rows 0-3      rows 4-7      S(0)

q is (seq_len, num_heads, head_size).
Why:   a query needs all keys and values but no other query, so only k and v have to be sent.
Moves: forward an all-gather of k and of v, backward a reduce-scatter of each gradient: 4 (n-1)/n x q from each of n
       ranks.
Run:   ./launch.sh recipes/transformer/all_gather_kv.py [--graph]
Use it when a sequence is too long for one device, but its keys and values fit on one. It takes any number of heads, and
sends little if k and v have few heads, as in grouped-query attention.
Source: Meta, "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
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
        self.register_buffer("mask", flow.tensor(mask, placement=ranks, sbp=rows))

    def forward(self):
        rows, replicated = flow.sbp.split(0), flow.sbp.broadcast
        # without identity OneFlow 0.9.0 aborts a graph that gathers a parameter: "register.cpp:75 Check failed"
        k = flow._C.identity(self.k).to_global(sbp=replicated, grad_sbp=rows)
        v = flow._C.identity(self.v).to_global(sbp=replicated, grad_sbp=rows)
        out = attention(self.q, k, v, self.mask)
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


def train(ranks, graph=False, seed=0, steps=3, seq_len=8, num_heads=2, head_size=4):
    """Train q, k and v to bring out closer to y; returns the model and the loss, sum((out - y)^2), of each step."""
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
        rows, seq_len = model.mask.to_local().shape
        print(f"each rank computes the scores of {rows} of {seq_len} queries, with all {seq_len} keys")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
