"""Mixture of experts: an expert on each rank; tokens travel by all-to-all.

    out = x + gate * expert(norm(x))    rank 0        rank 1        SBP
    x         (16, 4)                   rows 0-7      rows 8-15     S(0)
    router    (4, 2)                    whole         whole         B
    sent      (2, 2, 3, 4)              rank 0's      rank 1's      S(0)
    arrived   (2, 2, 3, 4)              to expert 0   to expert 1   S(1)
    w_up      (2, 4, 8)                 expert 0      expert 1      S(0)
    w_down    (2, 8, 4)                 expert 0      expert 1      S(0)
    out       (16, 4)                   rows 0-7      rows 8-15     S(0)

A row of x is a token; the tokens of a rank are a group. The router chooses one expert for each token. A group has 3
slots at each expert: sent is (group, expert, slot, hidden_size). A token that finds no free slot is dropped: out is x.
Moves: slots to the experts and back, and their gradients: 4 all-to-alls, each (n-1)/n^2 x sent from each of n ranks;
       an all-reduce of the gradients of router and norm; for cumsum, 2 all-to-alls of a number per token and expert.
Run:   ./launch.sh recipes/transformer/mixture_of_experts.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/transformer/mixture_of_experts.py [--graph]
Use it to have n times the weights for the computation of one expert a token. It lacks the papers' load-balancing loss.
Source: W. Fedus et al., "Switch Transformers", arXiv:2101.03961; D. Lepikhin et al., "GShard", arXiv:2006.16668.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)  # numbers of ranks; launch.sh refuses others


class MixtureOfExperts(flow.nn.Module):
    def __init__(self, router, w_up, w_down, capacity, ranks):
        super().__init__()
        slots = np.arange(1, capacity + 1, dtype=np.float32)
        self.norm = flow.nn.LayerNorm(len(router)).to_global(placement=ranks, sbp=flow.sbp.broadcast)
        self.router = flow.nn.Parameter(flow.tensor(router, placement=ranks, sbp=flow.sbp.broadcast))
        self.w_up = flow.nn.Parameter(flow.tensor(w_up, placement=ranks, sbp=flow.sbp.split(0)))
        self.w_down = flow.nn.Parameter(flow.tensor(w_down, placement=ranks, sbp=flow.sbp.split(0)))
        self.register_buffer("slots", flow.tensor(slots, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        """Returns out and the number of dropped tokens."""
        num_experts, hidden_size, _ = self.w_up.shape
        tokens = self.norm(x).reshape(num_experts, -1, hidden_size)  # by group: there are as many groups as experts
        probs, chosen = self.route(tokens)
        dispatch_mask = self.assign_slots(chosen)
        arrived = self.dispatch(dispatch_mask, tokens)
        expert_out = self.experts(arrived)
        combined = self.combine(dispatch_mask, expert_out)
        gate = (probs * chosen).sum(dim=-1, keepdim=True)  # by it the router learns
        out = x + (gate * combined).reshape(*x.shape)
        return out, chosen.sum() - dispatch_mask.sum()

    def route(self, tokens):
        """(group, token, expert): the probability of each expert, and 1 for the most likely one, 0 for all others.

        Of experts that are equally likely the first is chosen.
        """
        probs = flow.matmul(tokens, self.router).softmax(dim=-1)
        chosen = flow.nn.functional.one_hot(probs.argmax(dim=-1), probs.shape[-1]).to(probs.dtype)
        return probs, chosen

    def assign_slots(self, chosen):
        """(group, token, expert and slot): 1 for the slot that a token takes; a group's first tokens come first."""
        order = flow.cumsum(chosen, dim=1)  # OneFlow 0.9.0 takes it to S(2), and back for the next line
        position = (order * chosen).sum(dim=-1, keepdim=True)  # 1 for a group's first token that chooses its expert
        slot = (position == self.slots).to(chosen.dtype)  # all 0 for a token that is dropped
        return (chosen.unsqueeze(3) * slot.unsqueeze(2)).reshape(*chosen.shape[:2], -1)

    def dispatch(self, dispatch_mask, tokens):
        """(group, expert, slot, hidden_size): the tokens in their slots, each slot on the rank of its expert."""
        groups, _, hidden_size = tokens.shape
        in_slots = flow.matmul(dispatch_mask.permute(0, 2, 1), tokens)
        sent = in_slots.reshape(groups, -1, len(self.slots), hidden_size)
        arrived = sent.to_global(sbp=flow.sbp.split(1), grad_sbp=flow.sbp.split(0))  # all-to-all
        return arrived

    def experts(self, arrived):
        """relu(arrived @ w_up) @ w_down, each slot by the weights of its expert."""
        groups, num_experts, capacity, hidden_size = arrived.shape
        by_expert = arrived.permute(1, 0, 2, 3).reshape(num_experts, groups * capacity, hidden_size)
        hidden = flow.relu(flow.matmul(by_expert, self.w_up))
        expert_out = flow.matmul(hidden, self.w_down)
        return expert_out.reshape(num_experts, groups, capacity, hidden_size).permute(1, 0, 2, 3)

    def combine(self, dispatch_mask, expert_out):
        """(group, token, hidden_size): what each token gets back on its rank, 0 if it was dropped."""
        groups, num_experts, capacity, hidden_size = expert_out.shape
        returned = expert_out.to_global(sbp=flow.sbp.split(0), grad_sbp=flow.sbp.split(1))  # all-to-all
        return flow.matmul(dispatch_mask, returned.reshape(groups, num_experts * capacity, hidden_size))


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        out, num_dropped = self.model(x)
        loss = flow.nn.functional.mse_loss(out, y)
        loss.backward()  # in a graph this includes the update
        return loss, num_dropped


def train(ranks, graph=False, seed=0, steps=3, group_size=8, hidden_size=4, ffn_size=8, capacity=3):
    """Train in float32 on a placement; returns the model, the loss and the dropped tokens of each step."""
    num_experts = flow.env.get_world_size()
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_experts * group_size, hidden_size), dtype=np.float32)
    y = rng.standard_normal((num_experts * group_size, hidden_size), dtype=np.float32)
    router = rng.standard_normal((hidden_size, num_experts), dtype=np.float32)
    w_up = rng.standard_normal((num_experts, hidden_size, ffn_size), dtype=np.float32)
    w_down = rng.standard_normal((num_experts, ffn_size, hidden_size), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MixtureOfExperts(router, w_up, w_down, capacity, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
    losses, dropped = [], []
    for _ in range(steps):
        if graph:
            loss, num_dropped = training(x, y)
        else:
            out, num_dropped = model(x)
            loss = flow.nn.functional.mse_loss(out, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
        dropped.append(num_dropped.numpy())
    return model, losses, dropped


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--capacity", type=int, default=3, help="slots that each group has at each expert")
    args = parser.parse_args()
    if args.capacity < 1:
        parser.error(f"--capacity {args.capacity}: 1 or more")

    model, losses, dropped = train(flow.placement.all(args.device), args.graph, capacity=args.capacity)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    one_device = flow.placement(args.device, [0])
    _, alone, dropped_alone = train(one_device, args.graph, capacity=args.capacity)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    np.testing.assert_array_equal(dropped, dropped_alone)
    if flow.env.get_rank() == 0:
        print(f"with {args.capacity} slots for each group at each expert, {dropped[0]:.0f} tokens are dropped at first")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
