"""Mixture of experts: the experts are split over the ranks; tokens travel by all-to-all.

    out = x + sum of gate * expert(norm(x))    rank 0           rank 1           SBP
    x         (8, 8, 4)                        sequences 0-3    sequences 4-7    S(0)
    router    (4, 8)                           whole            whole            B
    sent      (8, 8, 3, 4)                     sequences 0-3    sequences 4-7    S(0)
    arrived   (8, 8, 3, 4)                     experts 0-3      experts 4-7      S(1)
    w_up      (8, 4, 8)                        experts 0-3      experts 4-7      S(0)
    w_down    (8, 8, 4)                        experts 0-3      experts 4-7      S(0)
    out       (8, 8, 4)                        sequences 0-3    sequences 4-7    S(0)

A token chooses its top_k most likely experts; their probabilities, scaled to the sum 1, are the gates. A sequence has 3
slots at each expert: sent is (sequence, expert, slot, hidden_size). First choices take slots before second ones; what
finds no free slot is dropped. The balance loss, too, is that of a sequence: nothing depends on the number of ranks.
Why:   a token needs few experts, and is smaller than an expert; so tokens travel, and experts stay.
Moves: slots to the experts and back, and their gradients: 4 all-to-alls, each (n-1)/n^2 x sent from each of n ranks;
       an all-reduce of the gradients of router and norm.
Run:   ./launch.sh recipes/transformer/mixture_of_experts.py [--graph]
Use it for more weights: a token costs experts x capacity / seq_len = 3 MLPs. Left out: z-loss, noise, shared experts.
Source: W. Fedus et al., "Switch Transformers", arXiv:2101.03961; D. Lepikhin et al., "GShard", arXiv:2006.16668.
"""

import argparse
import dataclasses

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


@dataclasses.dataclass
class Config:
    experts: int = 8
    top_k: int = 2
    capacity: int = 3  # 1.5 times the tokens that a sequence has for an expert, if all experts get the same number
    aux_loss_coef: float = 0.3
    batch: int = 8
    seq_len: int = 8
    hidden_size: int = 4
    ffn_size: int = 8


class MixtureOfExperts(flow.nn.Module):
    def __init__(self, config, router, w_up, w_down, ranks):
        super().__init__()
        self.config = config
        slots = np.arange(1, config.capacity + 1, dtype=np.float32)
        self.norm = flow.nn.LayerNorm(config.hidden_size).to_global(placement=ranks, sbp=flow.sbp.broadcast)
        self.router = flow.nn.Parameter(flow.tensor(router, placement=ranks, sbp=flow.sbp.broadcast))
        self.w_up = flow.nn.Parameter(flow.tensor(w_up, placement=ranks, sbp=flow.sbp.split(0)))
        self.w_down = flow.nn.Parameter(flow.tensor(w_down, placement=ranks, sbp=flow.sbp.split(0)))
        self.register_buffer("slots", flow.tensor(slots, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        """Returns out, the balance loss, how many tokens chose each expert, and how many choices were dropped."""
        tokens = self.norm(x)
        probs = flow.matmul(tokens, self.router).softmax(dim=-1)
        choices = self.choose(probs)
        chosen = sum(choices)
        gates = self.gates(probs, chosen)
        dispatch_mask = self.assign_slots(choices)
        arrived = self.dispatch(dispatch_mask, tokens)
        expert_out = self.experts(arrived)
        out = x + self.combine(dispatch_mask, gates, expert_out)
        load = chosen.sum(dim=(0, 1))
        num_dropped = load.sum() - dispatch_mask.sum()
        return out, self.balance_loss(probs, chosen), load, num_dropped

    def choose(self, probs):
        """The first choice of each token, the second, ...: (sequence, token, expert), 1 for the chosen one, else 0.

        Of experts that are equally likely the first is chosen.
        """
        choices, left = [], probs
        for _ in range(self.config.top_k):
            choice = flow.nn.functional.one_hot(left.argmax(dim=-1), self.config.experts).to(probs.dtype)
            choices.append(choice)
            left = left - 2 * choice  # less than any probability: no token chooses an expert twice
        return choices

    def gates(self, probs, chosen):
        """(sequence, token, expert): the weight of each expert's output, 0 if not chosen. The router learns by it.

        A single choice keeps its probability, as in Switch Transformers: a gate of 1 would have no gradient.
        """
        gates = probs * chosen
        return gates / gates.sum(dim=-1, keepdim=True) if self.config.top_k > 1 else gates

    def balance_loss(self, probs, chosen):
        """1 if each sequence gives all experts the same number of tokens, more if not; the mean over the sequences."""
        fraction = chosen.mean(dim=1) / self.config.top_k  # of a sequence's choices; it has no gradient
        return self.config.experts * (fraction * probs.mean(dim=1)).sum(dim=-1).mean()

    def assign_slots(self, choices):
        """(sequence, token, expert, slot): 1 for a slot that a token takes.

        All first choices take slots before the second ones; of these, a sequence's first tokens come first.
        """
        in_order = flow.cat(choices, dim=1)
        # cumsum would move the tensor if a dimension in front of its own were split
        order = flow.cumsum(in_order.permute(1, 0, 2), dim=0).permute(1, 0, 2)
        position = (order * in_order).sum(dim=-1, keepdim=True)  # 1 for the first one that chooses its expert
        slot = (position == self.slots).to(in_order.dtype)  # all 0 for a choice that is dropped
        taken = in_order.unsqueeze(3) * slot.unsqueeze(2)
        return sum(taken.chunk(self.config.top_k, dim=1))

    def dispatch(self, dispatch_mask, tokens):
        """(sequence, expert, slot, hidden_size): the tokens in their slots, each slot on the rank of its expert."""
        batch, seq_len, num_experts, capacity = dispatch_mask.shape
        by_slot = dispatch_mask.reshape(batch, seq_len, num_experts * capacity).permute(0, 2, 1)
        sent = flow.matmul(by_slot, tokens).reshape(batch, num_experts, capacity, -1)
        arrived = sent.to_global(sbp=flow.sbp.split(1), grad_sbp=flow.sbp.split(0))  # all-to-all
        return arrived

    def experts(self, arrived):
        """relu(arrived @ w_up) @ w_down, each slot by the weights of its expert."""
        batch, num_experts, capacity, hidden_size = arrived.shape
        by_expert = arrived.permute(1, 0, 2, 3).reshape(num_experts, batch * capacity, hidden_size)
        hidden = flow.relu(flow.matmul(by_expert, self.w_up))
        expert_out = flow.matmul(hidden, self.w_down)
        return expert_out.reshape(num_experts, batch, capacity, hidden_size).permute(1, 0, 2, 3)

    def combine(self, dispatch_mask, gates, expert_out):
        """(sequence, token, hidden_size): what a token gets back from its experts, on its rank; 0 if all drop it."""
        batch, seq_len, num_experts, capacity = dispatch_mask.shape
        returned = expert_out.to_global(sbp=flow.sbp.split(0), grad_sbp=flow.sbp.split(1))  # all-to-all
        weights = (dispatch_mask * gates.unsqueeze(3)).reshape(batch, seq_len, num_experts * capacity)
        return flow.matmul(weights, returned.reshape(batch, num_experts * capacity, -1))


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.aux_loss_coef = model.config.aux_loss_coef
        self.add_optimizer(optimizer)
        # micro-batches: prepare_for_graph of your_model/graph_safe.py reads all weights through flow._C.identity

    def build(self, x, y):
        out, balance_loss, load, num_dropped = self.model(x)
        loss = flow.nn.functional.mse_loss(out, y) + self.aux_loss_coef * balance_loss
        loss.backward()  # in a graph this includes the update
        return loss, balance_loss, load, num_dropped


def train(ranks, config=None, graph=False, seed=0, steps=20):
    """Train in float32 on a placement; returns the model, and of each step the loss and what `forward` says."""
    config = config or Config()
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((config.batch, config.seq_len, config.hidden_size), dtype=np.float32)
    y = rng.standard_normal((config.batch, config.seq_len, config.hidden_size), dtype=np.float32)
    router = rng.standard_normal((config.hidden_size, config.experts), dtype=np.float32)
    w_up = rng.standard_normal((config.experts, config.hidden_size, config.ffn_size), dtype=np.float32) / 4
    w_down = rng.standard_normal((config.experts, config.ffn_size, config.hidden_size), dtype=np.float32) / 4

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = MixtureOfExperts(config, router, w_up, w_down, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=1.0)
    training = TrainingGraph(model, optimizer) if graph else None
    losses, balance_losses, loads, dropped = [], [], [], []
    for _ in range(steps):
        if graph:
            loss, balance_loss, load, num_dropped = training(x, y)
        else:
            out, balance_loss, load, num_dropped = model(x)
            loss = flow.nn.functional.mse_loss(out, y) + config.aux_loss_coef * balance_loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
        balance_losses.append(balance_loss.numpy())
        loads.append(load.numpy())
        dropped.append(num_dropped.numpy())
    return model, losses, balance_losses, loads, dropped


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--experts", type=int, default=Config.experts, help="as many as ranks, or more")
    parser.add_argument("--top-k", type=int, default=Config.top_k, help="experts that each token chooses")
    parser.add_argument("--capacity", type=int, default=Config.capacity, help="slots of a sequence at each expert")
    parser.add_argument(
        "--aux-loss-coef",
        type=float,
        default=Config.aux_loss_coef,
        help="weight of the balance loss (Switch Transformers: 0.01, for many more steps)",
    )
    args = parser.parse_args()
    n = flow.env.get_world_size()
    if args.experts < n:
        parser.error(f"--experts {args.experts}: {n} or more, at least one on each rank")
    if not 1 <= args.top_k <= args.experts:
        parser.error(f"--top-k {args.top_k}: from 1 to the {args.experts} experts")
    if args.capacity < 1:
        parser.error(f"--capacity {args.capacity}: 1 or more")
    if args.aux_loss_coef < 0:
        parser.error(f"--aux-loss-coef {args.aux_loss_coef}: 0 or more, else experts are loaded unevenly")

    config = Config(args.experts, args.top_k, args.capacity, args.aux_loss_coef)
    model, losses, balance_losses, loads, dropped = train(flow.placement.all(args.device), config, args.graph)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    one_device = flow.placement(args.device, [0])
    _, *alone = train(one_device, config, args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    np.testing.assert_allclose(balance_losses, alone[1], rtol=1e-5)
    np.testing.assert_array_equal(loads, alone[2])
    np.testing.assert_array_equal(dropped, alone[3])
    if flow.env.get_rank() == 0:
        choices = config.batch * config.seq_len * config.top_k
        for step in (0, len(losses) - 1):
            tokens = " ".join(f"{number:.0f}" for number in loads[step])
            print(f"step {step + 1}: tokens of each expert {tokens}; {dropped[step]:.0f} of {choices} choices dropped")
        print(f"balance loss {balance_losses[0]:.4f} -> {balance_losses[-1]:.4f}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
