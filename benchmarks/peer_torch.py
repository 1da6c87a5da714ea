"""A rank of PyTorch: reads orders from standard input, a line of JSON each, and answers each with a line of JSON.

Started by peers.py, in the environment of requirements-peers.txt.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peer_gpt_torch import train_gpt
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "harness")]
from oneflow_cookbook.start import recipe  # noqa: E402

N = int(os.environ["WORLD_SIZE"])


@functools.cache  # a new mesh would make new process groups
def mesh_of(*axes):
    return init_device_mesh("cpu", (N,) if len(axes) == 1 else (2, N // 2), mesh_dim_names=axes)


def train_twin(file, axes, schedule=None, **arguments):
    """Train a twin of docs/rosetta/pytorch: {"losses", "seconds" of each step but the first}."""
    twin = recipe.load(file)
    if schedule:  # in place of the one that the pipeline's twin names; all take the same arguments
        twin.Schedule1F1B = getattr(pipelining, schedule)
    ends = []
    hook = register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    _, losses = twin.train(mesh_of(*axes), **arguments)
    hook.remove()
    return {"losses": losses, "seconds": differences(ends)}


def differences(times):
    return [end - begin for begin, end in zip(times, times[1:])]


def main():
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    functions = {function.__name__: function for function in (train_twin, train_gpt)}
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(functions[order.pop("function")](**order)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
