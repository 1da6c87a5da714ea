"""DistributedDataParallel: keep local tensors; one line averages their gradients.

    w0 grad = mean over ranks    rank 0                   rank 1
    x           (4, 4)           whole, a local tensor    whole, a local tensor
    y           (4, 4)           whole, a local tensor    whole, a local tensor
    w0          (4, 8)           whole, a local tensor    whole, a local tensor
    w1          (8, 4)           whole, a local tensor    whole, a local tensor
    w0 grad     (4, 8)           whole, a local tensor    whole, a local tensor
    w1 grad     (8, 4)           whole, a local tensor    whole, a local tensor

x and y are the rank's own rows of the batch. DistributedDataParallel overwrites each rank's weights with rank 0's, and
backward() averages the gradients (up to 10 weights in one all-reduce), so all replicas stay equal. It returns the
module that it is given: a state_dict has no prefix "module.".

Why:   replicas that start equal, and all subtract the same mean gradient, stay equal; nothing else has to be sent.
Moves: every step an all-reduce, 2 (n-1)/n x the bytes of the weights from each of n ranks; once, the weights of rank 0.
Run:   ./launch.sh recipes/training/ddp.py
Use it when a model with local tensors exists already; it does not work with global tensors or in an nn.Graph.
Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1, device):
        super().__init__()
        self.w0 = flow.nn.Parameter(flow.tensor(w0, device=device))
        self.w1 = flow.nn.Parameter(flow.tensor(w1, device=device))

    def forward(self, x):
        hidden = flow.relu(flow.matmul(x, self.w0))
        return flow.matmul(hidden, self.w1)


def train(device="cpu", distributed=True, seed=0, steps=3, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on this rank's rows, or else on all; returns the model and the loss of each step."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    n = flow.env.get_world_size() if distributed else 1
    rank = flow.env.get_rank() if distributed else 0
    rng = np.random.default_rng([seed, rank])
    own_w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)  # different on each rank
    own_w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = flow.tensor(np.array_split(x, n)[rank], device=device)
    y = flow.tensor(np.array_split(y, n)[rank], device=device)
    share = len(x) * n / batch  # the mean is over ranks, not over rows: a rank with more rows must count more
    model = MLP(own_w0, own_w1, device)
    if distributed:
        model = flow.nn.parallel.DistributedDataParallel(model)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = share * flow.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()  # set_to_none=True would clear nothing here (OneFlow 0.9.0)
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        if distributed:
            flow.comm.all_reduce(loss)  # the sum over ranks
        losses.append(loss.item() / n)
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
    args = parser.parse_args()
    n = flow.env.get_world_size()
    if args.batch < n:
        parser.error(f"--batch {args.batch}: {n} or more, a row for each rank")

    model, losses = train(args.device, batch=args.batch)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.shape)}, a local tensor, its sum after training {w.sum().item():.4f}")
    _, alone = train(args.device, distributed=False, batch=args.batch)  # the whole batch on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
