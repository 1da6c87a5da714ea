"""Sequence parallel: with tensor parallelism, split norms and residual too.

    loss = mean((block(x) - y)^2)    rank 0           rank 1           SBP
    x            (8, 16)             rows 0-3         rows 4-7         S(0)
    attention_in (8, 16)             whole            whole            B
    w_qkv        (16, 48)            columns 0-23     columns 24-47    S(1)
    w_out        (16, 16)            rows 0-7         rows 8-15        S(0)
    residual     (8, 16)             rows 0-3         rows 4-7         S(0)
    mlp_in       (8, 16)             whole            whole            B
    w_up         (16, 64)            columns 0-31     columns 32-63    S(1)
    w_down       (64, 16)            rows 0-31        rows 32-63       S(0)
    out          (8, 16)             rows 0-3         rows 4-7         S(0)

A row is a token, ordered sequence before batch, so that the sequence is S(0): eager mode sends more to gather S(1).
Why:   norm and residual treat each token alone, so ranks need not repeat them: each takes its own tokens.
Moves: forward 2 all-gathers and 2 reduce-scatters, backward the same, and an all-reduce of the norms' gradients.
Run:   ./launch.sh recipes/transformer/sequence_parallel.py [--graph]
Use it wherever you use tensor parallel and activations fill the memory. attention_in and mlp_in stay whole until
backward; Megatron-LM keeps a shard of each and gathers it again.
Source: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (2, 4)  # numbers of ranks; launch.sh refuses others


class Block(flow.nn.Module):
    def __init__(self, ranks, num_heads, head_size, seq_len, rng):
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        hidden_size = num_heads * head_size
        replicated, columns, rows = flow.sbp.broadcast, flow.sbp.split(1), flow.sbp.split(0)
        self.attention_norm = flow.nn.LayerNorm(hidden_size).to_global(placement=ranks, sbp=replicated)
        self.w_qkv = parameter(rng, (hidden_size, 3 * hidden_size), ranks, columns)
        self.w_out = parameter(rng, (hidden_size, hidden_size), ranks, rows)
        self.mlp_norm = flow.nn.LayerNorm(hidden_size).to_global(placement=ranks, sbp=replicated)
        self.w_up = parameter(rng, (hidden_size, 4 * hidden_size), ranks, columns)
        self.w_down = parameter(rng, (4 * hidden_size, hidden_size), ranks, rows)
        mask = np.triu(np.full((seq_len, seq_len), -1e9, dtype=np.float32), k=1)  # no token sees a later one
        self.register_buffer("mask", flow.tensor(mask, placement=ranks, sbp=replicated))

    def forward(self, x):
        rows, replicated = flow.sbp.split(0), flow.sbp.broadcast
        # each rank normalizes its own rows; what is gathered forward is reduce-scattered backward, and the reverse
        attention_in = self.attention_norm(x).to_global(sbp=replicated, grad_sbp=rows)
        residual = x + self.attention(attention_in).to_global(sbp=rows, grad_sbp=replicated)
        mlp_in = self.mlp_norm(residual).to_global(sbp=replicated, grad_sbp=rows)
        out = residual + self.mlp(mlp_in).to_global(sbp=rows, grad_sbp=replicated)
        return out

    def attention(self, x):
        qkv = flow.matmul(x, self.w_qkv)
        by_head = qkv.reshape(len(self.mask), -1, self.num_heads, 3 * self.head_size).permute(1, 2, 0, 3)
        q, k, v = by_head.chunk(3, dim=-1)
        scores = flow.matmul(q, k.permute(0, 1, 3, 2)) * self.head_size**-0.5
        probs = (scores + self.mask).softmax(dim=-1)
        context = flow.matmul(probs, v).permute(2, 0, 1, 3).reshape(*x.shape)
        return flow.matmul(context, self.w_out)

    def mlp(self, x):
        hidden = flow.relu(flow.matmul(x, self.w_up))
        return flow.matmul(hidden, self.w_down)


def parameter(rng, shape, ranks, sbp):
    w = rng.standard_normal(shape, dtype=np.float32) / 4
    return flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=sbp))


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        # no micro-batches here: they would cut the sequence, which is the first dimension of x; gpt.py has them

    def build(self, x, y):
        out = self.model(x)
        loss = flow.nn.functional.mse_loss(out, y)
        loss.backward()  # in a graph this includes the update
        return out, loss


def train(ranks, graph=False, seed=0, steps=3, batch=2, seq_len=4, num_heads=4, head_size=4):
    """Train in float32 on a placement; returns the model, the block's last output and the loss of each step."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch * seq_len, num_heads * head_size), dtype=np.float32)
    y = rng.standard_normal((batch * seq_len, num_heads * head_size), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = Block(ranks, num_heads, head_size, seq_len, rng)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            out, loss = training(x, y)
        else:
            out = model(x)
            loss = flow.nn.functional.mse_loss(out, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, out, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    model, out, losses = train(flow.placement.all(args.device), args.graph)
    split = {name: w for name, w in model.named_parameters() if name.startswith("w_")}
    print(", ".join(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}" for name, w in split.items()))
    _, _, alone = train(flow.placement(args.device, [0]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        held, needed = 4 * out.to_local().numel(), 4 * out.numel()
        print(f"a rank keeps {held} bytes of x, the residual and out each; with tensor parallel it would keep {needed}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
