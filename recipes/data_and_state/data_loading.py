"""Data loading: each rank loads its own samples; to_global makes one batch.

    24 samples          rank 0      rank 1      SBP
    numbers    (8, 1)   rows 0-3    rows 4-7    S(0)
    x          (8, 5)   rows 0-3    rows 4-7    S(0)

Each rank loads local tensors, and to_global in S(0) joins them into one batch for a model with global weights. numbers
says which samples are in x. Every sample is loaded once in an epoch, by one of the ranks. flow.tensor(x, placement=...,
sbp=...) of a whole batch would send it from every rank, because OneFlow compares the copies.

Why:   each rank has its own samples already, so S(0) only says of what they are a part, and nothing is sent.
Moves: nothing but the shapes of the blocks: to_global raises an error if the blocks are not an even split.
Run:   ./launch.sh recipes/data_and_state/data_loading.py
Use it when every rank can read the data set. In a graph add drop_last=True: the last batch of an epoch may be smaller.
Source: OneFlow documentation, "Global Tensor".
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)  # numbers of ranks; launch.sh refuses others


class Samples(flow.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return np.array([index], dtype=np.float32), self.data[index]


def run(ranks, seed=0, epochs=2, samples=None, batch=4, features=5):
    """Load the data for some epochs, `batch` rows at a time on each rank.

    Returns all samples, the numbers of those that this rank loaded in each epoch, and numbers and x of the last batch.
    """
    n = flow.env.get_world_size()
    samples = samples or -(-24 // n) * n  # at least 24, and a multiple of n
    data = np.random.default_rng(seed).standard_normal((samples, features), dtype=np.float32)
    # DistributedSampler gives each rank its own samples; if n does not divide their number, it gives some twice
    sampler = flow.utils.data.distributed.DistributedSampler(Samples(data), seed=seed)
    loader = flow.utils.data.DataLoader(Samples(data), batch_size=batch, sampler=sampler)
    loaded = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        own = []
        for numbers, x in loader:  # local tensors on the CPU, (batch, 1) and (batch, features)
            own.append(numbers.numpy())
            numbers = numbers.to(ranks.type).to_global(placement=ranks, sbp=flow.sbp.split(0))
            x = x.to(ranks.type).to_global(placement=ranks, sbp=flow.sbp.split(0))
            # a model takes a step with x here
        loaded.append(np.concatenate(own))
    return data, loaded, numbers, x


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    ranks = flow.placement.all(args.device)
    data, loaded, numbers, x = run(ranks)
    for epoch, own in enumerate(loaded):
        print(f"epoch {epoch}: samples", *own.astype(int).ravel())
        of_all_ranks = flow.tensor(own, device=args.device).to_global(placement=ranks, sbp=flow.sbp.split(0))
        np.testing.assert_array_equal(np.sort(of_all_ranks.numpy().ravel()), np.arange(len(data)))  # each sample once
    print(f"x {tuple(x.to_local().shape)} of {tuple(x.shape)}")
    samples = numbers.numpy().astype(int).ravel()  # collective: all ranks call it
    np.testing.assert_array_equal(x.numpy(), data[samples])
    if flow.env.get_rank() == 0:
        print("each sample is loaded once in an epoch; x of the last batch has samples", *samples)


if __name__ == "__main__":
    main()
