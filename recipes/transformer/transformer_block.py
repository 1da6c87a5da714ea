"""Transformer block: split attention by heads and the MLP by columns.

    loss = mean((block(x) - y)^2)    rank 0          rank 1          rank 2          rank 3          SBP
    x         (16, 16)               rows 0-7        rows 0-7        rows 8-15       rows 8-15       S(0), B
    w_qkv     (16, 48)               columns 0-23    columns 24-47   columns 0-23    columns 24-47   B, S(1)
    qkv       (16, 48)               0-7, 0-23       0-7, 24-47      8-15, 0-23      8-15, 24-47     S(0), S(1)
    w_out     (16, 16)               rows 0-7        rows 8-15       rows 0-7        rows 8-15       B, S(0)
    w_up      (16, 64)               columns 0-31    columns 32-63   columns 0-31    columns 32-63   B, S(1)
    w_down    (64, 16)               rows 0-31       rows 32-63      rows 0-31       rows 32-63      B, S(0)
    out       (16, 16)               rows 0-7        rows 0-7        rows 8-15       rows 8-15       S(0), B

A row of x is a token. Axis 0 of the mesh [[0, 1], [2, 3]] splits the batch, axis 1 the heads: a rank's columns of qkv
are query, key and value of its own heads, so reshape and permute keep the split, and attention moves nothing.
Why:   a head needs no other head, and a hidden unit no other hidden unit; so both can be split without communication.
Moves: on axis 1, of t ranks, 4 all-reduces of a rank's rows of out, 2 (t-1)/t x each; on axis 0 one of the gradients.
Run:   ./launch.sh recipes/transformer/transformer_block.py [--graph]
Use it when a layer is too big or too slow for one device, and the ranks of axis 1 have fast links.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", arXiv:1909.08053.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4, 2)  # numbers of ranks; launch.sh refuses others


class Block(flow.nn.Module):
    def __init__(self, mesh, num_heads, head_size, seq_len, rng):
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        hidden_size = num_heads * head_size
        replicated = (flow.sbp.broadcast, flow.sbp.broadcast)
        columns = (flow.sbp.broadcast, flow.sbp.split(1))
        rows = (flow.sbp.broadcast, flow.sbp.split(0))
        self.attention_norm = flow.nn.LayerNorm(hidden_size).to_global(placement=mesh, sbp=replicated)
        self.w_qkv = parameter(rng, (hidden_size, 3 * hidden_size), mesh, columns)
        self.w_out = parameter(rng, (hidden_size, hidden_size), mesh, rows)
        self.mlp_norm = flow.nn.LayerNorm(hidden_size).to_global(placement=mesh, sbp=replicated)
        self.w_up = parameter(rng, (hidden_size, 4 * hidden_size), mesh, columns)
        self.w_down = parameter(rng, (4 * hidden_size, hidden_size), mesh, rows)
        mask = np.triu(np.full((seq_len, seq_len), -1e9, dtype=np.float32), k=1)  # no token sees a later one
        self.register_buffer("mask", flow.tensor(mask, placement=mesh, sbp=replicated))

    def forward(self, x):
        # grad_sbp sums the ranks' gradients here, once; without it OneFlow does so wherever the norm uses them
        attention_in = self.attention_norm(x).to_global(sbp=x.sbp, grad_sbp=x.sbp)
        residual = x + self.attention(attention_in).to_global(sbp=x.sbp)
        mlp_in = self.mlp_norm(residual).to_global(sbp=x.sbp, grad_sbp=x.sbp)
        out = residual + self.mlp(mlp_in).to_global(sbp=x.sbp)
        return out

    def attention(self, x):
        qkv = flow.matmul(x, self.w_qkv)
        by_head = qkv.reshape(-1, len(self.mask), self.num_heads, 3 * self.head_size).permute(0, 2, 1, 3)
        q, k, v = by_head.chunk(3, dim=-1)
        scores = flow.matmul(q, k.permute(0, 1, 3, 2)) * self.head_size**-0.5
        probs = (scores + self.mask).softmax(dim=-1)  # flow.where would gather the scores
        context = flow.matmul(probs, v).permute(0, 2, 1, 3).reshape(*x.shape)
        return flow.matmul(context, self.w_out)

    def mlp(self, x):
        hidden = flow.relu(flow.matmul(x, self.w_up))
        return flow.matmul(hidden, self.w_down)


def parameter(rng, shape, mesh, sbp):
    w = rng.standard_normal(shape, dtype=np.float32) / 4
    return flow.nn.Parameter(flow.tensor(w, placement=mesh, sbp=sbp))


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        # micro-batches: prepare_for_graph of your_model/graph_safe.py reads all weights through flow._C.identity

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the update
        return loss


def placements(device, n, tensor=2):
    """A mesh of n ranks: axis 0 splits the batch; axis 1, of `tensor` ranks, splits the heads."""
    return flow.placement(device, np.arange(n).reshape(-1, tensor).tolist())


def train(mesh, graph=False, seed=0, steps=3, batch=4, seq_len=4, num_heads=4, head_size=4):
    """Train in float32 on a mesh of two axes; returns the model and the loss of each step."""
    data, tensor = mesh.ranks.shape
    if batch % data or num_heads % tensor:  # a graph of OneFlow 0.9.0 would hang or abort
        raise ValueError(f"{data} data ranks must divide {batch} sequences; {tensor} tensor ranks, {num_heads} heads")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch * seq_len, num_heads * head_size), dtype=np.float32)
    y = rng.standard_normal((batch * seq_len, num_heads * head_size), dtype=np.float32)

    x = flow.tensor(x, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    y = flow.tensor(y, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    model = Block(mesh, num_heads, head_size, seq_len, rng)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
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

    model, losses = train(placements(args.device, flow.env.get_world_size()), args.graph)
    split = {name: w for name, w in model.named_parameters() if name.startswith("w_")}
    print(", ".join(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}" for name, w in split.items()))
    _, alone = train(flow.placement(args.device, [[0]]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        heads = model.w_qkv.to_local().shape[1] // (3 * model.head_size)
        print(f"each rank computes the attention of {heads} of {model.num_heads} heads, and sends no scores")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
