"""Rendezvous: ranks meet by environment variables, a TCP address or a file.

    sum of all ranks    rank 0          rank 1          SBP
    number     (2, 1)   row 0           row 1           S(0)
    partial    (1, 1)   of its rows     of its rows     P
    sum        (1, 1)   whole           whole           B

OneFlow reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK when it is imported, so each way ends with these variables:
    --meet env://                  a launcher has set all four
    --meet tcp://10.0.0.1:29400    an address of rank 0's host, and a port that is free there
    --meet file:///shared/job-17   rank 0 writes its address into this file, and the others read it

Moves: an all-reduce of one number, 2 (n-1)/n x its bytes from each of n ranks.
Run:   ./launch.sh recipes/starting/rendezvous.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/starting/rendezvous.py [--graph]
       WORLD_SIZE=2 RANK=0 python recipes/starting/rendezvous.py --meet file:///shared/job-17      (then RANK=1)
Use it where nobody knows beforehand on which host rank 0 starts. Else use a launcher, which sets all four.
Source: OneFlow documentation, "Launching distributed training"; PyTorch's init_process_group has the same three ways.
"""

import argparse
import os
import socket
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--meet", default="env://", help="env://, tcp://HOST:PORT or file:///PATH")
    return parser.parse_args()


def meet_by_env(nothing):
    """All four variables are there."""


def meet_by_tcp(address):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.split(":")


def meet_by_file(path):
    if os.environ["RANK"] == "0":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out, socket.socket() as free:
            way_out.connect(("192.0.2.1", 1))  # sends nothing: the address that other hosts reach this one by
            free.bind(("", 0))  # any free port
            address = f"{way_out.getsockname()[0]}:{free.getsockname()[1]}"
        with open(f"{path}.unfinished", "w") as file:
            file.write(address)
        os.replace(f"{path}.unfinished", path)  # so that nobody reads half an address
    deadline = time.monotonic() + 60
    while not os.path.exists(path):  # give each job a path of its own: a file of an earlier job leads nowhere
        if time.monotonic() > deadline:
            sys.exit(f"rank {os.environ['RANK']} waited 60 seconds for rank 0 to write {path}")
        time.sleep(1)
    with open(path) as file:
        meet_by_tcp(file.read())


if __name__ == "__main__":
    way, place = arguments().meet.split("://")
    {"env": meet_by_env, "tcp": meet_by_tcp, "file": meet_by_file}[way](place)

import numpy as np
import oneflow as flow  # only now: all ranks meet during this import

WORLD_SIZES = range(2, 65)


class Count(flow.nn.Module):
    def forward(self, number):
        partial = number.sum(0, keepdim=True)  # of this rank's rows: P
        return partial, partial.to_global(sbp=flow.sbp.broadcast)


class CountGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, number):
        return self.module(number)


def run(graph=False, device="cpu"):
    """Each rank gives its number; returns by name number (n, 1), partial and sum (1, 1)."""
    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    number = flow.tensor([[float(flow.env.get_rank())]], device=device)
    number = number.to_global(placement=ranks, sbp=flow.sbp.split(0))  # the rows of all ranks, one below the other
    module = Count()
    model = CountGraph(module) if graph else module
    partial, total = model(number)
    return {"number": number, "partial": partial, "sum": total}


def main():
    args = arguments()
    tensors = run(args.graph, args.device)

    way, path = args.meet.split("://")
    if way == "file" and flow.env.get_rank() == 0:
        os.remove(path)  # all have read it
    number, total = (tensors[name].numpy() for name in ("number", "sum"))  # collective: all ranks call it
    np.testing.assert_array_equal(number[:, 0], np.arange(len(number)))
    np.testing.assert_array_equal(total, number.sum(0, keepdims=True))
    if flow.env.get_rank() == 0:
        leader = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"{len(number)} ranks met by {args.meet}; rank 0 is at {leader}")
        print(f"the sum over ranks is {total[0, 0]:.0f}, as on a single device:", *number[:, 0].astype(int))


if __name__ == "__main__":
    main()
