"""Training run: copy this file to begin; padding, clipping, schedule, evaluation and resuming are right on any mesh.

    kind of tensor      shape                   along data    along tensor
    ids, targets        (batch, seq_len)        S(0)          B
    activation          (batch, seq_len, ...)   S(0)          B
    column weight       (hidden, more)          B             S(1)
    row weight          (more, hidden)          B             S(0)
    other parameters                            B             B

The model is a small causal transformer; sequences have different lengths. In both modes the losses of all valid tokens
are added, over ranks and micro-batches, and divided once, by their number. With --graph the model runs in two graphs,
and the update stays eager: a graph clips each parameter group by its own norm, and LambdaLR has no form for a graph.

Why:   a sum over all valid tokens, divided once, is the same on any mesh; a mean of means is not.
Moves: along data one all-reduce of the gradients in a step; along tensor, in each block and micro-batch, 2 all-reduces
       of the activations forward and 2 backward. To save, an all-gather of each split weight and of its two moments.
Run:   ./launch.sh recipes/training/training_run.py [--graph] [--tensor 2] [--checkpoint-dir DIR --steps 40]
Use it to begin a run that must be right and may be stopped. Pipeline stages: gpt.py; dropout: random_numbers.py.
Source: PyTorch documentation, "Saving and loading a general checkpoint"; I. Loshchilov and F. Hutter, arXiv:1711.05101.
"""

import argparse
import dataclasses
import fcntl
import functools
import json
import math
import os
import pathlib
import shutil
import socket
import tempfile
import zlib

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (2, 1, 3, 4, 6, 12)  # numbers of ranks; launch.sh refuses others
# SBPs along data and along tensor
BATCH, COLUMN, ROW, REPLICATED = (
    (flow.sbp.split(0), flow.sbp.broadcast),
    (flow.sbp.broadcast, flow.sbp.split(1)),
    (flow.sbp.broadcast, flow.sbp.split(0)),
    (flow.sbp.broadcast, flow.sbp.broadcast),
)
IGNORE = -100  # the target of a position without a token
FORMAT = "training_run 1"  # of its checkpoints; a number of its own for each change of what they hold


@dataclasses.dataclass
class Config:
    """The sizes of a run. A job that resumes it may change the mesh, and all but `fixed`."""

    batch_size: int = 24
    train_samples: int = 480
    seq_len: int = 12
    vocab_size: int = 29
    num_layers: int = 2
    hidden_size: int = 32
    num_heads: int = 4
    micro_batches: int = 2
    test_samples: int = 50
    lr: float = 0.01
    warmup_steps: int = 4
    decay_steps: int = 40  # not the steps of this job: a job that stops early must not decay earlier
    weight_decay: float = 0.1
    clip_grad: float = 1.0  # the largest norm of all gradients together
    eval_every: int = 4

    def fixed(self):
        """What a checkpoint and the job that resumes from it must share: the weights' shapes, the samples' order."""
        names = ("batch_size", "train_samples", "seq_len", "vocab_size", "num_layers", "hidden_size", "num_heads")
        return {name: getattr(self, name) for name in names}

    def check(self, mesh):
        """Raise ValueError if a size does not fit the mesh: OneFlow would hang or abort."""
        data, tensor = mesh.ranks.shape
        if self.batch_size % (data * self.micro_batches):
            words = f"{data} ranks along data x {self.micro_batches} micro-batches must divide"
            raise ValueError(f"--micro-batches {self.micro_batches}: {words} the {self.batch_size} rows of a batch")
        if self.num_heads % tensor:
            raise ValueError(f"--tensor {tensor} must divide the {self.num_heads} heads")
        if self.train_samples < self.batch_size or self.test_samples < 1:
            raise ValueError(f"train_samples must fill a batch of {self.batch_size}, and test_samples be 1 or more")
        if self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} must be more than warmup_steps {self.warmup_steps}")


class Block(flow.nn.Module):
    def __init__(self, config, mesh, rng):
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.norm = flow.nn.LayerNorm(hidden).to_global(mesh, REPLICATED)
        self.qkv = parameter(rng, (hidden, 3 * hidden), mesh, COLUMN)
        self.project = parameter(rng, (hidden, hidden), mesh, ROW)
        self.norm_mlp = flow.nn.LayerNorm(hidden).to_global(mesh, REPLICATED)
        self.up = parameter(rng, (hidden, 4 * hidden), mesh, COLUMN)
        self.down = parameter(rng, (4 * hidden, hidden), mesh, ROW)

    def forward(self, x):
        x = x + self.attention(to_columns(self.norm(x)))
        hidden = flow.relu(flow.matmul(to_columns(self.norm_mlp(x)), self.up))
        return x + from_rows(flow.matmul(hidden, self.down))

    def attention(self, x):
        """Each rank of the tensor axis has its own heads. No token sees a later one, so none sees the padding."""
        batch, seq_len, hidden = x.shape
        qkv = flow.matmul(x, self.qkv)  # its columns are in the order of the heads
        qkv = qkv.reshape(batch, seq_len, self.num_heads, -1).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, -1)
        scores = flow.matmul(q, k, transpose_b=True) * q.shape[-1] ** -0.5
        values = flow.matmul((scores + causal_mask(seq_len, x.placement)).softmax(-1), v)
        values = values.permute(0, 2, 1, 3).reshape(batch, seq_len, hidden)
        return from_rows(flow.matmul(values, self.project))


class Model(flow.nn.Module):
    def __init__(self, config, mesh, seed):
        super().__init__()
        rng = np.random.default_rng(seed)  # all ranks draw the same weights
        self.tokens = parameter(rng, (config.vocab_size, config.hidden_size), mesh, REPLICATED)
        self.positions = parameter(rng, (config.seq_len, config.hidden_size), mesh, REPLICATED)
        self.blocks = flow.nn.ModuleList([Block(config, mesh, rng) for _ in range(config.num_layers)])
        self.norm = flow.nn.LayerNorm(config.hidden_size).to_global(mesh, REPLICATED)
        self.head = parameter(rng, (config.hidden_size, config.vocab_size), mesh, REPLICATED)

    def forward(self, ids):
        x = flow.nn.functional.embedding(ids, self.tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return flow.matmul(self.norm(x), self.head)


def parameter(rng, shape, mesh, sbp):
    values = 0.1 * rng.standard_normal(shape, dtype=np.float32)
    return flow.nn.Parameter(flow.tensor(values, placement=mesh, sbp=sbp))


def causal_mask(seq_len, mesh):
    """-1e9 where a token would see a later one."""
    shape = (seq_len, seq_len)
    return flow._C.global_constant(shape, -1e9, dtype=flow.float32, placement=mesh, sbp=REPLICATED).triu(1)


def to_columns(x):
    """Before a column weight: no communication forward; in backward the gradient is reduced at once."""
    return x.to_global(sbp=BATCH, grad_sbp=BATCH)


def from_rows(out):
    """After a row weight: the partial sums are added up."""
    return out.to_global(sbp=BATCH)


def sum_of_losses(model, ids, targets):
    """The sum of the losses of all valid tokens, and their number; a mean here would become a mean of means."""
    logits = model(ids).flatten(0, 1)
    targets = targets.flatten()
    loss = flow.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return loss, (targets != IGNORE).sum()


def trained_parameters(model):
    """The parameters that are not frozen, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def nodes_of(loss):
    """The nodes of backward, down to those of the parameters that the loss uses."""
    nodes, unseen = set(), [loss.grad_fn]
    while unseen:
        node = unseen.pop()
        if node not in nodes:
            nodes.add(node)
            unseen += node.next_functions
    return nodes


def refuse_unused(names):
    """Name the parameters that the loss does not use: OneFlow's error would not."""
    if names:
        advice = "leave it out of the model, or freeze it by requires_grad_(False)"
        raise ValueError(f"{', '.join(names)} has no gradient, as the loss does not use it: {advice}")


def sums_and_gradients(model, ids, targets):
    """The two sums of a micro-batch, and the gradients of the first. Along data they are P: not yet reduced."""
    loss, count = sum_of_losses(model, ids, targets)
    parameters = trained_parameters(model)
    nodes = nodes_of(loss)
    refuse_unused([name for name, parameter in parameters.items() if parameter.grad_fn not in nodes])
    return (loss, count, *flow.autograd.grad(loss, list(parameters.values())))


class GradientGraph(flow.nn.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.trained = list(trained_parameters(model))
        # a graph refuses backward without an optimizer: this one updates a weight that nothing uses
        unused = flow.zeros(1, placement=next(model.parameters()).placement, sbp=REPLICATED)
        self.unused = flow.nn.ParameterList([flow.nn.Parameter(unused)])
        self.add_optimizer(flow.optim.SGD(self.unused.parameters()))

    def build(self, ids, targets):
        loss, count = sum_of_losses(self.model, ids, targets)
        (loss + 0 * self.unused[0].sum()).backward()
        parameters = dict(self.model.named_parameters())
        gradients = {name: parameters[name].to(flow.Tensor).grad for name in self.trained}
        refuse_unused([name for name, gradient in gradients.items() if gradient is None])
        return (loss, count, *gradients.values())


class EvaluationGraph(flow.nn.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, ids, targets):
        return sum_of_losses(self.model, ids, targets)


def padding(config):
    """The ids and targets of a sequence without a token."""
    return np.zeros(config.seq_len, np.int64), np.full(config.seq_len, IGNORE, np.int64)


def sample(index, config):
    """The ids and targets of a sequence, padded. Replace it with one that reads your files.

    Indices below train_samples are for training, and the next test_samples are held out. Open a file once, not in each
    call. Number tokens alike in every process: the order of set(text) differs from one process to the next.
    """
    ids, targets = padding(config)
    rng = np.random.RandomState(index)
    start, stride = rng.randint(config.vocab_size), rng.randint(1, 8)
    length = rng.randint(2, config.seq_len + 1)
    tokens = (start + stride * np.arange(length + 1)) % config.vocab_size
    ids[:length], targets[:length] = tokens[:-1], tokens[1:]
    return ids, targets


def load_rows(indices, config, mesh):
    """The global ids and targets of these samples, padding beyond the last; each rank reads only its own rows."""
    place = np.argwhere(mesh.ranks == flow.env.get_rank())  # along data and tensor; none outside the mesh
    rows = np.split(indices, mesh.ranks.shape[0])[place[0][0]] if len(place) else indices[:0]
    end = config.train_samples + config.test_samples
    padded = [sample(index, config) if index < end else padding(config) for index in rows]
    padded = np.array(padded, np.int64).reshape(-1, 2, config.seq_len)
    wrong = (padded < 0) | (padded >= config.vocab_size)  # OneFlow would compute with zeros, or abort
    wrong[:, 1] &= padded[:, 1] != IGNORE
    if wrong.any():
        numbers = f"{padded[wrong][0]} is not in 0 to {config.vocab_size - 1}"
        raise ValueError(f"sample {rows[wrong.any((1, 2))][0]}: {numbers}; vocab_size is {config.vocab_size}")
    local = [flow.tensor(padded[:, i], device=mesh.type) for i in range(2)]
    return [tensor.to_global(placement=mesh, sbp=BATCH) for tensor in local]


class Batches:
    """Endless shuffled batches, the same on any mesh. Their state is the seed, the epoch and the position in it."""

    def __init__(self, config, mesh, seed):
        self.config, self.mesh = config, mesh
        self.load_state_dict({"seed": seed, "epoch": 0, "position": 0})

    def state_dict(self):
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self.order = self.shuffled()

    def shuffled(self):
        return np.random.RandomState([self.seed, self.epoch]).permutation(self.config.train_samples)

    def next(self):
        """The micro-batches of a step, each of them ids and targets."""
        size = self.config.batch_size
        if self.position + size > self.config.train_samples:  # what is left of an epoch is dropped
            self.epoch, self.position = self.epoch + 1, 0
            self.order = self.shuffled()
        indices = self.order[self.position : self.position + size]
        self.position += size
        return [load_rows(part, self.config, self.mesh) for part in np.split(indices, self.config.micro_batches)]


def parameter_groups(model, weight_decay):
    """Matrices decay; biases and the gains of norms do not."""
    parameters = trained_parameters(model).values()
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def learning_rate(step, config):
    """Warmup, then a cosine down to a tenth. It depends on the step alone, so a resumed run continues it."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = min((step - config.warmup_steps) / (config.decay_steps - config.warmup_steps), 1)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def clip_gradients(parameters, max_norm):
    """Scale all gradients by one factor, so that the norm of all groups and shards together is at most max_norm.

    Returns the norm before scaling.
    """
    # linalg.norm of a split tensor is wrong, and clip_grad_norm_ gathers each gradient
    squares = [(p.grad * p.grad).sum().to_global(sbp=REPLICATED) for p in parameters]
    norm = flow.sqrt(sum(squares))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad = p.grad * factor
    return norm.item()  # collective: all ranks call it


def train_step(step, model, optimizer, gradients_of, micro_batches, config):
    """One update; returns the mean loss of all valid tokens of the batch. All ranks call it."""
    totals = None
    for ids, targets in micro_batches:
        sums = gradients_of(ids, targets)
        totals = sums if totals is None else [total + new for total, new in zip(totals, sums)]
    loss, count, *gradients = totals
    count = count.to_global(sbp=REPLICATED)  # of all ranks and micro-batches: a mean of their means is a different loss
    loss, tokens = loss.item(), count.item()  # collective: all ranks call it
    if not tokens or not math.isfinite(loss):
        raise FloatingPointError(f"step {step}: the loss of {tokens} valid tokens is {loss}; nothing was updated")
    parameters = list(trained_parameters(model).values())
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient.to_global(sbp=p.sbp) / count  # the all-reduce along data, once for all micro-batches
    norm = clip_gradients(parameters, config.clip_grad)
    if not math.isfinite(norm):  # the loss may be finite all the same
        raise FloatingPointError(f"step {step}: the norm of the gradients is {norm}; nothing was updated")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees them until the next step
    return loss / tokens


def evaluate(sums_of, config, mesh):
    """The mean loss of all valid held-out tokens. The last batch is filled up with padding, which does not count."""
    rows = config.batch_size // config.micro_batches
    loss, count = 0, 0
    for begin in range(0, config.test_samples, rows):
        indices = config.train_samples + np.arange(begin, begin + rows)
        with flow.no_grad():
            new_loss, new_count = sums_of(*load_rows(indices, config, mesh))
        loss, count = loss + new_loss.item(), count + new_count.item()  # collective: all ranks call it
    return loss / count


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


def load(path, model, optimizer, batches):
    """Load a checkpoint; returns the configuration of its job and the losses up to it. All ranks call it."""
    state = flow.load(path, global_src_rank=0)
    saved, trained = state["trained"], list(trained_parameters(model))  # AdamW's state is in this order
    if saved != trained:
        names = ", ".join(sorted(set(saved) ^ set(trained))) or "the same in a different order"
        raise CheckpointError(f"{path} is of a model that trains other parameters: {names}; use a different folder")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batches.load_state_dict(state["batches"])
    return state["config"], state["losses"], state["held_out"]


def train(mesh, config=None, graph=False, seed=0, steps=8, checkpoint_dir=None, save_every=4, keep=0, log=False):
    """Train up to a step, from the newest checkpoint if there is one; CheckpointError if it cannot be used.

    Returns the model, the loss of each step and the held-out losses, including those of earlier jobs.
    """
    config = config or Config()
    config.check(mesh)
    model = Model(config, mesh, seed)
    optimizer = flow.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.lr)
    batches = Batches(config, mesh, seed)
    gradients_of = GradientGraph(model) if graph else functools.partial(sums_and_gradients, model)
    sums_of = EvaluationGraph(model) if graph else functools.partial(sum_of_losses, model)
    losses, held_out = [], []
    done, options = 0, dataclasses.asdict(config)
    if checkpoint_dir:
        checkpoints = Checkpoints(checkpoint_dir, keep, {"format": FORMAT, "seed": seed, **config.fixed()})
        done = checkpoints.newest()
    if done:
        path = f"{checkpoint_dir}/{done}"
        saved, losses, held_out = load(path, model, optimizer, batches)
        if log and flow.env.get_rank() == 0:
            print(f"resumes after step {done}, from {path}" + ("; all is done" if done >= steps else ""))
            for name in {**saved, **options}:
                if saved.get(name) != options.get(name):
                    print(f"changed since then: {name} {saved.get(name)} -> {options.get(name)}")

    for step in range(done + 1, steps + 1):
        # with dropout, call flow.manual_seed(seed + step) here, or a job that resumes draws other masks (in eager mode)
        losses.append(train_step(step, model, optimizer, gradients_of, batches.next(), config))
        if step % config.eval_every == 0:
            model.eval()  # without dropout, if you add it
            held_out.append(evaluate(sums_of, config, mesh))
            model.train()
        if checkpoint_dir and (step % save_every == 0 or step == steps):
            state = {"config": options, "batches": batches.state_dict(), "trained": list(trained_parameters(model))}
            state.update(model=model.state_dict(), optimizer=optimizer.state_dict(), losses=losses, held_out=held_out)
            checkpoints.save(state, step)
        if log and step % config.eval_every == 0 and flow.env.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.4f}  held-out {held_out[-1]:.4f}", flush=True)
    return model, losses, held_out


def placements(device, n, tensor=1):
    """A mesh of data x tensor. ValueError if it does not fit."""
    if n % tensor:
        raise ValueError(f"--tensor {tensor} must divide the {n} ranks")
    return flow.placement(device, np.arange(n).reshape(-1, tensor).tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the model in an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tensor", type=int, default=1, help="ranks along the tensor axis; data has the others")
    parser.add_argument("--micro-batches", type=int, default=Config.micro_batches)
    parser.add_argument("--steps", type=int, default=8, help="train up to this step")
    parser.add_argument("--checkpoint-dir", help="save here, and resume from the newest (default: a self-test)")
    parser.add_argument("--save-every", type=int, default=4, help="steps from one checkpoint to the next")
    parser.add_argument("--keep", type=int, default=0, help="how many checkpoints to keep, the newest; 0: all")
    args = parser.parse_args()
    for name in ("tensor", "micro_batches", "steps", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: 1 or more")
    if args.keep < 0:
        parser.error(f"--keep {args.keep}: 0 or more")
    if args.checkpoint_dir == "":
        parser.error("--checkpoint-dir is empty")
    config = Config(micro_batches=args.micro_batches)
    try:
        mesh = placements(args.device, flow.env.get_world_size(), args.tensor)
        config.check(mesh)
    except ValueError as error:
        parser.error(str(error))  # each rank ends with this line before it waits for another

    counts = [(targets.to_local() != IGNORE).sum().item() for _, targets in Batches(config, mesh, seed=0).next()]
    print("valid tokens in this rank's rows of the micro-batches of step 1:", *counts)
    options = {"graph": args.graph, "steps": args.steps, "save_every": args.save_every, "keep": args.keep}
    if args.checkpoint_dir:  # a real run: the same command again resumes it
        try:
            train(mesh, config, **options, checkpoint_dir=args.checkpoint_dir, log=True)
        except CheckpointError as error:
            parser.error(str(error))  # on all ranks
        return

    _, losses, held_out = train(mesh, config, **options, log=True)
    at_once = dataclasses.replace(config, micro_batches=1)
    _, alone, held_out_alone = train(placements(args.device, 1), at_once, **options)  # on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    np.testing.assert_allclose(held_out, held_out_alone, rtol=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        train(mesh, config, **{**options, "steps": args.steps // 2}, checkpoint_dir=folder)  # this job is stopped
        _, resumed, held_out_resumed = train(mesh, config, **options, checkpoint_dir=folder)
    np.testing.assert_array_equal(resumed, losses)
    np.testing.assert_array_equal(held_out_resumed, held_out)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")
        print(f"stopped after step {args.steps // 2} and resumed, it has the same losses, bit by bit")


if __name__ == "__main__":
    main()
