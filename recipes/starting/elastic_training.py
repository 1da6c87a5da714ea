"""Elastic training: when a rank dies, all restart from the last checkpoint, as under torchrun.

    loss = mean((x @ w - y)^2)    rank 0      rank 1      SBP
    x           (8, 64)           rows 0-3    rows 4-7    S(0)
    y           (8, 64)           rows 0-3    rows 4-7    S(0)
    w           (64, 64)          whole       whole       B
    w grad      (64, 64)          whole       whole       B

OneFlow cannot continue without a rank: when one dies, launch.sh ends all and restarts them. A checkpoint holds weight
and momentum, and the batch depends on the step alone, so the weights become those of a job without a failure: bit for
bit on the same number of ranks, within rounding on a different one. Only steps since the last checkpoint are repeated.

Moves: an all-reduce of w's gradient every step, 2 (n-1)/n x its bytes from each of n ranks; to load, n-1 x the state.
Run:   ./launch.sh recipes/starting/elastic_training.py [--graph]
       ./launch.sh --max-restarts 3 recipes/starting/elastic_training.py --checkpoint-dir checkpoints --die 3
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/starting/elastic_training.py [--graph]
Use it when a job runs longer than the time between two failures. Only rank 0 needs the checkpoints.
Source: PyTorch documentation, torchrun, "Fault-tolerant Distributed Training".
"""

import argparse
import os
import pathlib
import shutil
import signal

import numpy as np
import oneflow as flow

WORLD_SIZES = (2, 1, *range(3, 9))  # numbers of ranks; launch.sh refuses others


class Layer(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x):
        return flow.matmul(x, self.w)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # in a graph this includes the update
        return loss


def split_rows(array, ranks):
    """A global tensor, S(0), from each rank's own rows; flow.tensor would send the whole array, to compare copies."""
    rank, members = flow.env.get_rank(), ranks.ranks.tolist()
    rows = np.array_split(array, len(members))[members.index(rank)] if rank in members else array[:0]
    return flow.tensor(rows, device=ranks.type).to_global(placement=ranks, sbp=flow.sbp.split(0))


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


def checkpoints(checkpoint_dir):
    """The steps of the checkpoints that are there, without an unfinished one."""
    names = [path.name for path in pathlib.Path(checkpoint_dir).glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def remove_older(checkpoint_dir):
    """Remove all checkpoints but the last."""
    if flow.env.get_rank() == 0:
        for older in checkpoints(checkpoint_dir)[:-1]:
            shutil.rmtree(f"{checkpoint_dir}/{older}")


def last_step(checkpoint_dir):
    """The step of the last checkpoint, 0 if there is none. All ranks call it."""
    if not checkpoint_dir:
        return 0
    step = flow.tensor([0, *checkpoints(checkpoint_dir)][-1:])
    flow.comm.broadcast(step, 0)  # the other ranks may not see the directory
    return step.item()


def train(ranks, graph=False, seed=0, steps=4, save_every=2, checkpoint_dir=None, batch=8, features=64):
    """Train up to a step, from the last checkpoint if there is one; returns the model and the loss of each step.

    Without checkpoint_dir nothing is loaded or saved. A graph resumes only what a graph has saved.
    """
    w = np.random.default_rng(seed).standard_normal((features, features), dtype=np.float32)
    model = Layer(w, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    done = last_step(checkpoint_dir)
    if done:
        state = flow.load(f"{checkpoint_dir}/{done}", global_src_rank=0)  # if rank 0 cannot read it, the others hang
        losses = state.pop("losses")
        if graph:
            training.load_state_dict(state)  # before the first call of the graph
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    for step in range(done + 1, steps + 1):
        rng = np.random.default_rng([seed, step])  # a job that resumes draws what it would have drawn anyway
        x = split_rows(rng.standard_normal((batch, features), dtype=np.float32), ranks)
        y = split_rows(rng.standard_normal((batch, features), dtype=np.float32), ranks)
        if graph:
            loss = training(x, y)
        else:
            loss = flow.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())  # collective: all ranks call it
        if checkpoint_dir and step % save_every == 0:
            if graph:
                state = training.state_dict()
            else:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "losses": losses}, checkpoint_dir, step)
            remove_older(checkpoint_dir)
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=2, help="save a checkpoint after every so many steps")
    parser.add_argument("--checkpoint-dir", help="where the checkpoints are, to resume from the last one")
    parser.add_argument("--die", type=int, default=0, metavar="STEP", help="kill the last rank after this step, once")
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

    rank, ranks = flow.env.get_rank(), flow.placement.all(args.device)
    options = {"save_every": args.save_every, "checkpoint_dir": args.checkpoint_dir}
    done = last_step(args.checkpoint_dir)
    if rank == 0:
        print(f"resumes after step {done}, from its checkpoint" if done else "starts with step 1: no checkpoint")
    if args.die and not done:  # once: not in the job that resumes
        train(ranks, args.graph, steps=args.die, **options)
        flow.comm.barrier()  # rank 0 may still be saving this step, and launch.sh ends it when a rank dies
        if rank == flow.env.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    model, losses = train(ranks, args.graph, steps=args.steps, **options)
    print(f"w {tuple(model.w.to_local().shape)} of {tuple(model.w.shape)}")
    one_device = flow.placement(args.device, [0])
    _, alone = train(one_device, args.graph, steps=len(losses))  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        begin = min(done + 1, len(losses))
        print(f"loss {losses[begin - 1]:.4f} in step {begin} -> {losses[-1]:.4f} in step {len(losses)}")
        print("all losses equal those of a single device that was not disturbed")


if __name__ == "__main__":
    main()
