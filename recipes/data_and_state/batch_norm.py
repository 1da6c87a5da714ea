"""Batch norm: normalize by the whole batch, not by each rank's rows.

    h = x @ w, normalized by column    rank 0          rank 1          SBP
    x              (8, 4)              rows 0-3        rows 4-7        S(0)
    y              (8, 8)              rows 0-3        rows 4-7        S(0)
    w              (4, 8)              whole           whole           B
    by_shard       (8, 8)              rows 0-3        rows 4-7        S(0)
    mean           (1, 8)              whole           whole           B
    var            (1, 8)              whole           whole           B
    out            (8, 8)              rows 0-3        rows 4-7        S(0)

nn.BatchNorm1d gives by_shard, silently, and its running_mean and running_var are B but differ from rank to rank; a
checkpoint keeps those of rank 0. By hand, mean and var are partial sums, P -> B, also in backward.

Moves: 4 all-reduces of a row, mean and var forward and backward, and one of w's gradient every step; nn.BatchNorm1d: 0.
Run:   ./launch.sh recipes/data_and_state/batch_norm.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/batch_norm.py [--graph]
Use it when a rank's rows are too few to stand for the batch. nn.LayerNorm is right with S(0).
Source: S. Ioffe and C. Szegedy, "Batch Normalization", arXiv:1502.03167.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Network(flow.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = flow.nn.Parameter(w.clone())
        # nn.SyncBatchNorm does not run on CPU: "SyncBatchNorm expected input tensor to be on GPU"
        self.built_in = flow.nn.BatchNorm1d(w.shape[1]).to_global(placement=w.placement, sbp=flow.sbp.broadcast)

    def forward(self, x, y):
        h = flow.matmul(x, self.w)
        by_shard = self.built_in(h)  # the wrong way; the loss does not depend on it
        mean = h.mean(dim=0, keepdim=True).to_global(sbp=flow.sbp.broadcast)
        centered = h - mean
        var = (centered * centered).mean(dim=0, keepdim=True).to_global(sbp=flow.sbp.broadcast)
        out = centered / flow.sqrt(var + 1e-5)
        return flow.nn.functional.mse_loss(out, y), out, mean, var, by_shard


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss, *others = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        return (loss, *others, self.module.to(flow.nn.Module).w.grad)


def run(graph=False, device="cpu", seed=0, steps=3, batch=None, in_features=4, out_features=8):
    """Some steps in float32; returns the table's tensors as in the last step, running statistics, and the losses."""
    batch = batch or max(8, 2 * flow.env.get_world_size())  # two rows for each rank, at least: one has no variance
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    w = flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast)
    module = Network(w)
    update = flow.optim.SGD([module.w], lr=0.1)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            loss, out, mean, var, by_shard, w_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            loss, out, mean, var, by_shard = model(x, y)
            loss.backward()
            update.step()
            w_grad = module.w.grad
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, "w": w, "by_shard": by_shard}
    tensors.update({"running_mean": module.built_in.running_mean, "running_var": module.built_in.running_var})
    tensors.update({"mean": mean, "var": var, "out": out, "w grad": w_grad, "new w": module.w})
    return {**tensors, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    x, y, w = (tensors[name].numpy() for name in ("x", "y", "w"))  # collective: all ranks call it
    for loss in tensors["losses"].numpy():  # training on a single device
        h = x @ w
        mean, var = h.mean(axis=0, keepdims=True), h.var(axis=0, keepdims=True)
        out = (h - mean) / np.sqrt(var + 1e-5)
        np.testing.assert_allclose(loss, ((out - y) ** 2).mean(), rtol=1e-4)
        error = 2 * (out - y) / y.size
        w = w - 0.1 * x.T @ ((error - error.mean(axis=0) - out * (error * out).mean(axis=0)) / np.sqrt(var + 1e-5))

    n = flow.env.get_world_size()
    ranks = flow.placement("cpu", list(range(n)))
    shards = np.array_split(h, n)
    running = tensors["running_mean"].to_local()[:1].cpu().to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
    if flow.env.get_rank() == 0:
        print("column 0 of h               ", *(f"rank {rank}".rjust(8) for rank in range(n)), "  whole batch")
        for name, whole in (("mean", mean), ("var", var)):
            by_rank = (f"{getattr(shard, name)(axis=0)[0]:8.4f}" for shard in shards)
            print(f"{name:28}", *by_rank, f"{whole[0, 0]:13.4f}")
        print("nn.BatchNorm1d, running_mean", *(f"{one:8.4f}" for one in running))

    by_shard = [(shard - shard.mean(axis=0)) / np.sqrt(shard.var(axis=0) + 1e-5) for shard in shards]
    np.testing.assert_allclose(tensors["by_shard"].numpy(), np.concatenate(by_shard), rtol=1e-3, atol=1e-3)
    for name, expected in {"mean": mean, "var": var, "out": out, "new w": w}.items():
        np.testing.assert_allclose(tensors[name].numpy(), expected, rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        off = np.abs(np.concatenate(by_shard) - out).max()
        print(f"nn.BatchNorm1d takes the mean and var of each shard: it is off by up to {off:.2f}, silently")
        print("mean, var, out and new w equal those computed on a single device")


if __name__ == "__main__":
    main()
