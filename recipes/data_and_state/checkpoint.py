"""Checkpoint: save once, load on any ranks in any SBP.

    loss = mean((x @ w - y)^2)      rank 0       rank 1        SBP
    x                   (64, 64)    rows 0-31    rows 32-63    S(0)
    y                   (64, 64)    rows 0-31    rows 32-63    S(0)
    w                   (64, 64)    rows 0-31    rows 32-63    S(0)

Rank 0 alone writes and reads the files, which hold whole tensors: w and its momentum load into any layout. To load, it
needs memory for all of them at once. Here half of the ranks train with a whole w and save; then all ranks load, with w
split as in the table, and train on.

Moves: to save, an all-gather of each split tensor, (n-1)/n of it from each of n ranks; to load, n-1 times each tensor,
       from all ranks together. S(1) adds an all-to-all to both.
Run:   ./launch.sh recipes/data_and_state/checkpoint.py [--graph] [--weights columns] [--checkpoint-dir DIRECTORY]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/data_and_state/checkpoint.py [--graph]
Use it in every run that must outlive its job: with --checkpoint-dir and more --steps the next job resumes from there.
Source: OneFlow documentation, oneflow.save and oneflow.load.
"""

import argparse
import os
import pathlib
import shutil
import tempfile

import numpy as np
import oneflow as flow

WORLD_SIZES = (2, 1, *range(3, 65))  # numbers of ranks; launch.sh refuses others
SBPS = {"rows": flow.sbp.split(0), "columns": flow.sbp.split(1), "whole": flow.sbp.broadcast}


class Layer(flow.nn.Module):
    def __init__(self, w, ranks, sbp):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=sbp))

    def forward(self, x):
        w = flow._C.identity(self.w)  # without it a graph that gathers the parameter itself aborts
        return flow.matmul(x, w.to_global(sbp=flow.sbp.broadcast))


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the update
        return loss


def save(state, checkpoint_dir, step):
    """Save a checkpoint, named by its step; OSError if there is one of that name. All ranks call it."""
    unfinished = pathlib.Path(checkpoint_dir, "unfinished")
    if flow.env.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # a crash may have left one
    flow.save(state, unfinished, global_dst_rank=0)  # gathers each tensor on rank 0, which alone writes
    if flow.env.get_rank() == 0:
        for path in [*unfinished.rglob("*"), unfinished]:
            fsync(path)  # everything is on disk before it gets its name
        os.replace(unfinished, unfinished.with_name(str(step)))
        fsync(checkpoint_dir)  # the name is on disk before an older checkpoint may be removed


def fsync(path):
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_latest(checkpoint_dir):
    """The step of the newest checkpoint and its state, or (0, None) if there is none. All ranks call it."""
    names = [path.name for path in pathlib.Path(checkpoint_dir).glob("*")]
    steps = [int(name) for name in names if name.isdecimal()]  # without the unfinished one
    latest = flow.tensor([max(steps, default=0)])
    flow.comm.broadcast(latest, 0)  # the other ranks may not see the directory
    step = latest.item()
    if step == 0:
        return 0, None
    return step, flow.load(f"{checkpoint_dir}/{step}", global_src_rank=0)  # if rank 0 cannot read it, the others hang


def train(ranks, graph=False, seed=0, steps=4, weights="rows", checkpoint_dir=None, save_every=2, size=64):
    """Train up to a step, from the newest checkpoint if there is one; returns the model and the loss of each step.

    x, y and w are (size, size), in float32. Without checkpoint_dir nothing is loaded or saved. A graph can resume only
    from a checkpoint that a graph has saved, and eager mode from one of eager mode.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, size), dtype=np.float32)
    y = rng.standard_normal((size, size), dtype=np.float32)
    w = rng.standard_normal((size, size), dtype=np.float32)

    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    model = Layer(w, ranks, SBPS[weights])
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    done, state = load_latest(checkpoint_dir) if checkpoint_dir else (0, None)
    if done:
        losses = state.pop("losses")
        if graph:
            training.load_state_dict(state)  # before the first call of the graph
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    for step in range(done + 1, steps + 1):
        if graph:
            loss = training(x, y)
        else:
            loss = flow.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())  # collective: all ranks call it
        if checkpoint_dir and (step % save_every == 0 or step == steps):
            if graph:
                state = training.state_dict()
            else:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "losses": losses}, checkpoint_dir, step)
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="train up to this step")
    parser.add_argument("--weights", choices=SBPS, default="rows", help="how w is split after loading")
    parser.add_argument("--checkpoint-dir", help="resume from the newest checkpoint in it, and keep the new ones")
    parser.add_argument("--save-every", type=int, default=2, help="save a checkpoint after every so many steps")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: 1 or more")
    if args.save_every < 1:
        parser.error(f"--save-every {args.save_every}: 1 or more")
    try:
        if args.checkpoint_dir is not None:
            os.makedirs(args.checkpoint_dir, exist_ok=True)
    except OSError as error:
        parser.error(str(error))

    half = flow.placement(args.device, list(range(max(1, flow.env.get_world_size() // 2))))
    everyone = flow.placement.all(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        options = {"checkpoint_dir": args.checkpoint_dir or temporary, "save_every": args.save_every}
        saved, _ = train(half, args.graph, steps=args.steps // 2, weights="whole", **options)
        loaded, losses = train(everyone, args.graph, steps=args.steps, weights=args.weights, **options)
    for name, model in {"saved": saved, "loaded": loaded}.items():
        print(f"{name} w {tuple(model.w.to_local().shape)} of {tuple(model.w.shape)}")
    one = flow.placement(args.device, [0])
    _, alone = train(one, args.graph, steps=len(losses))  # the same code on a single device, in one run
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as in one run on a single device")


if __name__ == "__main__":
    main()
