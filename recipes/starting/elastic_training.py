"""Elastic training: when a rank dies, all restart from the last checkpoint, as under torchrun.

    loss = mean((x @ w - y)^2)    rank 0      rank 1      SBP
    x           (8, 64)           rows 0-3    rows 4-7    S(0)
    y           (8, 64)           rows 0-3    rows 4-7    S(0)
    w           (64, 64)          whole       whole       B
    w grad      (64, 64)          whole       whole       B

OneFlow cannot continue without a rank: when one dies, launch.sh ends all and restarts them. A checkpoint holds weight
and momentum, and the batch depends on the step alone, so the weights become those of a job without a failure: bit for
bit on the same number of ranks, within rounding on a different one. Only steps since the last checkpoint are repeated.

Why:   the more ranks, the sooner one of them fails; a restart repeats only what came after the last checkpoint.
Moves: an all-reduce of w's gradient every step, 2 (n-1)/n x its bytes from each of n ranks; to load, n-1 x the state.
Run:   ./launch.sh recipes/starting/elastic_training.py [--graph]
       ./launch.sh --max-restarts 3 recipes/starting/elastic_training.py --checkpoint-dir checkpoints --die 3
Use it when a job runs longer than the time between two failures. Only rank 0 needs the checkpoints.
Source: PyTorch documentation, torchrun, "Fault-tolerant Distributed Training".
"""

import argparse
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import zlib

import numpy as np
import oneflow as flow

WORLD_SIZES = (2, 1, *range(3, 9))  # numbers of ranks; launch.sh refuses others
FORMAT = "elastic_training 1"  # of its checkpoints; a number of its own for each change of what they hold


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


class CheckpointError(Exception):
    """Why a job cannot use a folder of checkpoints, and what to do. All ranks raise it."""


class Checkpoints:
    """The checkpoints of a run, in a folder that no other job may use while this object lives.

    keep: how many of the newest stay; 0: all. must_match: what a job that resumes must share with the one that saved.
    All ranks call its methods. Rank 0 alone reads and writes the folder, which the other ranks may not see; do not open
    its file "lock" in this process, as closing it would unlock the folder.
    """

    def __init__(self, folder, keep, must_match):
        self.folder, self.keep = pathlib.Path(folder), keep
        self.must_match = json.loads(json.dumps(must_match))  # as it is read again
        from_rank_0(self._lock)

    def save(self, state, step):
        """Save a checkpoint, named by its step; OSError if there is one of that name."""
        unfinished = self.folder / f"unfinished-{socket.gethostname()}-{os.getpid()}"  # no other job writes into it
        from_rank_0(self._check_lock)
        flow.save(state, unfinished, global_dst_rank=0)  # gathers each tensor on rank 0, which alone writes
        if flow.env.get_rank() == 0:
            self._publish(unfinished, step)

    def newest(self):
        """The step of the newest checkpoint, 0 if there is none; CheckpointError if this job cannot resume from it."""
        return from_rank_0(self._newest)

    def _lock(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / "lock", "a+", encoding="utf-8")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system unlocks it when this process ends
        except (BlockingIOError, PermissionError):
            self.lock.seek(0)
            words = f"{self.folder} is in use by {self.lock.read()}: end that job, or use a different folder"
            raise CheckpointError(words) from None
        self.lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=self.lock, flush=True)
        for path in self.folder.glob("unfinished-*-[0-9]*"):
            shutil.rmtree(path)  # its job has died

    def _check_lock(self):
        """Another job may be in a folder that was removed or moved, and made again."""
        path = self.folder / "lock"
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self.lock.fileno())):
            raise CheckpointError(f"{self.folder} was removed or moved while this job ran: it saves nothing there")

    def _publish(self, unfinished, step):
        """Give a checkpoint its name once it is complete on disk, and only then remove older ones."""
        names = [str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file()]
        files = {name: crc_32(unfinished / name) for name in names}
        saved = {"step": step, "must_match": self.must_match, "files": files}
        (unfinished / "checkpoint.json").write_text(json.dumps(saved), encoding="utf-8")
        for path in [*unfinished.rglob("*"), unfinished]:
            fsync(path)
        os.replace(unfinished, self.folder / str(step))
        fsync(self.folder)
        for older in self._steps()[: -self.keep] if self.keep else []:
            if (self.folder / str(older) / "checkpoint.json").is_file():  # else it is something of the user
                shutil.rmtree(self.folder / str(older))

    def _steps(self):
        names = [path.name for path in self.folder.glob("[1-9]*") if not path.is_symlink()]
        return sorted(int(name) for name in names if name.isdecimal())

    def _newest(self):
        *older, newest = [0, *self._steps()]  # 0: from the beginning
        problem = self._problem(newest)
        if not problem:
            return newest
        usable = next(step for step in reversed(older) if not self._problem(step))
        advice = "no older one can be used; to start anew, use a different folder"
        if usable:
            advice = f"{self.folder}/{usable} is good; to resume from it, move the newer ones out of {self.folder}"
        raise CheckpointError(f"{self.folder}/{newest} {problem}: {advice}")

    def _problem(self, step):
        """Why this job cannot resume from a checkpoint, or None."""
        path = self.folder / str(step)
        if step == 0:
            return None
        if not (path / "checkpoint.json").is_file():
            return "has no checkpoint.json, so an earlier version or a different program saved it"
        try:
            saved = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
            damaged = [name for name, value in saved["files"].items() if crc_32(path / name) != value]
            if saved["step"] != step:
                return f"is that of step {saved['step']}"
            if damaged:
                return f"is damaged, as {damaged[0]} is not what was saved"
            before, now = saved["must_match"], self.must_match
            names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            return f"is damaged ({error})"
        return ", ".join(f"has {name} {before.get(name)}, this job {now.get(name)}" for name in names) or None


def from_rank_0(function):
    """What a function returns on rank 0, on all ranks; where it raises OSError or CheckpointError, all ranks raise."""
    answer = {}
    if flow.env.get_rank() == 0:
        try:
            answer["value"] = function()
        except (OSError, CheckpointError) as error:
            answer["error"] = str(error)
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    size = flow.tensor([len(text)])
    flow.comm.broadcast(size, 0)
    text = flow.tensor(np.resize(text, size.item()))
    flow.comm.broadcast(text, 0)
    answer = json.loads(bytes(text.numpy()))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer["value"]


def crc_32(path):
    return zlib.crc32(path.read_bytes())


def fsync(path):
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def last_step(checkpoint_dir):
    """The step of the newest checkpoint, 0 if there is none. All ranks call it."""
    names = [path.name for path in pathlib.Path(checkpoint_dir).glob("*")] if checkpoint_dir else []
    return from_rank_0(lambda: max((int(name) for name in names if name.isdecimal()), default=0))


def train(ranks, graph=False, seed=0, steps=4, save_every=2, checkpoint_dir=None, keep=2, batch=8, features=64):
    """Train up to a step, from the newest checkpoint if there is one; returns the model and the loss of each step.

    Without checkpoint_dir nothing is loaded or saved. CheckpointError if the newest checkpoint cannot be used: a graph
    resumes only what a graph has saved.
    """
    w = np.random.default_rng(seed).standard_normal((features, features), dtype=np.float32)
    model = Layer(w, ranks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    done = 0
    if checkpoint_dir:
        must_match = {"format": FORMAT, "mode": "graph" if graph else "eager"}
        must_match.update(batch=batch, features=features, seed=seed)
        checkpoints = Checkpoints(checkpoint_dir, keep, must_match)
        done = checkpoints.newest()
    if done:
        state = flow.load(f"{checkpoint_dir}/{done}", global_src_rank=0)
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
            checkpoints.save({**state, "losses": losses}, step)
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=2, help="save a checkpoint after every so many steps")
    parser.add_argument("--checkpoint-dir", help="where the checkpoints are, to resume from the newest")
    parser.add_argument("--keep", type=int, default=2, help="how many checkpoints to keep, the newest; 0: all")
    parser.add_argument("--die", type=int, default=0, metavar="STEP", help="kill the last rank after this step, once")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: 1 or more")
    if args.save_every < 1:
        parser.error(f"--save-every {args.save_every}: 1 or more")
    if args.keep < 0:
        parser.error(f"--keep {args.keep}: 0 or more")
    if args.checkpoint_dir == "":
        parser.error("--checkpoint-dir is empty")

    rank, ranks = flow.env.get_rank(), flow.placement.all(args.device)
    options = {"save_every": args.save_every, "checkpoint_dir": args.checkpoint_dir, "keep": args.keep}
    done = last_step(args.checkpoint_dir)
    if rank == 0:
        print(f"resumes after step {done}, from its checkpoint" if done else "starts with step 1: no checkpoint")
    try:
        if args.die and not done:  # once: not in the job that resumes
            train(ranks, args.graph, steps=args.die, **options)
            flow.comm.barrier()  # rank 0 may still be saving this step, and launch.sh ends it when a rank dies
            if rank == flow.env.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        model, losses = train(ranks, args.graph, steps=args.steps, **options)
    except CheckpointError as error:
        parser.error(str(error))  # on all ranks
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
