"""Transformer block: attention split by heads, MLP by columns.

    loss = mean((block(x) - y)^2)    rank 0          rank 1          rank 2          rank 3          SBP
    x         (8, 16)                rows 0-3        rows 0-3        rows 4-7        rows 4-7        S(0), B
    w_qkv     (16, 48)               columns 0-23    columns 24-47   columns 0-23    columns 24-47   B, S(1)
    qkv       (8, 48)                0-3, 0-23       0-3, 24-47      4-7, 0-23       4-7, 24-47      S(0), S(1)
    w_out     (16, 16)               rows 0-7        rows 8-15       rows 0-7        rows 8-15       B, S(0)
    w_up      (16, 64)               columns 0-31    columns 32-63   columns 0-31    columns 32-63   B, S(1)
    w_down    (64, 16)               rows 0-31       rows 32-63      rows 0-31       rows 32-63      B, S(0)
    out       (8, 16)                rows 0-3        rows 0-3        rows 4-7        rows 4-7        S(0), B

A row of x is a token. Axis 0 of the mesh [[0, 1], [2, 3]] splits the samples, axis 1 the heads: a rank's columns of qkv
are query, key and value of its own heads, so reshape and permute keep the split, and attention moves nothing.
Moves: along axis 1 four all-reduces of out, 2 (n-1)/n x its bytes on n ranks each; along axis 0 one of the gradients.
Run:   ./launch.sh recipes/transformer/transformer_block.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/transformer/transformer_block.py [--graph]
Use it when a layer is too big or too slow for one device, and the ranks of axis 1 have fast links.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", arXiv:1909.08053.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4, 2, 3, *range(5, 65))


class Block(flow.nn.Module):
    def __init__(self, weights, mask, heads):
        super().__init__()
        for name, w in weights.items():
            setattr(self, name, flow.nn.Parameter(w.clone()))
        self.register_buffer("mask", mask)
        self.heads = heads
        self.norm = flow.nn.LayerNorm(len(weights["norm0"]), elementwise_affine=False)  # each rank does it whole

    def forward(self, x):
        sequence, (tokens, features) = len(self.mask), x.shape
        # grad_sbp sums the ranks' gradients here, once; without it OneFlow does so wherever norm uses them
        normed = (self.norm(x) * self.norm0).to_global(sbp=x.sbp, grad_sbp=x.sbp)
        qkv = flow.matmul(normed, self.w_qkv)
        by_head = qkv.reshape(tokens // sequence, sequence, self.heads, -1).permute(0, 2, 1, 3)
        q, k, v = by_head.chunk(3, dim=-1)
        scores = flow.matmul(q, k.permute(0, 1, 3, 2)) * (self.heads / features) ** 0.5
        attention = (scores + self.mask).softmax(dim=-1)  # flow.where would gather the scores
        mixed = flow.matmul(attention, v).permute(0, 2, 1, 3).reshape(tokens, features)
        x = x + flow.matmul(mixed, self.w_out).to_global(sbp=x.sbp)
        normed = (self.norm(x) * self.norm1).to_global(sbp=x.sbp, grad_sbp=x.sbp)
        hidden = flow.relu(flow.matmul(normed, self.w_up))
        out = x + flow.matmul(hidden, self.w_down).to_global(sbp=x.sbp)
        return {"qkv": qkv, "scores": scores, "attention": attention, "mixed": mixed, "hidden": hidden, "out": out}


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


def run(graph=False, device="cpu", seed=0, steps=1, tensor=None, samples=None, sequence=4, heads=None, head_size=4):
    """Steps of SGD in float32; returns x, y, the weights before and after, what Block makes, gradients, the losses."""
    n = flow.env.get_world_size()
    tensor = tensor or (2 if n % 2 == 0 else n)  # ranks along axis 1, which must divide the heads
    samples, heads = samples or max(2, n // tensor), heads or 2 * tensor
    features = heads * head_size
    shapes = {"norm0": (features,), "w_qkv": (features, 3 * features), "w_out": (features, features)}
    shapes.update({"norm1": (features,), "w_up": (features, 4 * features), "w_down": (4 * features, features)})
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples * sequence, features), dtype=np.float32)
    y = rng.standard_normal((samples * sequence, features), dtype=np.float32)
    weights = {name: rng.standard_normal(shape, dtype=np.float32) / 4 for name, shape in shapes.items()}
    mask = np.triu(np.full((sequence, sequence), -1e9, dtype=np.float32), k=1)  # no token sees a later one

    mesh = flow.placement(device, np.arange(n).reshape(-1, tensor).tolist())
    x = flow.tensor(x, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    y = flow.tensor(y, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    mask = flow.tensor(mask, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.broadcast))
    split = {"w_qkv": 1, "w_out": 0, "w_up": 1, "w_down": 0}  # by columns, then by rows
    for name, w in weights.items():
        sbp = flow.sbp.split(split[name]) if name in split else flow.sbp.broadcast
        weights[name] = flow.tensor(w, placement=mesh, sbp=(flow.sbp.broadcast, sbp))
    module = Block(weights, mask, heads)
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
        losses.append(loss.to_global(sbp=(flow.sbp.broadcast, flow.sbp.broadcast)))

    tensors = {"x": x, "y": y, **weights, **made, **{f"{name} grad": grad for name, grad in gradients.items()}}
    tensors.update({f"new {name}": w for name, w in module.named_parameters()})
    return {**tensors, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    for name in ("x", "w_qkv", "qkv", "scores", "attention", "mixed", "w_out", "w_up", "hidden", "w_down", "out"):
        shape, sbp = tensors[name].to_local().shape, ", ".join(map(str, tensors[name].sbp))
        if flow.env.get_rank() == 0:  # all ranks hold as much
            print(f"{name:10}{str(tuple(tensors[name].shape)):14}{sbp:52}on each rank {tuple(shape)}")
    if flow.env.get_rank() == 0:
        print("reshape and permute kept the split of qkv: each rank has the scores of its own samples and heads")

    values = {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}  # collective: all ranks call
    samples, heads, sequence, _ = values["scores"].shape

    def normed(x, gain):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain

    def loss_of(w):  # the block on a single device
        qkv = (normed(values["x"], w["norm0"]) @ w["w_qkv"]).reshape(samples, sequence, heads, -1)
        q, k, v = np.split(qkv.transpose(0, 2, 1, 3), 3, axis=-1)
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])) * np.tri(sequence)
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        x = values["x"] + mixed.transpose(0, 2, 1, 3).reshape(samples * sequence, -1) @ w["w_out"]
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
