"""Checkpoint: save once, load on any ranks in any SBP.

    loss = mean((x @ w - y)^2)      rank 0       rank 1        SBP
    x                   (64, 64)    rows 0-31    rows 32-63    S(0)
    y                   (64, 64)    rows 0-31    rows 32-63    S(0)
    w                   (64, 64)    rows 0-31    rows 32-63    S(0)

Rank 0 alone writes and reads the files, which hold whole tensors: w and its momentum load into any layout. To load, it
needs memory for all of them at once. Checkpoints, to be copied, locks the folder and finds damaged files. Here half of
the ranks train with a whole w and save; then all ranks load, with w split as in the table, and train on.

Why:   a whole tensor fits any later layout; a shard fits only the layout in which it was saved.
Moves: to save, an all-gather of each split tensor, (n-1)/n of it from each of n ranks; to load, n-1 times each tensor,
       from all ranks together. S(1) adds an all-to-all to both.
Run:   ./launch.sh recipes/data_and_state/checkpoint.py [--graph] [--weights columns] [--checkpoint-dir DIRECTORY]
Use it in every run that must outlive its job: with --checkpoint-dir and more --steps the next job resumes from there.
Source: OneFlow documentation, oneflow.save and oneflow.load.
"""

import argparse
import fcntl
import json
import os
import pathlib
import shutil
import socket
import tempfile
import zlib

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (2, 1, *range(3, 65))  # numbers of ranks; launch.sh refuses others
FORMAT = "checkpoint 1"  # a number of its own for each change of what a checkpoint holds
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


def train(ranks, graph=False, seed=0, steps=4, weights="rows", checkpoint_dir=None, save_every=2, keep=0, size=64):
    """Train up to a step, from the newest checkpoint if there is one; returns the model and the loss of each step.

    x, y and w are (size, size), in float32. Without checkpoint_dir nothing is loaded or saved. CheckpointError if the
    newest checkpoint cannot be used: a graph can resume only from one that a graph has saved, and eager mode likewise.
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
    done = 0
    if checkpoint_dir:
        must_match = {"format": FORMAT, "mode": "graph" if graph else "eager", "size": size, "seed": seed}
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
            checkpoints.save({**state, "losses": losses}, step)
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="train up to this step")
    parser.add_argument("--weights", choices=SBPS, default="rows", help="how w is split after loading")
    parser.add_argument("--checkpoint-dir", help="resume from the newest checkpoint in it, and keep the new ones")
    parser.add_argument("--save-every", type=int, default=2, help="save a checkpoint after every so many steps")
    parser.add_argument("--keep", type=int, default=0, help="how many checkpoints to keep, the newest; 0: all")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: 1 or more")
    if args.save_every < 1:
        parser.error(f"--save-every {args.save_every}: 1 or more")
    if args.keep < 0:
        parser.error(f"--keep {args.keep}: 0 or more")
    if args.checkpoint_dir == "":
        parser.error("--checkpoint-dir is empty")

    half = flow.placement(args.device, list(range(max(1, flow.env.get_world_size() // 2))))
    everyone = flow.placement.all(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.checkpoint_dir or temporary
        options = {"checkpoint_dir": folder, "save_every": args.save_every, "keep": args.keep}
        try:
            saved, _ = train(half, args.graph, steps=args.steps // 2, weights="whole", **options)
            loaded, losses = train(everyone, args.graph, steps=args.steps, weights=args.weights, **options)
        except CheckpointError as error:
            parser.error(str(error))  # on all ranks
    for name, model in {"saved": saved, "loaded": loaded}.items():
        print(f"{name} w {tuple(model.w.to_local().shape)} of {tuple(model.w.shape)}")
    one = flow.placement(args.device, [0])
    _, alone = train(one, args.graph, steps=len(losses))  # the same code on a single device, in one run
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as in one run on a single device")


if __name__ == "__main__":
    main()
