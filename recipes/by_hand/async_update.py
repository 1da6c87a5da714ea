"""Asynchronous SGD: a slow worker computes its gradients from old weights.

    the last rank is slow    rank 0     rank 1     SBP
    x0         (4, 4)        whole      nothing    B
    y0         (4, 4)        whole      nothing    B
    x1         (4, 4)        nothing    whole      B
    y1         (4, 4)        nothing    whole      B
    w0         (4, 8)        whole      nothing    B
    w1         (8, 4)        whole      nothing    B

In each step the server, rank 0, applies the gradients of all workers' rows one by one; the slow worker fetches the
weights only every sync_every steps. This shows staleness, not speed: each step waits for all workers, in a fixed order.

Why:   a server that waits for no worker is never idle, but it applies gradients of older weights.
Moves: as in parameter_server.py, but the slow rank's copy only every sync_every steps: (n - 2 + 1/sync_every) x the
       bytes of the weights from rank 0 in a step, and 1 x as gradients from each other rank.
Run:   ./launch.sh recipes/by_hand/async_update.py [--sync-every 3] [--steps 8]
Use it to see how stale gradients may be before training suffers; to train, see train_data_parallel.py.
Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class MLP(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0)
        self.w1 = flow.nn.Parameter(w1)

    def forward(self, x):
        return flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)


def rows_of_workers(array, workers):
    parts = np.array_split(array, len(workers))
    return [flow.tensor(part, placement=worker, sbp=flow.sbp.broadcast) for part, worker in zip(parts, workers)]


def fetch(model, worker):
    """A copy of the server's model on a worker."""
    w0 = model.w0.detach().to_global(placement=worker, sbp=flow.sbp.broadcast)
    w1 = model.w1.detach().to_global(placement=worker, sbp=flow.sbp.broadcast)
    return MLP(w0.clone(), w1.clone())  # to_global alone copies nothing on the server's own rank


def gradients_of(model, x, y, size):
    """A worker's part of the loss, and the gradients of its copy of the model."""
    loss = flow.nn.functional.mse_loss(model(x), y, reduction="sum") / size  # workers may differ in rows
    return loss, flow.autograd.grad(loss, list(model.parameters()))


def apply_gradients(model, optimizer, gradients):
    """Update the server's model with the gradients of one worker."""
    for w, gradient in zip(model.parameters(), gradients):
        w.grad = gradient.to_global(placement=w.placement, sbp=flow.sbp.broadcast)
    optimizer.step()


def placements(device, n):
    """One rank for each worker; the first is also the server, and the last is slow."""
    return [flow.placement(device, [rank]) for rank in range(n)]


def train(workers, steps=4, sync_every=2, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32; returns the model, the loss of each step, and the age of each worker's weights in steps."""
    n = len(workers)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden_size), dtype=np.float32)
    w1 = rng.standard_normal((hidden_size, out_features), dtype=np.float32)

    x = rows_of_workers(x, workers)
    y = rows_of_workers(y, workers)
    w0 = flow.tensor(w0, placement=workers[0], sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=workers[0], sbp=flow.sbp.broadcast)
    model = MLP(w0, w1)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    copies = [None] * n  # each worker's copy of the model
    fetched_at = np.zeros(n, dtype=int)  # the step in which it was fetched
    losses, staleness = [], []
    for step in range(steps):
        results = []
        for k in range(n):
            if k < n - 1 or step % sync_every == 0:  # the last worker is slow
                copies[k] = fetch(model, workers[k])
                fetched_at[k] = step
            results.append(gradients_of(copies[k], x[k], y[k], batch * out_features))
        for _, gradients in results:  # the server waits for all, and applies them one by one
            apply_gradients(model, optimizer, gradients)
        losses.append(sum(loss.numpy() for loss, _ in results))  # collective: all ranks call it
        staleness.append(step - fetched_at)
    return model, losses, staleness


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sync-every", type=int, default=2, help="steps from one fetch of the slow worker to the next")
    args = parser.parse_args()
    if args.sync_every < 1:
        parser.error(f"--sync-every {args.sync_every}: 1 or more")

    workers = placements(args.device, flow.env.get_world_size())
    model, losses, staleness = train(workers, steps=args.steps, sync_every=args.sync_every)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, synchronous, _ = train(workers, steps=args.steps, sync_every=1)
    one_device = [flow.placement(args.device, [0]) for _ in workers]
    _, alone, _ = train(one_device, steps=args.steps, sync_every=args.sync_every)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        for step in range(args.steps):
            print(f"step {step}: the gradients are", *staleness[step], "steps old,", end=" ")
            print(f"loss {losses[step]:.4f}, without a slow worker {synchronous[step]:.4f}")
        print("losses equal those on a single device")


if __name__ == "__main__":
    main()
