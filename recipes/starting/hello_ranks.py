"""Hello, ranks: print what each rank knows, to see whether it started correctly.

    (rank, local rank, host)     rank 0      rank 1      SBP
    mine        (2, 3)           row 0       row 1       S(0)
    everyone    (2, 3)           whole       whole       B

The rank counts from 0 to n-1 over the whole job, and a placement is a list of ranks. The local rank counts on one host:
it selects the rank's GPU. The host is given by its IPv4 address, as a number; links between hosts are slower.

Trap:  OneFlow believes LOCAL_RANK: if two ranks of one host have the same, shards are empty and sums wrong, silently.
       Two jobs that start on the same port may swap ranks, also silently: then the ranks of one launcher print
       different process numbers after "started by".
Why:   most first jobs fail in the start: a rank is missing, or two believe that they are the same.
Moves: an all-gather, (n-1)/n x the bytes of everyone from each of n ranks.
Run:   ./launch.sh recipes/starting/hello_ranks.py
Use it first on every new cluster: it shows whether each rank is there, once, and on which host.
Source: OneFlow documentation, "Launching distributed training" and oneflow.env.
"""

import argparse
import os
import socket
import sys

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)  # numbers of ranks; launch.sh refuses others


def own_address():
    """The address from which this host reaches rank 0; OneFlow tells hosts apart by it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
        return probe.getsockname()[0]


def check_shard(device):
    """End the job if this rank holds the shard of a different rank."""
    rank, n = flow.env.get_rank(), flow.env.get_world_size()
    ranks = flow.tensor(np.arange(n), placement=flow.placement.all(device), sbp=flow.sbp.split(0))
    shard = ranks.to_local().numpy().tolist()
    if shard != [rank]:
        print(f"rank {rank} holds {shard} in place of [{rank}]: unset LOCAL_RANK", file=sys.stderr, flush=True)
        os._exit(1)  # sys.exit would wait for the other ranks, which wait for this one


def run(ranks):
    """Each rank gives a row of (rank, local rank, host); returns the rows of all, split and whole."""
    host = int.from_bytes(socket.inet_aton(own_address()), "big")
    row = flow.tensor([[flow.env.get_rank(), flow.env.get_local_rank(), host]], device=ranks.type)
    mine = row.to_global(placement=ranks, sbp=flow.sbp.split(0))  # the rows of all ranks, stacked
    everyone = mine.to_global(sbp=flow.sbp.broadcast)
    return mine, everyone


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    check_shard(args.device)
    rank, n = flow.env.get_rank(), flow.env.get_world_size()
    mine, everyone = run(flow.placement.all(args.device))
    everyone = everyone.numpy()
    _, local_rank, host = everyone[rank].tolist()
    hosts = list(dict.fromkeys(everyone[:, 2].tolist()))  # each once, in the order of their first ranks
    address, device = socket.inet_ntoa(host.to_bytes(4, "big")), mine.to_local().device
    where = f"local rank {local_rank} on host {hosts.index(host)} ({socket.gethostname()}, {address})"
    print(f"rank {rank} of {n}: {where}, {device}, started by process {os.getppid()}", flush=True)
    np.testing.assert_array_equal(everyone[:, 0], np.arange(n))
    if rank == 0:
        print(f"all {n} ranks are there, once each; number of hosts: {len(hosts)}")


if __name__ == "__main__":
    main()
