"""Data loading: each rank loads its own samples; to_global makes one batch.

    24 samples             rank 0          rank 1          SBP
    order 0    (24, 1)     rows 0-11       rows 12-23      S(0)
    order 1    (24, 1)     rows 0-11       rows 12-23      S(0)
    numbers    (8, 1)      rows 0-3        rows 4-7        S(0)
    x          (8, 5)      rows 0-3        rows 4-7        S(0)
    doubled    (48, 1)     rows 0-23       rows 24-47      S(0)

Each rank loads local tensors, and to_global in S(0) joins them into one batch for a model with global weights. x is the
last batch, of the samples in numbers; order has the numbers of an epoch's samples, a shard those that its rank loaded.

Moves: nothing; the ranks only compare the shapes of their blocks, and to_global refuses blocks that are no even split.
Run:   ./launch.sh recipes/data_and_state/data_loading.py
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/data_loading.py
Use it when every rank can read the data set. In a graph add drop_last=True: the last batch of an epoch may be smaller.
Source: OneFlow documentation, "Global Tensor"; the doubled data: github.com/Oneflow-Inc/oneflow/issues/9704.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Samples(flow.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        return np.array([number], dtype=np.float32), self.data[number]


def run(device="cpu", seed=0, samples=None, batch=4, features=5):
    """Two epochs; returns the tensors of the table, and the local `data`, all samples, and `mine`, those of a rank."""
    n = flow.env.get_world_size()
    samples = samples or -(-24 // n) * n  # 24, or a few more, so that each rank gets as many
    ranks = flow.placement(device, list(range(n)))
    data = np.random.default_rng(seed).standard_normal((samples, features), dtype=np.float32)
    # the order depends on this seed, not on manual_seed; where n does not divide the samples, some are loaded twice
    sampler = flow.utils.data.distributed.DistributedSampler(Samples(data), seed=seed)
    loader = flow.utils.data.DataLoader(Samples(data), batch_size=batch, sampler=sampler)
    tensors = {"data": flow.tensor(data, device=device)}
    for epoch in (0, 1):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        loaded = []
        for my_numbers, my_x in loader:  # local tensors, (batch, 1) and (batch, features)
            numbers = my_numbers.to(device).to_global(placement=ranks, sbp=flow.sbp.split(0))
            x = my_x.to(device).to_global(placement=ranks, sbp=flow.sbp.split(0))
            loaded.append(numbers.to_local())  # a model would take a step with x here
        mine = flow.cat(loaded)
        tensors[f"order {epoch}"] = mine.to_global(placement=ranks, sbp=flow.sbp.split(0))
    tensors.update({"numbers": numbers, "x": x, "mine": mine})  # the last batch

    # without a sampler every rank reads all samples, and S(0) joins them n times, silently
    every_rank_reads_all = flow.utils.data.DataLoader(Samples(data), batch_size=batch)
    repeated = flow.cat([numbers for numbers, _ in every_rank_reads_all]).to(device)
    return {**tensors, "doubled": repeated.to_global(placement=ranks, sbp=flow.sbp.split(0))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    n = flow.env.get_world_size()
    values = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    orders = [values[f"order {epoch}"].astype(int).reshape(n, -1) for epoch in (0, 1)]  # a row for each rank
    data, x = values["data"], values["x"]
    numbers, doubled = values["numbers"].astype(int).ravel(), values["doubled"].astype(int).ravel()
    if flow.env.get_rank() == 0:
        for rank, (first, second) in enumerate(zip(*orders)):
            print(f"rank {rank} loads in epoch 0 {first}, in epoch 1 {second}")
        print(f"the last batch, x {x.shape} {tensors['x'].sbp[0]}, has samples", *numbers)
        print(f"without a sampler each of the {len(data)} samples is loaded {n} times in an epoch")

    for order in orders:
        np.testing.assert_array_equal(np.sort(order.ravel()), np.arange(len(data)))
    np.testing.assert_array_equal(x, data[numbers])
    np.testing.assert_array_equal(np.bincount(doubled), n)
    if flow.env.get_rank() == 0:
        print(f"together the ranks load each of the {len(data)} samples once in an epoch, and x equals data[numbers]")


if __name__ == "__main__":
    main()
