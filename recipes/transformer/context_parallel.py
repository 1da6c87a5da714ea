"""Context parallel: attention over a split sequence, by all-gather, all-to-all or a ring.

    out = softmax(q @ k + mask) @ v    rank 0        rank 1        SBP
    q       (8, 4, 4)                  rows 0-3      rows 4-7      S(0)
    k       (8, 4, 4)                  rows 0-3      rows 4-7      S(0)
    out     (8, 4, 4)                  rows 0-3      rows 4-7      S(0)

q is (sequence, heads, head size). For the ring each rank has tensors of its own: q0, k0 and v0 on rank 0, and so on.
Moves: gather: all of k and v, and back their gradients: 4 (n-1)/n x q from each of n ranks.
       all-to-all (Ulysses): q, k and v from rows to heads, out back, and again backward: 8 (n-1)/n^2 x q from each.
       ring: k and v of a rank to the next, on to the last (a graph sends them straight), and back: 2 (n-1) x q in all.
Run:   ./launch.sh recipes/transformer/context_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/transformer/context_parallel.py [--graph]
Use it when a sequence is too long for one device: all-to-all if n divides the heads; the ring keeps the fewest scores.
Source: H. Liu et al., arXiv:2310.01889 (ring); S. Jacobs et al., arXiv:2309.14509 (DeepSpeed Ulysses).
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


def attend(q, k, v, mask, before=None):
    """Softmax over the keys so far: the largest score, the sum of powers, the values by these weights; the scores."""
    q, k, v = (one.permute(1, 0, 2) for one in (q, k, v))
    # no k.permute(1, 2, 0): OneFlow 0.9.0 on CPU rounds a global tensor where that comes to an 8 x 8 transpose
    scores = flow.matmul(q, k, transpose_b=True) * q.shape[-1] ** -0.5
    top = (scores + mask).amax(dim=-1, keepdim=True)
    top = flow.maximum(top, before[0]) if before else top
    powers = flow.exp(scores + mask - top)
    total, mixed = powers.sum(dim=-1, keepdim=True), flow.matmul(powers, v)
    if before:
        fade = flow.exp(before[0] - top)
        total, mixed = total + fade * before[1], mixed + fade * before[2]
    return top, total, mixed, scores


class Attention(flow.nn.Module):
    def __init__(self, way, inputs, first):
        super().__init__()
        self.way, self.first = way, first
        for name, one in inputs.items():
            setattr(self, name, flow.nn.Parameter(one.clone()) if name[0] in "qkv" else one)  # else y and mask

    def forward(self):
        made, loss = self.ring() if self.way == "ring" else self.on_all_ranks(), 0
        for name in (name for name in made if name.startswith("out")):
            part = flow.nn.functional.mse_loss(made[name], getattr(self, name.replace("out", "y")), reduction="sum")
            loss = loss + part.to_global(placement=self.first, sbp=flow.sbp.broadcast)
        return made, loss

    def on_all_ranks(self):
        inside = flow.sbp.split(0 if self.way == "gather" else 1)  # rows of q and out, or their heads
        others = flow.sbp.broadcast if self.way == "gather" else inside
        q = self.q.to_global(sbp=inside, grad_sbp=flow.sbp.split(0))
        # without identity OneFlow 0.9.0 aborts a graph that gathers a parameter: "register.cpp:75 Check failed"
        k = flow._C.identity(self.k).to_global(sbp=others, grad_sbp=flow.sbp.split(0))
        v = flow._C.identity(self.v).to_global(sbp=others, grad_sbp=flow.sbp.split(0))
        _, total, mixed, scores = attend(q, k, v, self.mask)
        out = (mixed / total).permute(1, 0, 2).to_global(sbp=flow.sbp.split(0), grad_sbp=inside)
        return {"scores": scores, "out": out}

    def ring(self):
        made, state, n = {}, {}, flow.env.get_world_size()
        q, k, v = ([flow._C.identity(getattr(self, f"{name}{rank}")) for rank in range(n)] for name in "qkv")
        for step in range(n):
            for rank in range(step, n):  # it has got the block of `step` ranks before; no query sees a later one
                block, columns = rank - step, sum(len(one) for one in k[: rank - step])
                k[block], v[block] = (one.to_global(placement=q[rank].placement) for one in (k[block], v[block]))
                mask = getattr(self, f"mask{rank}")[:, columns : columns + len(k[block])]
                state[rank] = attend(q[rank], k[block], v[block], mask, state.get(rank))
                made.setdefault(f"scores{rank}", state[rank][3])
        return {**made, **{f"out{rank}": (state[rank][2] / state[rank][1]).permute(1, 0, 2) for rank in range(n)}}


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self):
        made, loss = self.module()
        loss.backward()  # in a graph this includes the update
        return made, loss, {name: w.grad for name, w in self.module.to(flow.nn.Module).named_parameters()}


def run(graph=False, device="cpu", seed=0, steps=1, way="gather", sequence=None, heads=None, head_size=4):
    """Steps of SGD on sum((out - y)^2); returns q, k, v, y, the scores, out, gradients, losses; of a ring by rank."""
    n = flow.env.get_world_size()
    sequence, heads = sequence or 4 * n, heads or 2 * n
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal((sequence, heads, head_size), dtype=np.float32) for name in "qkvy"}
    arrays["mask"] = np.triu(np.full((sequence, sequence), -1e9, dtype=np.float32), k=1)

    ranks, inputs = flow.placement(device, list(range(n))), {}
    for name, array in arrays.items():
        for rank, block in enumerate(np.array_split(array, n) if way == "ring" else []):
            place = flow.placement(device, [rank])
            inputs[f"{name}{rank}"] = flow.tensor(block, placement=place, sbp=flow.sbp.broadcast)
        if way != "ring":
            sbp = flow.sbp.broadcast if name == "mask" and way == "all-to-all" else flow.sbp.split(0)
            inputs[name] = flow.tensor(array, placement=ranks, sbp=sbp)
    module = Attention(way, inputs, flow.placement(device, [0]))
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            made, loss, gradients = model()
        else:
            update.zero_grad(set_to_none=True)
            made, loss = model()
            loss.backward()
            update.step()
            gradients = {name: w.grad for name, w in module.named_parameters()}
        losses.append(loss)
    return {**inputs, **made, **{f"{name} grad": one for name, one in gradients.items()}, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options, n = vars(parser.parse_args()), flow.env.get_world_size()
    for way, moved in {"gather": 4 * (n - 1), "all-to-all": 8 * (n - 1) / n, "ring": 2 * (n - 1)}.items():
        tensors = run(way=way, **options)
        block = max(4 * one.to_local().numel() for name, one in tensors.items() if name.startswith("scores"))
        names = ("q{}", "k{}", "v{}", "y{}", "out{}", "q{} grad", "k{} grad", "v{} grad")
        ranks = range(n) if way == "ring" else [""]
        whole = (np.concatenate([tensors[name.format(rank)].numpy() for rank in ranks]) for name in names)  # collective
        q, k, v, y, *found = (one.transpose(1, 0, 2) for one in whole)
        weights = np.exp(q @ k.transpose(0, 2, 1) / 2) * np.tri(q.shape[1])  # 2: the root of the head size
        weights /= weights.sum(axis=-1, keepdims=True)
        error = 2 * (weights @ v - y)
        change = weights * (error @ v.transpose(0, 2, 1))
        change = (change - weights * change.sum(axis=-1, keepdims=True)) / 2
        wanted = (weights @ v, change @ k, change.transpose(0, 2, 1) @ q, weights.transpose(0, 2, 1) @ error)
        for one, other in zip(found, wanted):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        if flow.env.get_rank() == 0:
            total = int(moved * q.nbytes)
            print(f"{way:11} all ranks send {total} bytes, by formula, and each has scores of {block} bytes at a time")


if __name__ == "__main__":
    main()
