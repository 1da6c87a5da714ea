"""One matmul in three layouts, with PyTorch's DTensor: the program of README.md.

    out = x @ w       x              w              out
    data parallel     Shard(0)       Replicate()    Shard(0)
    columns           Replicate()    Shard(1)       Shard(1)
    rows              Shard(1)       Shard(0)       Partial(), which redistribute makes Replicate()

Moves:   nothing, but for rows one all-reduce of out.
Run:     torchrun --nproc_per_node 2 docs/rosetta/pytorch/matmul_layouts.py
On GPUs: DEVICE = "cuda", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, which
         then takes NCCL.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

DEVICE = "cpu"
LAYOUTS = {
    "data": (Shard(0), Replicate(), Shard(0)),
    "columns": (Replicate(), Shard(1), Shard(1)),
    "rows": (Shard(1), Shard(0), Partial()),
}


def run(mesh, layout, x, w):
    """x @ w in one of the layouts; x and w are whole on each rank. Returns a DTensor."""
    x_placement, w_placement, out_placement = LAYOUTS[layout]
    x = distribute_tensor(x, mesh, [x_placement])
    w = distribute_tensor(w, mesh, [w_placement])
    out = x @ w
    assert out.placements == (out_placement,)  # PyTorch infers it
    return out


def main():
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    x = torch.tensor([[1.0, 2.0], [3.0, 1.0]], device=DEVICE)
    w = torch.tensor([[2.0, 0.0, 1.0], [1.0, 3.0, 2.0]], device=DEVICE)
    for layout in LAYOUTS:
        out = run(mesh, layout, x, w)
        print(f"[{mesh.get_rank()}] {out.placements[0]} {out.to_local().tolist()}")
    out = out.redistribute(placements=[Replicate()])
    print(f"[{mesh.get_rank()}] all-reduce {out.to_local().tolist()}")
    torch.testing.assert_close(out.to_local(), x @ w)


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
