"""Asynchronous update: rank 0 applies gradients as they come, even stale ones.

    the last rank is slow    rank 0     rank 1     SBP
    x0         (4, 4)        whole      nothing    B
    y0         (4, 4)        whole      nothing    B
    x1         (4, 4)        nothing    whole      B
    y1         (4, 4)        nothing    whole      B
    w0         (4, 8)        whole      nothing    B
    w1         (8, 4)        whole      nothing    B

In each step rank k copies the weights from rank 0 and sends back the gradients of its rows, xk and yk; the slow rank
copies them only every sync_every steps. The order is fixed, not a race, so that a run can be repeated. Two models are
trained: "stale" like this; "late" with no slow rank, where it does not matter in which order the gradients arrive.

Moves: as in parameter_server.py, but the slow rank's copy only every sync_every steps: (n - 2 + 1/sync_every) x the
       bytes of the weights from rank 0 in a step, and 1 x as gradients from each other rank.
Run:   ./launch.sh recipes/by_hand/async_update.py [--sync-every 3] [--steps 8]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/async_update.py
Use it when ranks differ much in speed, and watch the loss; else keep all synchronous: train_data_parallel.py.
Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


def gradients_of(weights, x, y, size):
    """The part of the loss that one rank's rows have, and its gradients."""
    out = flow.matmul(flow.relu(flow.matmul(x, weights[0])), weights[1])
    part = flow.nn.functional.mse_loss(out, y, reduction="sum") / size  # ranks may differ in rows
    return part.detach(), flow.autograd.grad(part, weights)


def train(weights, xs, ys, size, steps, sync_every):
    """Train the weights in place; returns the loss of each step, and how old each rank's copy of the weights was."""
    server, losses, ages = weights[0].placement, [], []
    copies, copied_at = [None] * len(xs), [0] * len(xs)  # what each rank has copied, and in which step
    for step in range(steps):
        for rank, x in enumerate(xs):
            if rank < len(xs) - 1 or step % sync_every == 0:  # the last rank is slow
                moved = [w.to_global(placement=x.placement, sbp=flow.sbp.broadcast) for w in weights]
                copies[rank], copied_at[rank] = [w.detach().requires_grad_() for w in moved], step
        results = [gradients_of(copy, x, y, size) for copy, x, y in zip(copies, xs, ys)]  # all at the same time
        for _, gradients in results:  # the server applies them one by one
            for w, gradient in zip(weights, gradients):
                w -= 0.1 * gradient.to_global(placement=server, sbp=flow.sbp.broadcast)
        losses.append(sum(part.to_global(placement=server, sbp=flow.sbp.broadcast) for part, _ in results))
        ages.append([step - at for at in copied_at])
    return flow.stack(losses), ages


def run(device="cpu", seed=0, steps=4, sync_every=2, batch=None, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns the rows of each rank, the weights before and after, ages and losses."""
    n = flow.env.get_world_size()
    batch = batch or max(8, n)  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = [flow.placement(device, [rank]) for rank in range(n)]
    xs = [flow.tensor(rows, placement=rank, sbp=flow.sbp.broadcast) for rank, rows in zip(ranks, np.array_split(x, n))]
    ys = [flow.tensor(rows, placement=rank, sbp=flow.sbp.broadcast) for rank, rows in zip(ranks, np.array_split(y, n))]
    w0 = flow.tensor(w0, placement=ranks[0], sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=ranks[0], sbp=flow.sbp.broadcast)
    late, stale = [w0.clone(), w1.clone()], [w0.clone(), w1.clone()]
    late_losses, _ = train(late, xs, ys, y.size, steps, sync_every=1)
    losses, ages = train(stale, xs, ys, y.size, steps, sync_every)

    tensors = {f"{name}{k}": rows for k, pair in enumerate(zip(xs, ys)) for name, rows in zip("xy", pair)}
    tensors.update({"w0": w0, "w1": w1, "late w0": late[0], "late w1": late[1], "late losses": late_losses})
    tensors.update({"stale w0": stale[0], "stale w1": stale[1], "losses": losses})
    return {**tensors, "ages": flow.tensor(ages, placement=ranks[0], sbp=flow.sbp.broadcast)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sync-every", type=int, default=2, help="steps from one copy of the slow rank to the next")
    tensors = run(**vars(parser.parse_args()))

    n = flow.env.get_world_size()
    ranks = flow.placement("cpu", list(range(n)))
    for kind, word in {"rows of x": "x", "rows of y": "y", "weights": "stale w"}.items():
        held = flow.tensor([sum(4 * tensor.to_local().numel() for name, tensor in tensors.items() if word in name)])
        held = held.to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{kind:9} bytes on each rank:", *held)

    values = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    x, y = ([values[f"{name}{k}"] for k in range(n)] for name in "xy")
    size, ages = sum(rows.size for rows in y), values["ages"]
    for schedule, losses, age in (("late", values["late losses"], 0 * ages), ("stale", values["losses"], ages)):
        weights = [(values["w0"], values["w1"])]  # before each step, on a single device
        for step, loss in enumerate(losses):
            expected, (new0, new1) = 0, weights[step]
            for k in range(n):
                w0, w1 = weights[step - age[step, k]]
                hidden = np.maximum(x[k] @ w0, 0)
                error = hidden @ w1 - y[k]
                expected += (error**2).sum() / size
                error *= 2 / size
                new0, new1 = new0 - 0.1 * x[k].T @ (error @ w1.T * (hidden > 0)), new1 - 0.1 * hidden.T @ error
            np.testing.assert_allclose(loss, expected, rtol=1e-4)
            weights.append((new0, new1))
        np.testing.assert_allclose(values[f"{schedule} w0"], new0, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(values[f"{schedule} w1"], new1, rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        for step, (loss, late) in enumerate(zip(values["losses"], values["late losses"])):
            print(f"step {step}: the gradients are", *ages[step], f"steps old, loss {loss:.4f}, synchronous {late:.4f}")
        print("losses and weights equal those on a single device")


if __name__ == "__main__":
    main()
