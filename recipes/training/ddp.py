"""DistributedDataParallel: local tensors; one line averages their gradients.

    w0 grad = mean over ranks    rank 0                   rank 1                   SBP
    x           (4, 4)           whole, a local tensor    whole, a local tensor
    x of all    (8, 4)           rows 0-3                 rows 4-7                 S(0)
    own w0      (4, 8)           whole, a local tensor    whole, a local tensor
    w0          (4, 8)           whole, a local tensor    whole, a local tensor
    w0 grad     (4, 8)           whole, a local tensor    whole, a local tensor

Each rank draws its own weights. DistributedDataParallel overwrites them with those of rank 0, and backward() averages
the gradients (up to 10 weights in one all-reduce), so all replicas stay equal. It returns the module that it is given:
a state_dict has no prefix "module.". The mean is over ranks, not over rows: if one rank has 4 rows and another 3, a row
of the 3 counts more. --weigh rows multiplies each rank's loss by its rows x n / batch: the gradient of the whole batch.

Moves: every step an all-reduce, 2 (n-1)/n x the bytes of the weights from each of n ranks; once, the weights of rank 0.
Run:   ./launch.sh recipes/training/ddp.py [--weigh rows]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/ddp.py
Use it when a model with local tensors exists already; it does not work with global tensors or in an nn.Graph.
Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Network(flow.nn.Module):
    def __init__(self, w0, w1, share):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())
        self.share = share

    def forward(self, x, y):
        out = flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)
        return flow.nn.functional.mse_loss(out, y) * self.share


def run(device="cpu", seed=0, steps=3, weigh="ranks", batch=None, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns this rank's rows, weights before and after, gradients, and the losses."""
    world_size, rank = flow.env.get_world_size(), flow.env.get_rank()
    batch = batch or max(8, world_size)  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    rng = np.random.default_rng([seed, rank])  # another one on each rank
    own_w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    own_w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    x = flow.tensor(np.array_split(x, world_size)[rank], device=device)
    y = flow.tensor(np.array_split(y, world_size)[rank], device=device)
    own_w0 = flow.tensor(own_w0, device=device)
    own_w1 = flow.tensor(own_w1, device=device)
    share = len(x) * world_size / batch if weigh == "rows" else 1.0
    module = flow.nn.parallel.DistributedDataParallel(Network(own_w0, own_w1, share))
    tensors = {"own w0": own_w0, "own w1": own_w1, "w0": module.w0.detach().clone(), "w1": module.w1.detach().clone()}
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        update.zero_grad()
        loss = module(x, y)
        loss.backward()
        update.step()
        losses.append(loss.detach())
    tensors.update({"w0 grad": module.w0.grad.clone(), "w1 grad": module.w1.grad.clone()})
    # zero_grad(set_to_none=True) clears nothing in OneFlow 0.9.0: the new .grad is the bucket with the old gradient
    update.zero_grad(set_to_none=True)
    module(x, y).backward()
    tensors.update({"summed w0 grad": module.w0.grad, "summed w1 grad": module.w1.grad})

    losses = flow.stack(losses)
    flow.comm.all_reduce(losses)
    tensors.update({"new w0": module.w0, "new w1": module.w1, "losses": losses / world_size})
    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x_of_all = x.to_global(placement=ranks, sbp=flow.sbp.split(0))
    y_of_all = y.to_global(placement=ranks, sbp=flow.sbp.split(0))
    return {"x": x, "y": y, "x of all": x_of_all, "y of all": y_of_all, **tensors}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--weigh", choices=["ranks", "rows"], default="ranks", help="what counts alike in the mean")
    args = parser.parse_args()
    tensors = run(**vars(args))

    n = flow.env.get_world_size()
    ranks = flow.placement("cpu", list(range(n)))
    for name in ("x", "own w0", "w0", "w0 grad"):  # a row for each rank: its local shape and first element
        own = [*tensors[name].shape, tensors[name][0, 0].item()]
        held = flow.tensor([own]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            shapes = map(tuple, held[:, :2].astype(int).tolist())
            print(f"{name:8}local shapes", *shapes, " [0, 0] on each rank", *held[:, 2].round(4))

    x, y, *weights = (tensors[name].numpy() for name in ("x of all", "y of all", "w0", "w1"))  # collective
    rows = [len(own) for own in np.array_split(x, n)]  # of each rank
    share = [1 / len(x) if args.weigh == "rows" else 1 / n / own for own in rows]
    share = np.repeat(share, rows)  # of each row in the mean
    losses, gradients = tensors["losses"].numpy(), None
    for step in range(len(losses) + 1):  # SGD on a single device, and the gradients of one step more
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        loss = share @ (error**2).mean(axis=1)
        error *= 2 * share[:, None] / error.shape[1]
        last, gradients = gradients, [x.T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]
        if step < len(losses):
            np.testing.assert_allclose(losses[step], loss, rtol=1e-5)
            weights = [w - 0.1 * gradient for w, gradient in zip(weights, gradients)]
    for i in (0, 1):
        np.testing.assert_allclose(tensors[f"new w{i}"].numpy(), weights[i], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(tensors[f"w{i} grad"].numpy(), last[i], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(tensors[f"summed w{i} grad"].numpy(), last[i] + gradients[i], rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        old, new = last[0][0, 0], gradients[0][0, 0]
        print(f"zero_grad(set_to_none=True) cleared nothing: w0 grad is then {old:.4f} + {new:.4f} = {old + new:.4f}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
