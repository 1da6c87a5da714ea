"""Mixture of experts: an expert on each rank; tokens travel by all-to-all.

    out = x + gate * expert(x)    rank 0        rank 1        SBP
    x         (16, 4)             rows 0-7      rows 8-15     S(0)
    router    (4, 2)              whole         whole         B
    sent      (2, 2, 3, 4)        rank 0's      rank 1's      S(0)
    arrived   (2, 2, 3, 4)        to expert 0   to expert 1   S(1)
    w_up      (2, 4, 8)           expert 0      expert 1      S(0)
    w_down    (2, 8, 4)           expert 0      expert 1      S(0)
    out       (16, 4)             rows 0-7      rows 8-15     S(0)

A row of x is a token; the router sends it to one expert. Each rank has 3 slots for each expert: sent is (rank, expert,
slot, feature). A token that finds all of them taken is dropped: its out is x.
Moves: slots to the experts and back, and their gradients: 4 all-to-alls, each (n-1)/n^2 x sent from each of n ranks;
       an all-reduce of the router's gradient; and, for cumsum, 2 all-to-alls of a number for each token and expert.
Run:   ./launch.sh recipes/transformer/mixture_of_experts.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/transformer/mixture_of_experts.py [--graph]
Use it to have n times the weights for the computation of one expert a token.
Source: W. Fedus et al., "Switch Transformers", arXiv:2101.03961; D. Lepikhin et al., "GShard", arXiv:2006.16668.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Experts(flow.nn.Module):
    def __init__(self, router, w_up, w_down, slots):
        super().__init__()
        self.router = flow.nn.Parameter(router.clone())
        self.w_up = flow.nn.Parameter(w_up.clone())
        self.w_down = flow.nn.Parameter(w_down.clone())
        self.register_buffer("slots", slots)

    def forward(self, x):
        (experts, features, _), capacity = self.w_up.shape, len(self.slots)
        tokens = x.reshape(experts, -1, features)  # of each rank: there are as many ranks as experts
        odds = flow.matmul(tokens, self.router).softmax(dim=-1)
        chosen = (odds == odds.amax(dim=-1, keepdim=True)).to(x.dtype)
        order = flow.cumsum(chosen, dim=1)  # OneFlow 0.9.0 takes it to S(2), and back for the next line
        turn = (order * chosen).sum(dim=-1, keepdim=True)  # 1 for the first token that wants its expert
        slot = (turn == self.slots).to(x.dtype)  # all 0 for a token that is dropped
        dispatch = (chosen.unsqueeze(3) * slot.unsqueeze(2)).reshape(experts, -1, experts * capacity)
        sent = flow.matmul(dispatch.permute(0, 2, 1), tokens).reshape(experts, experts, capacity, features)
        arrived = sent.to_global(sbp=flow.sbp.split(1), grad_sbp=flow.sbp.split(0))  # all-to-all
        own = arrived.permute(1, 0, 2, 3).reshape(experts, -1, features)
        hidden = flow.relu(flow.matmul(own, self.w_up))
        done = flow.matmul(hidden, self.w_down).reshape(experts, experts, capacity, features).permute(1, 0, 2, 3)
        back = done.to_global(sbp=flow.sbp.split(0), grad_sbp=flow.sbp.split(1)).reshape(experts, -1, features)
        gate = (odds * chosen).sum(dim=-1, keepdim=True)  # by it the router learns
        out = (tokens + gate * flow.matmul(dispatch, back)).reshape(*x.shape)
        return {"odds": odds, "dispatch": dispatch, "sent": sent, "arrived": arrived, "hidden": hidden, "out": out}


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        x.retain_grad()  # an input of a graph is not a leaf: autograd would drop its gradient
        made = self.module(x)
        loss = flow.nn.functional.mse_loss(made["out"], y)
        loss.backward()  # in a graph this includes the update
        gradients = {name: w.grad for name, w in self.module.to(flow.nn.Module).named_parameters()}
        return made, loss, {"x": x.grad, **gradients}


def run(graph=False, device="cpu", seed=0, steps=1, tokens=8, features=4, hidden_features=8, capacity=3):
    """Steps of SGD in float32, `tokens` on each rank; returns x, y, the weights before and after, what Experts makes,
    gradients and the losses."""
    n = flow.env.get_world_size()
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n * tokens, features), dtype=np.float32)
    y = rng.standard_normal((n * tokens, features), dtype=np.float32)
    router = rng.standard_normal((features, n), dtype=np.float32)
    w_up = rng.standard_normal((n, features, hidden_features), dtype=np.float32)
    w_down = rng.standard_normal((n, hidden_features, features), dtype=np.float32)
    slots = np.arange(1, capacity + 1, dtype=np.float32)

    ranks = flow.placement(device, list(range(n)))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0), requires_grad=True)  # of the layer before
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    router = flow.tensor(router, placement=ranks, sbp=flow.sbp.broadcast)
    w_up = flow.tensor(w_up, placement=ranks, sbp=flow.sbp.split(0))
    w_down = flow.tensor(w_down, placement=ranks, sbp=flow.sbp.split(0))
    module = Experts(router, w_up, w_down, flow.tensor(slots, placement=ranks, sbp=flow.sbp.broadcast))
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            made, loss, gradients = model(x, y)
        else:
            x.grad = None
            update.zero_grad(set_to_none=True)
            made = model(x)
            loss = flow.nn.functional.mse_loss(made["out"], y)
            loss.backward()
            update.step()
            gradients = {"x": x.grad, **{name: w.grad for name, w in module.named_parameters()}}
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, "slots": module.slots, "router": router, "w_up": w_up, "w_down": w_down, **made}
    tensors.update({f"{name} grad": grad for name, grad in gradients.items()})
    tensors.update({f"new {name}": w for name, w in module.named_parameters()})
    return {**tensors, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--capacity", type=int, default=3, help="slots that each rank has for each expert")
    options = parser.parse_args()
    tensors = run(**vars(options))

    values = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    x, y, router, w_up, w_down = (values[name] for name in ("x", "y", "router", "w_up", "w_down"))
    odds = np.exp(x @ router) / np.exp(x @ router).sum(axis=1, keepdims=True)  # on a single device
    expert, (n, tokens, _) = odds.argmax(axis=1), values["dispatch"].shape
    wanted = expert.reshape(n, tokens)[:, :, None] == np.arange(n)
    taken = ((np.cumsum(wanted, axis=1) <= options.capacity) & wanted).any(axis=2).reshape(-1, 1)
    done = np.stack([np.maximum(row @ w_up[e], 0) @ w_down[e] for row, e in zip(x, expert)])
    out = x + odds.max(axis=1, keepdims=True) * done * taken
    np.testing.assert_allclose(values["out"], out, rtol=1e-5, atol=1e-5)
    for e in range(n):
        rows = (expert == e) & taken[:, 0]
        error = odds.max(axis=1, keepdims=True)[rows] * 2 * (out - y)[rows] / y.size
        np.testing.assert_allclose(
            values["w_down grad"][e], np.maximum(x[rows] @ w_up[e], 0).T @ error, rtol=1e-4, atol=1e-6
        )
    if flow.env.get_rank() == 0:
        for e in range(n):
            print(f"expert {e}: {wanted[:, :, e].sum()} tokens, by rank {wanted[:, :, e].sum(axis=1)}")
        print(f"{taken.sum()} of {len(x)} tokens found one of {options.capacity} slots, {(~taken).sum()} are dropped")
        moved = values["sent"].nbytes * (n - 1) // n**2
        print(f"each rank sends {moved} bytes in each of 4 all-to-alls, by formula: empty slots are sent too")
        print("out and the gradient of w_down are those of a single device")


if __name__ == "__main__":
    main()
