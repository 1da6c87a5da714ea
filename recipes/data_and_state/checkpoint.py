"""Checkpoint: save once, load on any ranks in any SBP.

    loss = mean((x @ w - y)^2)    rank 0       rank 1        SBP
    w                 (64, 64)    whole        whole         B
    saved w           (64, 64)    whole        nothing       B
    saved momentum    (64, 64)    whole        nothing       B
    loaded w          (64, 64)    whole        nothing       B
    new w             (64, 64)    rows 0-31    rows 32-63    S(0)
    new momentum      (64, 64)    rows 0-31    rows 32-63    S(0)

Half of the ranks train and save. Then all ranks load, with w split, and train on. With --folder the checkpoints stay,
and the next run goes on from the newest, on any number of ranks.

Moves: to save, (n-1)/n of each split tensor to rank 0; to load, n-1 times each tensor, from all ranks together.
       S(1) adds an all-to-all to both.
Run:   ./launch.sh recipes/data_and_state/checkpoint.py [--graph] [--weights rows|columns|whole] [--folder FOLDER]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/checkpoint.py [--graph]
Use it in every run that must outlive its job. Only rank 0 reads and writes files.
Source: OneFlow documentation, oneflow.save and oneflow.load.
"""

import argparse
import os
import pathlib
import shutil
import tempfile

import numpy as np
import oneflow as flow

WORLD_SIZES = (2, 1, *range(3, 65))
SBPS = {"rows": flow.sbp.split(0), "columns": flow.sbp.split(1), "whole": flow.sbp.broadcast}


class Network(flow.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = flow.nn.Parameter(w.clone())

    def forward(self, x, y):
        w = flow._C.identity(self.w)  # without it a graph that gathers the parameter itself aborts: register.cpp:75
        return flow.nn.functional.mse_loss(flow.matmul(x, w.to_global(sbp=flow.sbp.broadcast)), y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        return loss


def save(state, folder, step):
    """Put a checkpoint into the folder, named by its step. All ranks call it."""
    unfinished = pathlib.Path(folder, "unfinished")
    if flow.env.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # a crash may have left one
    flow.save(state, unfinished, global_dst_rank=0)  # gathers each tensor on rank 0, which alone writes
    if flow.env.get_rank() == 0:
        for path in [*unfinished.rglob("*"), unfinished]:
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # everything is on the disk before it gets its name
            os.close(file)
        os.replace(unfinished, unfinished.with_name(str(step)))
    flow.comm.barrier()  # no rank goes on before it is there


def train(x, y, w, steps, folder, graph):
    """Go on from the newest checkpoint in the folder, if there is one, and save the next. All ranks call it."""
    module = Network(w)
    optimizer = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = TrainingGraph(module, optimizer) if graph else module
    losses, loaded = [], {}
    names = [path.name for path in pathlib.Path(folder).glob("*")]
    step = flow.tensor([max((int(name) for name in names if name.isdecimal()), default=0)])
    flow.comm.broadcast(step, 0)  # the other ranks may not see the folder
    if step.item():
        state = flow.load(f"{folder}/{step.item()}", global_src_rank=0)  # if this fails there, other ranks wait forever
        losses, loaded = state.pop("losses"), {"loaded w": state["module"]["w"].clone()}
        if graph:
            model.load_state_dict(state)  # before the first call of the graph
        else:
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])
    for _ in range(steps):
        if graph:
            loss = model(x, y)
        else:
            optimizer.zero_grad(set_to_none=True)
            loss = model(x, y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())  # collective
    state = model.state_dict() if graph else {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    save({**state, "losses": losses}, folder, step=len(losses))
    momentum = state["module.w-momentum"] if graph else state["optimizer"]["state"][0]["momentum_buf"]
    losses = flow.tensor(losses, placement=x.placement, sbp=flow.sbp.broadcast)
    return {**loaded, "new w": module.w, "new momentum": momentum, "losses": losses}


def run(
    graph=False, device="cpu", seed=0, steps=2, weights="rows", folder=None, batch=64, in_features=64, out_features=64
):
    """Train, save, load and train on, twice `steps` steps; returns the tensors of the table, x, y, and all losses."""
    rng, n = np.random.default_rng(seed), flow.env.get_world_size()
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w = rng.standard_normal((in_features, out_features), dtype=np.float32)

    half, ranks = (flow.placement(device, list(range(size))) for size in (max(1, n // 2), n))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    w = flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast)
    with tempfile.TemporaryDirectory() as temporary:
        saved = train(*(tensor.to_global(placement=half) for tensor in (x, y, w)), steps, folder or temporary, graph)
        new = train(x, y, w.to_global(sbp=SBPS[weights]), steps, folder or temporary, graph)
    return {"x": x, "y": y, "w": w, "saved w": saved["new w"], "saved momentum": saved["new momentum"], **new}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--weights", choices=SBPS, default="rows", help="how w is split after loading")
    parser.add_argument("--folder", help="go on from the checkpoint in it, and keep the new ones")
    tensors = run(**vars(parser.parse_args()))

    x, y, w = (tensors[name].numpy() for name in ("x", "y", "w"))  # collective: all ranks call it
    losses, momentum = tensors["losses"].numpy(), 0
    for loss in losses:  # all steps without a break on a single device
        error = x @ w - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-4)
        momentum = 0.9 * momentum + 2 / error.size * x.T @ error
        w = w - 0.1 * momentum
    np.testing.assert_allclose(tensors["new w"].numpy(), w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tensors["new momentum"].numpy(), momentum, rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        for name in ("saved w", "saved momentum", "loaded w", "new w", "new momentum"):
            print(f"{name:16}{tensors[name].sbp[0]!s:26}on ranks", *tensors[name].placement.ranks)
        moved = f"| saved on {tensors['saved w'].placement.ranks.size}, loaded on {flow.env.get_world_size()} ranks |"
        print("loss", *losses[-4:-2].round(4), moved, *losses[-2:].round(4))
        print(f"loss, w and momentum equal those of {len(losses)} steps without a break on a single device")


if __name__ == "__main__":
    main()
