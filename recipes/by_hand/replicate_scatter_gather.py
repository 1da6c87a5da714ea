"""Replicate, scatter, gather: write out nn.DataParallel step by step as SBP conversions.

    --home first              rank 0      rank 1      SBP
    x              (8,)       whole       nothing     B
    embedding      (27, 4)    whole       nothing     B
    head           (4, 27)    whole       nothing     B
    scattered      (8,)       rows 0-3    rows 4-7    S(0)
    table          (27, 4)    whole       whole       B
    out            (8, 27)    rows 0-3    rows 4-7    S(0)
    gathered       (8, 27)    whole       nothing     B

x is a text, a number for each character; out = embedding[x] @ head guesses the next one. table is the replica of
embedding; head has one too. --home all: x and y are S(0) and the weights B from the start, and the moves send nothing.

Why:   only rank 0 keeps weights and data, as in a program of one process; so the weights travel in every step.
Moves: from rank 0 n-1 copies of the weights, (n-1)/n of x and of out's gradient; to it n-1 gradients, (n-1)/n of out.
       Eager mode sends more: (n-1)/n from every rank, and an all-reduce. --home all: only an all-reduce of gradients.
Run:   ./launch.sh recipes/by_hand/replicate_scatter_gather.py [--graph] [--home first|all]
Use it to read code with nn.DataParallel; to train, use --home all, as train_data_parallel.py does.
Source: PyTorch documentation, torch.nn.DataParallel.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others
VOCABULARY = " abcdefghijklmnopqrstuvwxyz"
TEXT = "the quick brown fox jumps over the lazy dog "


class NextCharacter(flow.nn.Module):
    def __init__(self, embedding, head, home, ranks):
        super().__init__()
        self.embedding = flow.nn.Parameter(flow.tensor(embedding, placement=home, sbp=flow.sbp.broadcast))
        self.head = flow.nn.Parameter(flow.tensor(head, placement=home, sbp=flow.sbp.broadcast))
        self.ranks = ranks

    def replicate(self, weight):
        # without identity OneFlow 0.9.0 aborts a graph that moves a parameter to other ranks (register.cpp:75)
        weight = flow._C.identity(weight)
        return weight.to_global(placement=self.ranks, sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.partial_sum)

    def forward(self, x):
        scattered = x.to_global(placement=self.ranks, sbp=flow.sbp.split(0))
        table = self.replicate(self.embedding)
        out = flow.matmul(flow.nn.functional.embedding(scattered, table), self.replicate(self.head))
        # without grad_sbp each rank gets the whole gradient of out, and runs backward for the whole batch
        gathered = out.to_global(placement=x.placement, sbp=x.sbp, grad_sbp=flow.sbp.split(0))
        return gathered


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the update
        return loss


def placements(device, n, home="first"):
    """Where text and weights are, and the ranks that compute."""
    ranks = flow.placement.all(device)
    return (ranks if home == "all" else flow.placement(device, [0])), ranks


def train(home, ranks, graph=False, seed=0, steps=3, batch=8, hidden_size=4):
    """Train in float32 on `ranks` with the weights kept on `home`; returns the model and the loss of each step."""
    characters = np.resize([VOCABULARY.index(character) for character in TEXT], batch + 1).astype(np.int32)
    x = characters[:-1]
    y = np.eye(len(VOCABULARY), dtype=np.float32)[characters[1:]]  # one-hot: the next character of each
    rng = np.random.default_rng(seed)
    embedding = rng.standard_normal((len(VOCABULARY), hidden_size), dtype=np.float32)
    head = rng.standard_normal((hidden_size, len(VOCABULARY)), dtype=np.float32)

    sbp = flow.sbp.split(0) if home == ranks else flow.sbp.broadcast
    x = flow.tensor(x, placement=home, sbp=sbp)
    y = flow.tensor(y, placement=home, sbp=sbp)
    model = NextCharacter(embedding, head, home, ranks)
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
    words = "the ranks that keep text and weights"
    parser.add_argument("--home", choices=["first", "all"], default="first", help=words)
    args = parser.parse_args()

    home, ranks = placements(args.device, flow.env.get_world_size(), args.home)
    model, losses = train(home, ranks, args.graph)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    one_device = flow.placement(args.device, [0])
    _, alone = train(one_device, one_device, args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print("text and weights are kept on ranks", *home.ranks, "and used on", *ranks.ranks)
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
