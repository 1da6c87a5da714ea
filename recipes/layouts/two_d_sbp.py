"""2-D SBP: one mesh axis splits the batch, the other the weight.

    mesh [[0, 1], [2, 3]]    rank 0         rank 1         rank 2         rank 3         SBP
    x          (4, 4)        rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B
    w          (4, 8)        columns 0-3    columns 4-7    columns 0-3    columns 4-7    B, S(1)
    out        (4, 8)        0-1, 0-3       0-1, 4-7       2-3, 0-3       2-3, 4-7       S(0), S(1)
    partial    (8, 4)        rows 0-3       rows 4-7       rows 0-3       rows 4-7       P, S(0)
    gathered   (4, 8)        rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B
    reduced    (8, 4)        rows 0-3       rows 4-7       rows 0-3       rows 4-7       B, S(0)
    scattered  (8, 4)        0-3, 0-1       4-7, 0-1       0-3, 2-3       4-7, 2-3       S(1), S(0)
    swapped    (4, 4)        rows 0-1       rows 0-1       rows 2-3       rows 2-3       S(0), B

Moves: nothing for out and partial. Each rank sends out/4 for gathered, an all-gather along axis 1; partial/2 for
       reduced, an all-reduce along axis 0; partial/4 for scattered, a reduce-scatter along axis 0. Eager mode sends
       half as much again for gathered and for scattered, as for every S(1) -> B and P -> S(1).
Run:   ./launch.sh recipes/layouts/two_d_sbp.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/layouts/two_d_sbp.py [--graph]
Use it where the batch alone cannot feed all ranks: few ranks with fast links split the weight, the others the batch.
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4,)


class Layer(flow.nn.Module):
    def __init__(self, w, mesh):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(1))))

    def forward(self, x):
        out = flow.matmul(x, self.w)
        # as in the gradient of a weight: the batch is split along axis 0, so the product is a partial sum there
        partial = flow.matmul(out.transpose(0, 1), x)
        gathered = out.to_global(sbp=(flow.sbp.split(0), flow.sbp.broadcast))
        reduced = partial.to_global(sbp=(flow.sbp.broadcast, flow.sbp.split(0)))
        scattered = partial.to_global(sbp=(flow.sbp.split(1), flow.sbp.split(0)))
        return {"out": out, "partial": partial, "gathered": gathered, "reduced": reduced, "scattered": scattered}


class LayerGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, x):
        return self.module(x)


def run(graph=False, device="cpu", seed=0, batch=4, in_features=4, out_features=8):
    """One forward pass; returns by name x (batch, in), w (in, out), what Layer makes of them, and swapped, x again."""
    rng = np.random.default_rng(seed)  # a graph needs sizes that 4 divides: with others OneFlow 0.9.0 hangs or aborts
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    mesh = flow.placement(device, [[0, 1], [2, 3]])
    # OneFlow 0.9.0 sorts the ranks of a placement, silently: swapped lies as on mesh (OneFlow issue 9727)
    order = flow.placement(device, [[0, 3], [1, 2]])
    swapped = flow.tensor(x, placement=order, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    x = flow.tensor(x, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    module = Layer(w, mesh)
    model = LayerGraph(module) if graph else module
    return {"x": x, "w": module.w, **model(x), "swapped": swapped}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name, tensor in tensors.items():  # a row for each rank: the shape of what it holds
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            sbp = ", ".join(str(one).replace("oneflow.sbp.", "") for one in tensor.sbp)
            print(f"{name:11}{str(tuple(tensor.shape)):8}{sbp:30}local shapes", *map(tuple, held.tolist()))
    notes = {"partial": "parts", "reduced": "ranks 0 + 2, 1 + 3", "swapped": "row 0 is on ranks 0, 1, not on 0, 3"}
    for name, note in notes.items():
        first = flow.tensor([tensors[name].to_local()[0, 0].item()]).to_global(placement=ranks, sbp=flow.sbp.split(0))
        first = " ".join(f"{number:5.2f}" for number in first.numpy())
        if flow.env.get_rank() == 0:
            print(f"{name:11}first number on each rank {first}  {note}")

    values = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    out = values["x"] @ values["w"]
    expected = {"out": out, "gathered": out, **dict.fromkeys(("partial", "reduced", "scattered"), out.T @ values["x"])}
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    if flow.env.get_rank() == 0:
        print("out equals x @ w, partial and what comes from it equal out.T @ x on a single device")


if __name__ == "__main__":
    main()
