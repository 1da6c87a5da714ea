"""Elastic training: a job that loses a rank goes on from its last checkpoint.

    loss = mean((x @ w - y)^2)    rank 0      rank 1      SBP
    x           (8, 64)           rows 0-3    rows 4-7    S(0)
    w           (64, 64)          whole       whole       B
    momentum    (64, 64)          whole       whole       B
    new w       (64, 64)          whole       whole       B

OneFlow cannot go on without a rank: when one dies, all end and start again. A checkpoint holds weight and momentum, and
the batch of a step depends on the step alone, so the new weight is bit by bit that of a job without a death (on another
number of ranks: within rounding). Only the steps since the last checkpoint are done twice.

Moves: an all-reduce of w's gradient every step, 2 (n-1)/n x its bytes from each of n ranks; to save and load, nothing.
Run:   ./launch.sh recipes/starting/elastic_training.py [--graph]
       ./launch.sh --max-restarts 3 recipes/starting/elastic_training.py --folder checkpoints --die 3
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/starting/elastic_training.py [--graph]
Use it when a job runs longer than the time between two failures. All hosts must see the folder of the checkpoints.
Source: J. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
"""

import argparse
import hashlib
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import oneflow as flow

WORLD_SIZES = (2, 1, *range(3, 65))


class Network(flow.nn.Module):
    def __init__(self, w, ranks):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))

    def forward(self, x, y):
        return flow.nn.functional.mse_loss(flow.matmul(x, self.w), y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        return loss


def drawn(seed, step, *shapes):
    rng = np.random.default_rng([seed, step])  # a job that goes on draws what it would have drawn anyway
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def save(folder, step, **tensors):
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}  # collective: all ranks call it
    if flow.env.get_rank() == 0:
        path = folder / f"step-{step:08}"
        with open(folder / "unfinished", "w+b") as file:
            np.savez(file, **arrays)
            file.seek(0)
            file.write(hashlib.sha256(file.read()).digest())  # behind the arrays
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "unfinished", path)  # it gets its name when it is whole and on disk
        for older in [other for other in sorted(folder.glob("step-*")) if other < path][:-1]:
            os.remove(older)  # the one before is kept


def last_checkpoint(folder, steps):
    """The newest checkpoint before the last step: its step and its arrays; None if there is none."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        step, data = int(path.name[len("step-") :]), path.read_bytes()
        if step < steps and hashlib.sha256(data[:-32]).digest() == data[-32:]:  # else it is damaged: try the one before
            return step, np.load(path)


def run(
    graph=False, device="cpu", seed=0, steps=4, every=2, batch=None, in_features=64, out_features=64, folder="", die=0
):
    """Train up to a step, from the last checkpoint before it on; returns x, y, w, momentum, new w and the losses."""
    batch = batch or max(8, flow.env.get_world_size())  # a row for each rank, at least
    temporary = tempfile.TemporaryDirectory()  # for a run without a folder
    folder = Path(folder or temporary.name)
    folder.mkdir(parents=True, exist_ok=True)
    [w] = drawn(seed, 0, (in_features, out_features))
    begin, saved = last_checkpoint(folder, steps) or (0, {"w": w, "momentum": np.zeros_like(w)})

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    module = Network(saved["w"], ranks)
    update = flow.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    model = TrainingGraph(module, update) if graph else module
    momentum = flow.tensor(saved["momentum"], placement=ranks, sbp=flow.sbp.broadcast)
    if graph:
        model.load_state_dict({"module.w-momentum": momentum})  # before the first call
    else:
        update.load_state_dict({**update.state_dict(), "state": {0: {"momentum_buf": momentum}, "step": begin}})
    w, losses = module.w.clone(), []
    for step in range(begin + 1, steps + 1):
        arrays = drawn(seed, step, (batch, in_features), (batch, out_features))
        rows = [np.array_split(array, len(ranks.ranks))[flow.env.get_rank()] for array in arrays]  # of this rank
        x, y = (flow.tensor(own, device=device).to_global(placement=ranks, sbp=flow.sbp.split(0)) for own in rows)
        loss = model(x, y)
        if not graph:
            loss.backward()
            update.step()
            update.zero_grad(set_to_none=True)
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))
        if step == die and begin == 0 and flow.env.get_rank() == flow.env.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)  # once: not in the job that goes on
        momentum = model.state_dict()["module.w-momentum"] if graph else update.state_dict()["state"][0]["momentum_buf"]
        if step % every == 0:
            save(folder, step, w=module.w, momentum=momentum)
    return {"x": x, "y": y, "w": w, "momentum": momentum, "new w": module.w, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="train up to this step")
    parser.add_argument("--every", type=int, default=2, help="save a checkpoint after every so many steps")
    parser.add_argument("--folder", default="", help="where checkpoints are, to go on from the last one")
    parser.add_argument("--die", type=int, default=0, metavar="STEP", help="kill the last rank in this step, once")
    args = parser.parse_args()
    tensors = run(**vars(args))

    x, y, new_w, losses = (tensors[name].numpy() for name in ("x", "y", "new w", "losses"))  # collective: on all ranks
    begin = args.steps - len(losses)
    if flow.env.get_rank() == 0:
        print(f"went on after step {begin}, from its checkpoint" if begin else "began with step 1: no checkpoint")
        print(f"loss {losses[0]:.4f} in step {begin + 1} -> {losses[-1]:.4f} in step {args.steps}")
    [w], momentum = drawn(0, 0, new_w.shape), 0
    for step in range(1, args.steps + 1):  # all steps on a single device
        x, y = drawn(0, step, x.shape, y.shape)
        error = x @ w - y
        momentum = 0.9 * momentum + 2 / error.size * x.T @ error
        w -= 0.01 * momentum
    np.testing.assert_allclose(new_w, w, rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"the weight after step {args.steps} equals that of a single device without a death")


if __name__ == "__main__":
    main()
