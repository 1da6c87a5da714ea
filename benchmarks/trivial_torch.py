"""The same job as trivial_oneflow.py in PyTorch, on gloo."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.full((1,), float(dist.get_rank() == 0))
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(total.numpy())
dist.destroy_process_group()
