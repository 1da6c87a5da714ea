"""Sequence parallel: tensor parallel that splits norms and residual too.

    loss = mean((block(x) - y)^2)    rank 0           rank 1           SBP
    x         (8, 16)                rows 0-3         rows 4-7         S(0)
    gathered0 (8, 16)                whole            whole            B
    w_qkv     (16, 48)               columns 0-23     columns 24-47    S(1)
    w_out     (16, 16)               rows 0-7         rows 8-15        S(0)
    residual  (8, 16)                rows 0-3         rows 4-7         S(0)
    w_up      (16, 64)               columns 0-31     columns 32-63    S(1)
    w_down    (64, 16)               rows 0-31        rows 32-63       S(0)
    out       (8, 16)                rows 0-3         rows 4-7         S(0)

Rows are tokens, the sequence before the samples: to split it is S(0), the one split that eager mode gathers exactly.
Moves: an all-gather of x into each half of the block and a reduce-scatter out of it, and both again backward; each is
       half an all-reduce of tensor parallel. Besides, an all-reduce of the gradients of the norms' weights.
Run:   ./launch.sh recipes/transformer/sequence_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/transformer/sequence_parallel.py [--graph]
Use it wherever you use tensor parallel and activations fill the memory.
Source: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Block(flow.nn.Module):
    def __init__(self, weights, mask, heads):
        super().__init__()
        for name, w in weights.items():
            setattr(self, name, flow.nn.Parameter(w.clone()))
        self.register_buffer("mask", mask)
        self.heads = heads
        self.norm = flow.nn.LayerNorm(len(weights["norm0"]), elementwise_affine=False)  # each rank does it whole

    def forward(self, x):
        (tokens, features), sequence, whole = x.shape, len(self.mask), flow.sbp.broadcast
        # grad_sbp: what is gathered forward is reduce-scattered backward, and the other way round
        gathered0 = (self.norm(x) * self.norm0).to_global(sbp=whole, grad_sbp=x.sbp)
        by_head = flow.matmul(gathered0, self.w_qkv).reshape(sequence, tokens // sequence, self.heads, -1)
        q, k, v = by_head.permute(1, 2, 0, 3).chunk(3, dim=-1)
        scores = flow.matmul(q, k.permute(0, 1, 3, 2)) * (self.heads / features) ** 0.5
        attention = (scores + self.mask).softmax(dim=-1)
        mixed = flow.matmul(attention, v).permute(2, 0, 1, 3).reshape(tokens, features)
        residual = x + flow.matmul(mixed, self.w_out).to_global(sbp=x.sbp, grad_sbp=whole)
        gathered1 = (self.norm(residual) * self.norm1).to_global(sbp=whole, grad_sbp=x.sbp)
        hidden = flow.relu(flow.matmul(gathered1, self.w_up))
        out = residual + flow.matmul(hidden, self.w_down).to_global(sbp=x.sbp, grad_sbp=whole)
        names = ("gathered0", "scores", "attention", "mixed", "residual", "gathered1", "hidden", "out")
        return dict(zip(names, (gathered0, scores, attention, mixed, residual, gathered1, hidden, out)))


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        made = self.module(x)
        loss = flow.nn.functional.mse_loss(made["out"], y)
        loss.backward()  # in a graph this includes the update
        return made, loss, {name: w.grad for name, w in self.module.to(flow.nn.Module).named_parameters()}


def run(graph=False, device="cpu", seed=0, steps=1, split=True, samples=2, sequence=None, heads=None, head_size=4):
    """SGD steps; returns x, y, weights before and after, what Block makes, gradients, losses; split=False: x is B."""
    n = flow.env.get_world_size()
    sequence, heads = sequence or max(4, n), heads or 2 * n
    features = heads * head_size
    shapes = {"norm0": (features,), "w_qkv": (features, 3 * features), "w_out": (features, features)}
    shapes.update({"norm1": (features,), "w_up": (features, 4 * features), "w_down": (4 * features, features)})
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, samples * sequence, features), dtype=np.float32)
    weights = {name: rng.standard_normal(shape, dtype=np.float32) / 4 for name, shape in shapes.items()}
    mask = np.triu(np.full((sequence, sequence), -1e9, dtype=np.float32), k=1)  # no token sees a later one

    ranks = flow.placement(device, list(range(n)))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0) if split else flow.sbp.broadcast)
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0) if split else flow.sbp.broadcast)
    dims = {"w_qkv": 1, "w_out": 0, "w_up": 1, "w_down": 0}  # by columns, then by rows
    for name, w in weights.items():
        sbp = flow.sbp.split(dims[name]) if name in dims else flow.sbp.broadcast
        weights[name] = flow.tensor(w, placement=ranks, sbp=sbp)
    module = Block(weights, flow.tensor(mask, placement=ranks, sbp=flow.sbp.broadcast), heads)
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            made, loss, gradients = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            made = model(x)
            loss = flow.nn.functional.mse_loss(made["out"], y)
            loss.backward()
            update.step()
            gradients = {name: w.grad for name, w in module.named_parameters()}
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, "mask": module.mask, **weights, **made}
    tensors.update({f"{name} grad": grad for name, grad in gradients.items()})
    tensors.update({f"new {name}": w for name, w in module.named_parameters()})
    return {**tensors, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = vars(parser.parse_args())
    n, kept = flow.env.get_world_size(), ("x", "residual", "gathered0", "mixed", "gathered1", "hidden")
    for split in (False, True):
        tensors = run(split=split, **options)
        size, held = 4 * tensors["out"].numel(), [4 * tensors[name].to_local().numel() for name in kept]
        if flow.env.get_rank() == 0:
            print("sequence" if split else "tensor", "parallel: bytes of", *kept, "on each rank:", *held)
            moves = "8 all-gathers and reduce-scatters" if split else "4 all-reduces"
            print(f"    {moves} of {size} bytes: each rank sends {8 * (n - 1) * size // n}, by formula")

    values = {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}  # collective: all ranks call
    samples, heads, sequence, _ = values["scores"].shape

    def normed(x, gain):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain

    def loss_of(w):  # the block on a single device
        qkv = (normed(values["x"], w["norm0"]) @ w["w_qkv"]).reshape(sequence, samples, heads, -1)
        q, k, v = np.split(qkv.transpose(1, 2, 0, 3), 3, axis=-1)
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])) * np.tri(sequence)
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        x = values["x"] + mixed.transpose(2, 0, 1, 3).reshape(samples * sequence, -1) @ w["w_out"]
        out = x + np.maximum(normed(x, w["norm1"]) @ w["w_up"], 0) @ w["w_down"]
        return ((out - values["y"]) ** 2).mean()

    weights = {name[4:]: values[name[4:]] for name in tensors if name.startswith("new ")}
    np.testing.assert_allclose(values["losses"][0], loss_of(weights), rtol=1e-5)
    for name, w in weights.items():  # along its gradient the loss rises by the square of it
        gradient = values[f"{name} grad"]
        up, down = (loss_of({**weights, name: w + step * gradient}) for step in (1e-4, -1e-4))
        np.testing.assert_allclose((up - down) / 2e-4, (gradient**2).sum(), rtol=1e-3, err_msg=name)
    if flow.env.get_rank() == 0:
        print("the loss and the gradient of each weight are those of a single device")


if __name__ == "__main__":
    main()
