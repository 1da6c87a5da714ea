"""Spawn: start ranks from an ordinary Python program, with multiprocessing, and get their results.

    in the program
    x      (4, 5)     whole, a numpy array
    w      (5, 8)     whole, a numpy array
    out    (4, 8)     whole, a numpy array

The program is not a rank of its job. The ranks multiply in data parallel, x S(0) @ w B = out S(0), and each returns its
shard of out. Each rank is a new process that imports this file, and with it OneFlow, which waits for the other ranks:
so MASTER_ADDR, RANK and the like must be set before the process starts.

Why:   a test or a service has a main program of its own, which waits for results and cannot wait for other ranks.
Moves: nothing, 0 bytes between ranks; x and w to each rank, and its shard of out back, through pipes.
Run:   ./launch.sh recipes/starting/spawn.py [--graph]
       python recipes/starting/spawn.py [--graph] [--ranks 4]
Use it when a program needs ranks only for a while, such as a test or a service; for a job, use a launcher.
Source: Python documentation, multiprocessing, "Contexts and start methods".
"""

import argparse
import multiprocessing.connection
import os
import signal
import socket
import sys
import time

import numpy as np
import oneflow as flow

WORLD_SIZES = (1,)  # numbers of ranks; launch.sh refuses others


class Layer(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        return flow.matmul(x, self.w)


class LayerGraph(flow.nn.Graph):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, x):
        return self.layer(x)


def multiply(x, w, graph, device):
    """On each rank: its shard of out."""
    ranks = flow.placement.all(device)
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    layer = Layer(w, ranks)
    model = LayerGraph(layer) if graph else layer
    out = model(x)
    return out.to_local().detach().numpy()


def rank_main(pipe):
    try:
        pipe.send("ready")
        pipe.send(multiply(*pipe.recv()))
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
        os._exit(1)  # sys.exit would wait for the other ranks, which wait for this one


def start_rank(rank, n, address, port):
    """Returns the process of a new rank, and our end of its pipe."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(n), RANK=str(rank))
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ.update(no_grpc_proxy=",")  # else the ranks connect through http_proxy, if it is set
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=rank_main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the pipe ends when the rank does
    return process, ours


def wait_until_listening(process, address, port):
    while process.is_alive():
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                return
        time.sleep(0.05)


def receive(processes, pipes):
    """One message from each rank. Raises RuntimeError if a rank dies."""
    received = {}
    while len(received) < len(pipes):
        for pipe in multiprocessing.connection.wait([pipe for pipe in pipes if pipe not in received]):
            try:
                received[pipe] = pipe.recv()
            except (EOFError, OSError):
                rank = pipes.index(pipe)
                processes[rank].join()
                code = processes[rank].exitcode  # -N: killed by signal N
                raise RuntimeError(f"rank {rank} of {len(pipes)} died: exit code {code}") from None
    return [received[pipe] for pipe in pipes]


def reserve_port():
    """A socket that keeps a free port from other jobs; OneFlow, which sets the same option, may still bind it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def on_ranks(n, *arguments):
    """Start n ranks, let each multiply, and return what they return. One call at a time: it changes os.environ."""
    processes, pipes, environment = [], [], dict(os.environ)
    with reserve_port() as reserved:
        address, port = reserved.getsockname()
        try:
            for rank in range(n):
                process, pipe = start_rank(rank, n, address, port)
                processes.append(process)
                pipes.append(pipe)
                if rank == 0 and n > 1:
                    wait_until_listening(process, address, port)  # a rank that starts too early sleeps for 10 s
            receive(processes, pipes)  # all are ready
            for pipe in pipes:
                pipe.send(arguments)  # not as args of Process: more than 64 KB would fill its pipe and block the start
            results = receive(processes, pipes)
            for process in processes:
                process.join()
            return results
        finally:
            for process in processes:
                process.kill()
            os.environ.clear()
            os.environ.update(environment)


def run(ranks=2, graph=False, device="cpu", seed=0, batch=4, in_features=5, out_features=8):
    """One forward pass in float32 on ranks of its own; returns x, w, out, and the shard of out that each rank had."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    shards = on_ranks(ranks, x, w, graph, device)
    out = np.concatenate(shards)
    return x, w, out, shards


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the layer inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks to start")
    args = parser.parse_args()
    if not 1 <= args.ranks <= 4:
        parser.error(f"--ranks {args.ranks}: 1 to 4, a row of x for each rank")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that on_ranks still kills its ranks, in `finally`

    x, w, out, shards = run(args.ranks, args.graph, args.device)
    for rank, shard in enumerate(shards):
        print(f"rank {rank} of {args.ranks} returned {shard.shape} of {out.shape}")
    np.testing.assert_allclose(out, x @ w, rtol=1e-5, atol=1e-6)
    print("out equals x @ w on a single device")


if __name__ == "__main__":
    main()
