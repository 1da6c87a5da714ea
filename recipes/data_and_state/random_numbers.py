"""Random numbers: nn.Dropout repeats its mask on every shard; draw a global one.

    dropout of x, keep 0.5    rank 0       rank 1       SBP
    x           (16, 8)       rows 0-7     rows 8-15    S(0)
    repeated    (16, 8)       rows 0-7     rows 8-15    S(0)
    again       (16, 8)       rows 0-7     rows 8-15    S(0)
    mask        (16, 8)       rows 0-7     rows 8-15    S(0)
    out         (16, 8)       rows 0-7     rows 8-15    S(0)
    weight      (8, 8)        whole        whole        B

nn.Dropout knows only its shard, and its generator starts alike on every rank and in every module; manual_seed does not
change it. flow.rand draws for the global tensor: shards in S get numbers of their own, a B tensor the same everywhere,
whatever the seeds of the ranks. flow.nn.init does the same.

Moves: nothing, 0 bytes.
Run:   ./launch.sh recipes/data_and_state/random_numbers.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/random_numbers.py [--graph]
Use it for dropout and noise in split tensors. Another number of ranks draws other numbers in S(0) and S(1).
Source: N. Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15 (2014).
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)
KEEP = 0.5


class Dropouts(flow.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = flow.nn.Dropout(p=1 - KEEP)
        self.second = flow.nn.Dropout(p=1 - KEEP)

    def forward(self, x):
        # nn.functional.dropout obeys manual_seed in eager mode, but with one seed its shards repeat as well
        repeated, again = self.first(x), self.second(x)  # the wrong way
        mask = (flow.rand(*x.shape, placement=x.placement, sbp=x.sbp) < KEEP).to(flow.float32)
        return repeated, again, mask, x * mask / KEEP


class DropoutsGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def run(graph=False, device="cpu", seed=0, batch=None, features=None, dim=0):
    """x is drawn by numpy and split along `dim`; returns the tensors of the table."""
    n = flow.env.get_world_size()
    batch, features = batch or max(16, n), features or max(8, n)  # a row and a column for each rank, at least
    x = np.random.default_rng(seed).standard_normal((batch, features), dtype=np.float32)

    flow.manual_seed(seed)
    ranks = flow.placement(device, list(range(n)))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(dim))
    weight = flow.nn.init.normal_(flow.empty(features, features, placement=ranks, sbp=flow.sbp.broadcast))
    module = Dropouts()
    model = DropoutsGraph(module) if graph else module
    repeated, again, mask, out = model(x)
    return {"x": x, "repeated": repeated, "again": again, "mask": mask, "out": out, "weight": weight}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    n = flow.env.get_world_size()
    values = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    if flow.env.get_rank() == 0:
        print("1: kept, 0: dropped ", *(f"rank {rank}".ljust(8) for rank in range(n)))
    kept = {}  # by rank, of the first elements of its shard
    for name in ("repeated", "again", "mask"):
        kept[name] = np.array([shard.ravel()[:8] != 0 for shard in np.array_split(values[name], n)]).astype(int)
        if flow.env.get_rank() == 0:
            title = {"repeated": "nn.Dropout", "again": "another nn.Dropout", "mask": "flow.rand(..., sbp)"}[name]
            print(f"{title:20}", *("".join(map(str, row)) for row in kept[name]))

    np.testing.assert_array_equal(kept["repeated"], np.tile(kept["repeated"][0], (n, 1)))  # equal on all ranks
    np.testing.assert_array_equal(kept["again"], kept["repeated"])
    assert (kept["mask"] != kept["mask"][0]).any()
    np.testing.assert_allclose(values["out"], values["x"] * values["mask"] / KEEP, rtol=1e-6)
    if flow.env.get_rank() == 0:
        print("nn.Dropout keeps the same elements of each shard; out equals x * mask / 0.5 on a single device")


if __name__ == "__main__":
    main()
