"""Rendezvous: ranks find each other by environment variables, a TCP address or a shared file.

    sum of all ranks    rank 0          rank 1          SBP
    number     (2, 1)   row 0           row 1           S(0)
    partial    (1, 1)   of its rows     of its rows     P
    total      (1, 1)   whole           whole           B

OneFlow reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK when it is imported, so each way ends with these variables:
    --init-method env://                  a launcher has set all four
    --init-method tcp://10.0.0.1:29400    an address of rank 0's host, and a port that is free there
    --init-method file:///shared/job-17   rank 0 writes its address into this file, and the others read it

Why:   all ranks must know one address before OneFlow can connect them, and somebody has to choose it.
Moves: an all-reduce of one number, 2 (n-1)/n x its bytes from each of n ranks.
Run:   ./launch.sh recipes/starting/rendezvous.py
       WORLD_SIZE=2 RANK=0 python recipes/starting/rendezvous.py --init-method file:///shared/job-17   (and with RANK=1)
Use it when rank 0's host is not known in advance. Otherwise use a launcher, which sets all four.
Source: OneFlow, "Launching distributed training"; PyTorch, init_process_group, whose init_method these are.
"""

import argparse
import os
import socket
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--init-method", default="env://", help="env://, tcp://HOST:PORT or file:///PATH")
    args = parser.parse_args()
    if not args.init_method.startswith(("env://", "tcp://", "file://")):
        parser.error(f"--init-method {args.init_method}: it begins with env://, tcp:// or file://")
    needed = ["WORLD_SIZE", "RANK"] + ["MASTER_ADDR", "MASTER_PORT"] * args.init_method.startswith("env://")
    missing = [name for name in needed if name not in os.environ]
    if missing:  # OneFlow would start a job of one rank in each process
        parser.error(f"--init-method {args.init_method}: set {', '.join(missing)}, or use a launcher")
    return args


def init_by_env(nothing):
    """A launcher has set all four variables."""


def init_by_tcp(address):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.split(":")


def init_by_file(path):
    if os.environ["RANK"] == "0":
        with open(f"{path}.unfinished", "w", encoding="utf-8") as file:
            file.write(free_address())
        os.replace(f"{path}.unfinished", path)  # so that no rank reads half an address
    deadline = time.monotonic() + 60
    while not os.path.exists(path):  # give each job a path of its own: the file of an earlier job has an old address
        if time.monotonic() > deadline:
            sys.exit(f"rank {os.environ['RANK']} waited 60 seconds for rank 0 to write {path}")
        time.sleep(1)
    with open(path, encoding="utf-8") as file:
        init_by_tcp(file.read())


def free_address():
    """The address by which other hosts reach this one, and a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, socket.socket() as free:
        probe.connect(("192.0.2.1", 1))  # sends nothing
        free.bind(("", 0))  # any free port
        return f"{probe.getsockname()[0]}:{free.getsockname()[1]}"


if __name__ == "__main__":
    os.environ.setdefault("no_grpc_proxy", ",")  # else the ranks connect through http_proxy, if it is set
    scheme, place = arguments().init_method.split("://")
    {"env": init_by_env, "tcp": init_by_tcp, "file": init_by_file}[scheme](place)

import numpy as np
import oneflow as flow  # only now: all ranks meet during this import

WORLD_SIZES = range(2, 65)  # numbers of ranks; launch.sh refuses others


def run(ranks):
    """Each rank gives its number; returns the numbers (n, 1) and their sum (1, 1)."""
    number = flow.tensor([[float(flow.env.get_rank())]], device=ranks.type)
    number = number.to_global(placement=ranks, sbp=flow.sbp.split(0))  # the rows of all ranks, stacked
    partial = number.sum(0, keepdim=True)  # of this rank's rows: P
    total = partial.to_global(sbp=flow.sbp.broadcast)
    return number, total


def main():
    args = arguments()
    number, total = run(flow.placement.all(args.device))
    number, total = number.numpy(), total.numpy()  # collective: all ranks call it

    scheme, path = args.init_method.split("://")
    if scheme == "file" and flow.env.get_rank() == 0:
        os.remove(path)  # all have read it
    np.testing.assert_array_equal(number[:, 0], np.arange(len(number)))
    np.testing.assert_array_equal(total, [[np.arange(len(number)).sum()]])
    if flow.env.get_rank() == 0:
        leader = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"{len(number)} ranks met by {args.init_method}; rank 0 is at {leader}")
        print(f"the sum over ranks is {total[0, 0]:.0f}, as in numpy:", *number[:, 0].astype(int))


if __name__ == "__main__":
    main()
