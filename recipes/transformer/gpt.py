"""GPT: train a model whose layout is a table: data, context, tensor, sequence and pipeline parallelism, full sharding.

    kind of tensor       shape                        along data    along tensor
    ids                  (batch, seq_len)             S(0)          B       --context-parallel: S(1), B
    activation, residual (seq_len, batch, hidden)     S(1)          B       --context-parallel: S(0), B
    vocabulary           (vocab_size, hidden)         B             S(0)    --shard-weights: S(1), S(0)
    column weight        (hidden, more)               B             S(1)    --shard-weights: S(0), S(1)
    row weight           (more, hidden)               B             S(0)    --shard-weights: S(1), S(0)
    expert column weight (experts, hidden, more)      S(0)          S(2)
    expert row weight    (experts, more, hidden)      S(0)          S(1)
    norms, positions     (hidden), (seq_len, hidden)  B             B

--sequence-parallel: the residual is S(0) along tensor. Stage k of a pipeline has the k-th part of ranks and layers.
Why:   a layout that is a table can be changed without touching the model, so meshes can be compared.
Moves: data: all-reduce of gradients (in eager mode in each micro-batch); context: also all-gather of keys and values,
       reduce-scatter of their gradients; sharded: all-gather and reduce-scatter of weights in each micro-batch;
       experts: 4 all-to-alls, tensor: 4 all-reduces (or all-gathers + reduce-scatters) a layer; pipeline: the residual.
Run:   ./launch.sh recipes/transformer/gpt.py [--graph] [--tensor 2] [--steps 1000] [--checkpoint-dir DIR] [--check]
Use it where the layout may change from run to run: a checkpoint of either mode loads on any mesh, in either mode.
Source: D. Narayanan et al., arXiv:2104.04473; V. Korthikanti et al., arXiv:2205.05198; Llama 3, arXiv:2407.21783.
"""

import argparse
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import shutil
import socket
import time
import zlib

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (2, 1, *range(3, 1025))  # numbers of ranks; launch.sh refuses others
# S(i): each rank holds a slice of dimension i. B: each holds the whole tensor. P, which LAYOUT does not use: what the
# ranks hold adds up to the tensor, as after a matmul with a row weight. Ranks communicate where to_global changes the
# SBP: P -> B is an all-reduce, P -> S a reduce-scatter, S -> B an all-gather; the input's gradient gets grad_sbp.
LAYOUT = {  # kind of tensor -> its SBPs along the data and the tensor axis of a mesh
    "ids": (flow.sbp.split(0), flow.sbp.broadcast),
    "activation": (flow.sbp.split(1), flow.sbp.broadcast),
    "residual": (flow.sbp.split(1), flow.sbp.broadcast),
    "vocabulary": (flow.sbp.broadcast, flow.sbp.split(0)),
    "column": (flow.sbp.broadcast, flow.sbp.split(1)),
    "row": (flow.sbp.broadcast, flow.sbp.split(0)),
    "expert column": (flow.sbp.split(0), flow.sbp.split(2)),
    "expert row": (flow.sbp.split(0), flow.sbp.split(1)),
    "replicated": (flow.sbp.broadcast, flow.sbp.broadcast),
}
CONTEXT_PARALLEL = {
    "ids": (flow.sbp.split(1), flow.sbp.broadcast),
    "activation": (flow.sbp.split(0), flow.sbp.broadcast),
    "residual": (flow.sbp.split(0), flow.sbp.broadcast),
}
SHARDED = {  # weights between uses
    "vocabulary": (flow.sbp.split(1), flow.sbp.split(0)),
    "column": (flow.sbp.split(0), flow.sbp.split(1)),
    "row": (flow.sbp.split(1), flow.sbp.split(0)),
}

FORMAT = "gpt 1"  # of its checkpoints; a number of its own for each change of what they hold
CHARACTERS = "0123456789+=;"
QUESTION, LINE = len("27+35="), len("27+35=260;")  # an answer begins with its last digit
SUMS = np.random.RandomState(0).permutation(100 * 100)  # all a + b below 100, as 100 a + b
HELD_OUT = 100  # the first of them are never trained on

TOP_K = 2  # experts that a token chooses
CAPACITY_FACTOR = 1.25  # slots of a sequence at each expert, as a multiple of an even share
BALANCE_COEF = 0.01  # weight of the balance loss


@dataclasses.dataclass
class Config:
    """The sizes of the model and of a batch, and what the layout adds to the plain one."""

    seq_len: int = 8  # of a longer row each line begins at positions of its own: the model learns more slowly
    num_layers: int = 4
    hidden_size: int = 96
    num_heads: int = 4
    batch_size: int = 64
    micro_batches: int = 1
    clip_grad: float = 0.0  # the largest norm of all gradients together; 0: any
    context_parallel: bool = False  # the data axis splits the sequence, and not the batch
    sequence_parallel: bool = False
    shard_weights: bool = False
    experts: int = 0  # in place of each MLP; 0: the MLP
    recompute: str = "none"  # or "full": backward computes each block again, from its input; in a graph

    def check(self, meshes):
        """Raise ValueError where a size does not fit the meshes, where OneFlow would hang or abort, or the text."""
        data, tensor = meshes[0].ranks.shape
        rows, tokens = self.batch_size, self.seq_len  # of each rank
        if self.context_parallel:
            check_divides("--data", data, tokens, "tokens of a sequence")
            tokens //= data
        else:
            check_divides("--data", data, rows, "rows of a batch")
            rows //= data
        check_divides("--micro-batches", self.micro_batches, rows, "rows of a batch on each rank")
        check_divides("--tensor", tensor, self.num_heads, "heads")
        if len(meshes) > self.num_layers:
            raise ValueError(f"--pipeline {len(meshes)} is more than the {self.num_layers} layers; use fewer")
        if self.seq_len < LINE - 2:
            raise ValueError(f"--seq-len {self.seq_len} is too short for a sum; use {LINE - 2} or more")
        if self.sequence_parallel:
            check_divides("--tensor", tensor, tokens, "tokens of a sequence on each rank")
        if self.shard_weights:
            check_divides("--data", data, self.hidden_size, "columns of a weight")
        if self.experts:
            if self.experts < TOP_K:
                raise ValueError(f"--experts {self.experts} is fewer than the {TOP_K} that a token chooses")
            check_divides("--data", data, self.experts, "experts")
            if self.context_parallel:
                raise ValueError("--experts gives out its slots by whole sequences; leave out --context-parallel")

    def fixed(self):
        """What a checkpoint must share with a job that resumes from it. The number of heads, say, shows in no shape."""
        names = ("seq_len", "num_layers", "hidden_size", "num_heads", "experts")
        return {option_of(name): getattr(self, name) for name in names}


def option_of(name):
    return f"--{name.replace('_', '-')}"


def check_divides(option, parts, size, what):
    if size % parts:
        divisors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise ValueError(f"{option} {parts} does not divide the {size} {what}; these do: {divisors}")


def placements(device, n, data=0, tensor=1, pipeline=1):
    """The mesh of each stage, (data, tensor), on n ranks; data 0: all ranks that are left."""
    data = data or max(1, n // (tensor * pipeline))
    if data * tensor * pipeline != n:
        raise ValueError(f"data {data} x tensor {tensor} x pipeline {pipeline} must be the number of ranks, {n}")
    stages = np.arange(n).reshape(pipeline, data, tensor)
    return [flow.placement(device, ranks.tolist()) for ranks in stages]


class StageModule(flow.nn.Module):
    """A part of the model on the mesh of its stage. Each of its weights is of a kind in LAYOUT."""

    def __init__(self, config, stage, mesh):
        super().__init__()
        self.config, self.stage, self.mesh = config, stage, mesh
        self.kinds = {}
        self.layout = {**LAYOUT, **CONTEXT_PARALLEL} if config.context_parallel else dict(LAYOUT)
        if config.sequence_parallel:
            self.layout["residual"] = (self.layout["activation"][0], flow.sbp.split(0))
        self.layout_at_rest = {**self.layout, **SHARDED} if config.shard_weights else self.layout

    def to_mesh(self, ids):
        return flow.tensor(ids, placement=self.mesh, sbp=self.layout["ids"])

    def add_weight(self, name, kind, array):
        weight = flow.tensor(array, placement=self.mesh, sbp=self.layout_at_rest[kind])
        self.kinds[name] = kind
        setattr(self, name, flow.nn.Parameter(weight))

    def weight(self, name):
        """A weight as it is used: if sharded, all-gathered along the data axis, and its gradient reduce-scattered."""
        # without identity a graph that gathers a parameter aborts, and one with micro-batches may update it wrongly
        weight = flow._C.identity(getattr(self, name))
        sbp = self.layout[self.kinds[name]]
        return weight if weight.sbp == sbp else weight.to_global(sbp=sbp, grad_sbp=weight.sbp)

    def rms_norm(self, x, name):
        """Each token divided by its root mean square. Written with mean and sqrt, this is slow on a CPU."""
        return flow.nn.functional.normalize(x, dim=-1) * (x.shape[-1] ** 0.5 * self.weight(name))

    def gather_sequence(self, x):
        """The whole sequence on each rank of the tensor axis. Backward, the ranks' gradients are summed."""
        return x.to_global(sbp=self.layout["activation"], grad_sbp=self.layout["residual"])

    def sum_parts(self, x):
        """The sum of the partial sums of the tensor axis. Backward, each rank gets the whole gradient."""
        return x.to_global(sbp=self.layout["residual"], grad_sbp=self.layout["activation"])


class Embedding(StageModule):
    def __init__(self, config, stage, mesh, rng, vocab_size):
        super().__init__(config, stage, mesh)
        self.add_weight("tokens", "vocabulary", normal(rng, vocab_size, config.hidden_size))
        self.add_weight("positions", "replicated", normal(rng, config.seq_len, config.hidden_size))

    def forward(self, ids):
        table = self.weight("tokens")
        x = flow._C.gather(table, ids.transpose(0, 1), 0)  # the gradient of table[ids] is wrong, silently
        x = self.sum_parts(x)
        positions = self.weight("positions").unsqueeze(1).expand(*x.shape)  # to add them without expand is slow
        return x + positions, table


class Block(StageModule):
    def __init__(self, config, stage, mesh, rng):
        super().__init__(config, stage, mesh)
        hidden_size = config.hidden_size
        self.add_weight("norm", "replicated", np.ones(hidden_size, np.float32))
        self.add_weight("qkv", "column", normal(rng, hidden_size, 3 * hidden_size))
        self.add_weight("project", "row", normal(rng, hidden_size, hidden_size))
        self.add_weight("norm_mlp", "replicated", np.ones(hidden_size, np.float32))
        if config.experts:
            self.experts = Experts(config, stage, mesh, rng)
        else:
            self.add_weight("up", "column", normal(rng, hidden_size, 4 * hidden_size))
            self.add_weight("down", "row", normal(rng, 4 * hidden_size, hidden_size))

    def forward(self, x):
        """The next residual, and the balance loss of the experts, None without them."""
        x = x.to_global(placement=self.mesh)  # from the stage before
        out = self.attention(self.gather_sequence(self.rms_norm(x, "norm")))
        x = x + self.sum_parts(out)
        normed, balance_loss = self.rms_norm(x, "norm_mlp"), None
        if self.config.experts:
            out, balance_loss = self.experts(normed)
        else:
            out = self.mlp(self.gather_sequence(normed))
        return x + self.sum_parts(out), balance_loss

    def attention(self, x):
        """Causal, each rank of the tensor axis with its own heads: no communication from qkv to project.

        In context parallel each rank of the data axis has the queries of its own tokens, and gathers keys and values.
        """
        seq_len, batch, hidden_size = x.shape  # in a graph, of a micro-batch
        heads, head_size = self.config.num_heads, hidden_size // self.config.num_heads
        qkv = flow.matmul(x, self.weight("qkv"))  # its columns are in the order of the heads
        q, k, v = qkv.reshape(seq_len, batch, heads, 3 * head_size).chunk(3, -1)
        if self.config.context_parallel:  # all-gathers along data; backward reduce-scatters the gradients
            k = k.to_global(
                sbp=(flow.sbp.broadcast, flow.sbp.split(2)), grad_sbp=(flow.sbp.split(0), flow.sbp.split(2))
            )
            v = v.to_global(
                sbp=(flow.sbp.broadcast, flow.sbp.split(2)), grad_sbp=(flow.sbp.split(0), flow.sbp.split(2))
            )
        q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)  # (batch, heads, seq_len, size)
        scores = flow.matmul(q, k, transpose_b=True) * head_size**-0.5
        scores = scores + self.mask(seq_len, x.dtype)  # flow.where would gather the scores
        values = flow.matmul(scores.softmax(-1), v)
        values = values.permute(2, 0, 1, 3).reshape(seq_len, batch, hidden_size)
        return flow.matmul(values, self.weight("project"))

    def mask(self, seq_len, dtype):
        """-1e9 where a query, a row, would see a later key. In context parallel a rank has its own rows."""
        shape, sbp = (seq_len, seq_len), self.layout["replicated"]
        mask = flow._C.global_constant(shape, -1e9, dtype=dtype, placement=self.mesh, sbp=sbp).triu(1)
        return mask.to_global(sbp=(flow.sbp.split(0), flow.sbp.broadcast)) if self.config.context_parallel else mask

    def mlp(self, x):
        """Its activation is the squared ReLU, much faster than GELU on a CPU (arXiv:2109.08668)."""
        hidden = flow.square(flow.relu(flow.matmul(x, self.weight("up"))))
        return flow.matmul(hidden, self.weight("down"))


class Experts(StageModule):
    """In place of an MLP; recipes/transformer/mixture_of_experts.py explains its steps."""

    def __init__(self, config, stage, mesh, rng):
        super().__init__(config, stage, mesh)
        experts, hidden_size = config.experts, config.hidden_size
        self.add_weight("router", "replicated", normal(rng, hidden_size, experts))
        self.add_weight("up", "expert column", normal(rng, experts, hidden_size, 4 * hidden_size))
        self.add_weight("down", "expert row", normal(rng, experts, 4 * hidden_size, hidden_size))

    def forward(self, x):
        """The output for a normed residual, partial sums along tensor, and the balance loss."""
        probs = flow.matmul(x, self.weight("router")).softmax(-1)
        tokens = self.gather_sequence(x).transpose(0, 1)
        gates = self.gather_sequence(probs).transpose(0, 1)
        chosen = self.choose(gates)
        balance_loss = self.config.experts * (chosen.mean(1) / TOP_K * probs.mean(0)).sum(-1).mean()
        gates = gates * chosen
        gates = gates / gates.sum(-1, keepdim=True)
        slots = self.assign_slots(chosen)
        out = self.mlps(flow.matmul(slots.flatten(2), tokens, transpose_a=True))
        gates = gates.unsqueeze(3).expand(*slots.shape)  # without expand, backward moves more than gates
        out = flow.matmul((slots * gates).flatten(2), out)
        return out.transpose(0, 1), balance_loss

    def choose(self, probs):
        """(batch, token, expert): 1 for the most likely experts of a token; of equals for the first one."""
        left = probs.detach()
        for _ in range(TOP_K):
            left = left - 2 * flow.nn.functional.one_hot(left.argmax(-1), self.config.experts).to(left.dtype)
        return (left < 0).to(probs.dtype)

    def assign_slots(self, chosen):
        """(batch, token, expert, slot): 1 for a slot that a token takes. Earlier tokens come first: causal."""
        capacity = math.ceil(CAPACITY_FACTOR * TOP_K * chosen.shape[1] / self.config.experts)
        # cumsum would move the tensor if a dimension in front of its own were split
        order = flow.cumsum(chosen.transpose(0, 1), dim=0).transpose(0, 1)
        slot = (order - 1).clamp(0, capacity).to(flow.int64)  # what has no slot gets one more, which is cut off
        return flow.nn.functional.one_hot(slot, capacity + 1).to(chosen.dtype)[..., :capacity] * chosen.unsqueeze(3)

    def mlps(self, slots):
        """What the experts make of the tokens in their slots, (batch, expert and slot, hidden)."""
        batch, _, hidden_size = slots.shape
        sent = slots.reshape(batch, self.config.experts, -1, hidden_size)
        # all-to-all along data
        arrived = sent.to_global(
            sbp=(flow.sbp.split(1), flow.sbp.broadcast), grad_sbp=(flow.sbp.split(0), flow.sbp.partial_sum)
        )
        hidden = flow.matmul(arrived.transpose(0, 1).flatten(1, 2), self.weight("up"))
        out = flow.matmul(flow.square(flow.relu(hidden)), self.weight("down"))
        out = out.reshape(self.config.experts, batch, -1, hidden_size).transpose(0, 1)
        return out.to_global(
            sbp=(flow.sbp.split(0), flow.sbp.partial_sum), grad_sbp=(flow.sbp.split(1), flow.sbp.broadcast)
        ).flatten(1, 2)  # and back


class Head(StageModule):
    def __init__(self, config, stage, mesh):
        super().__init__(config, stage, mesh)
        self.add_weight("norm", "replicated", np.ones(config.hidden_size, np.float32))

    def forward(self, x, table):
        table = table.to_global(placement=self.mesh)  # tied: it is the embedding's
        x = self.gather_sequence(self.rms_norm(x, "norm"))
        return flow.matmul(x, table, transpose_b=True)


def normal(rng, *shape):
    return 0.05 * rng.standard_normal(shape, dtype=np.float32)


class GPT(flow.nn.Module):
    def __init__(self, meshes, config, vocab_size, seed):
        super().__init__()
        rng = np.random.default_rng(seed)  # all ranks draw the same weights
        self.config = config
        self.embedding = Embedding(config, 0, meshes[0], rng, vocab_size)
        self.blocks = flow.nn.ModuleList()
        for i in range(config.num_layers):
            stage = i * len(meshes) // config.num_layers
            self.blocks.append(Block(config, stage, meshes[stage], rng))
        self.head = Head(config, len(meshes) - 1, meshes[-1])

    def forward(self, ids, targets=None):
        """The logits, (seq_len, batch, vocab_size), of ids (batch, seq_len); with targets the loss."""
        x, table = self.embedding(ids)
        balance_losses = []
        for block in self.blocks:
            x, balance_loss = block(x)
            balance_losses.append(balance_loss)
        logits = self.head(x, table)
        if targets is None:
            return logits
        loss = cross_entropy(logits, targets, self.config.context_parallel)
        if self.config.experts:
            for balance_loss in balance_losses:
                loss = loss + BALANCE_COEF * balance_loss.to_global(placement=targets.placement)
        return loss


def cross_entropy(logits, targets, context_parallel):
    """The mean over all tokens. OneFlow keeps only two-dimensional logits split; flatten wants the split one first."""
    if context_parallel:
        targets = targets.transpose(0, 1)
    else:
        logits = logits.transpose(0, 1)
    logits = logits.flatten(0, 1)
    return flow._C.sparse_softmax_cross_entropy(logits, targets.flatten()).mean()


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(model.config.micro_batches)
        for part in [self.model.embedding, *self.model.blocks, self.model.head]:
            part.to(flow.nn.graph.GraphModule).set_stage(part.stage, part.mesh)
        for block in self.model.blocks:
            block.to(flow.nn.graph.GraphModule).activation_checkpointing = model.config.recompute == "full"

    def build(self, ids, targets):
        loss = self.model(ids, targets)
        loss.backward()  # in a graph this includes the update
        return loss


def eager_step(model, optimizer, ids, targets):
    """A step of training without a graph, one micro-batch after another; returns the loss."""
    micro_batches = model.config.micro_batches
    optimizer.zero_grad(set_to_none=True)
    total = 0
    for ids_part, targets_part in zip(np.split(ids, micro_batches), np.split(targets, micro_batches)):
        loss = model(model.embedding.to_mesh(ids_part), model.head.to_mesh(targets_part)) / micro_batches
        loss.backward()  # adds to the gradients
        total = total + loss.detach()
    if model.config.clip_grad:
        optimizer.clip_grad()
    optimizer.step()
    return total


def tokens_of(sums):
    """A line for each sum, such as 27+35=260; as indices into CHARACTERS."""
    numbers = [divmod(ab, 100) for ab in sums]
    lines = [f"{a:02}+{b:02}={f'{a + b:03}'[::-1]};" for a, b in numbers]
    return np.array([[CHARACTERS.index(character) for character in line] for line in lines])


def text_of(line):
    """A line as one reads it, such as 27+35=062."""
    text = "".join(CHARACTERS[token] for token in line[: LINE - 1])
    return text[:QUESTION] + text[QUESTION:][::-1]


def batch_of(config, seed, step):
    """The ids of a step and their targets. They depend on the step alone: a resumed job draws the same."""
    rng = np.random.RandomState([seed, step])  # draws the same with every version of numpy, unlike default_rng
    lines_per_row = config.seq_len // LINE + 1
    sums = SUMS[rng.randint(HELD_OUT, len(SUMS), config.batch_size * lines_per_row)]
    rows = tokens_of(sums).reshape(config.batch_size, -1)[:, : config.seq_len + 1]
    return rows[:, :-1], rows[:, 1:]


MOMENTS = {"exp_avg": "m", "exp_avg_sq": "v"}  # AdamW's, as an optimizer and as a graph calls them
GRAPH_STEP = "System-Train-TrainStep"  # the name under which a graph keeps the number of its steps


def training_state(step, model, optimizer, graph):
    """Weights and moments by the names of the parameters, the same in eager mode (graph None) and in a graph."""
    names = [name for name, _ in model.named_parameters()]
    state = {"step": step, "model": model.state_dict()}
    if graph:
        graph_state = graph.state_dict()
        for moment, letter in MOMENTS.items():
            state[moment] = {name: graph_state[f"model.{name}-{letter}"] for name in names}
    else:
        moments = optimizer.state_dict()["state"]
        for moment in MOMENTS:
            state[moment] = {name: moments[i][moment] for i, name in enumerate(names)}
    return state


def load_training_state(state, model, optimizer, graph):
    """What training_state returned, onto any mesh. A graph must not have been called yet."""
    names = [name for name, _ in model.named_parameters()]
    if graph:
        graph_state = {"model": state["model"]}
        for moment, letter in MOMENTS.items():
            graph_state.update({f"model.{name}-{letter}": state[moment][name] for name in names})
        rank_0 = flow.placement("cpu", [0])
        graph_state[GRAPH_STEP] = flow.tensor(
            [state["step"]], dtype=flow.int64, placement=rank_0, sbp=flow.sbp.broadcast
        )
        graph.load_state_dict(graph_state)
    else:
        model.load_state_dict(state["model"])
        moments = {i: {moment: state[moment][name] for moment in MOMENTS} for i, name in enumerate(names)}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {**moments, "step": state["step"]}})


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


def print_changes(saved, own):
    """The options in which a job that resumes differs from the one that saved."""
    for name in own:
        if saved.get(name) != own[name]:
            print(f"changed since then: {option_of(name)} {saved.get(name)} -> {own[name]}")


def answer(model, sums):
    """The lines that the model writes for sums, each digit the most likely one. All ranks call it."""
    config = model.config
    rows = config.batch_size // config.micro_batches  # at a time
    lines = tokens_of(sums)
    for begin in range(0, len(lines), rows):
        part = lines[begin : begin + rows]
        ids = np.zeros((rows, config.seq_len), int)
        for i in range(QUESTION, LINE - 1):
            ids[: len(part), :i] = part[:, :i]
            with flow.no_grad():
                logits = model(model.embedding.to_mesh(ids))
            logits = logits.numpy()[i - 1, : len(part), : len(CHARACTERS)]  # collective: all ranks call it
            part[:, i] = logits.argmax(-1)
    return lines


def train(
    meshes, config=None, graph=False, seed=0, steps=3, checkpoint_dir=None, save_every=100, keep=0, log_interval=0
):
    """Train up to a step, from the newest checkpoint on; returns the model and the loss of each step.

    meshes: what `placements` returns. log_interval: print the loss after every so many steps; 0: never.
    CheckpointError if the newest checkpoint cannot be used.
    """
    config = config or Config()
    config.check(meshes)
    vocab_size = math.ceil(len(CHARACTERS) / config.num_heads) * config.num_heads  # --tensor divides num_heads

    model = GPT(meshes, config, vocab_size, seed)
    clipping = {"clip_grad_max_norm": config.clip_grad, "clip_grad_norm_type": 2.0} if config.clip_grad else {}
    optimizer = flow.optim.AdamW([{"params": model.parameters(), **clipping}], lr=1e-3, weight_decay=0.01)
    training = TrainingGraph(model, optimizer) if graph else None
    done = 0
    if checkpoint_dir:
        checkpoints = Checkpoints(checkpoint_dir, keep, {"format": FORMAT, "seed": seed, **config.fixed()})
        done = checkpoints.newest()
    if done:
        state = flow.load(f"{checkpoint_dir}/{done}", global_src_rank=0)
        load_training_state(state, model, optimizer, training)
        if log_interval and flow.env.get_rank() == 0:
            print(f"resumes after step {done}, from {checkpoint_dir}/{done}")
            print_changes(state["config"], dataclasses.asdict(config))
        del state  # on rank 0 it holds each whole tensor

    losses, begin = [], time.monotonic()
    for step in range(done + 1, steps + 1):
        ids, targets = batch_of(config, seed, step)
        if graph:
            loss = training(model.embedding.to_mesh(ids), model.head.to_mesh(targets))
        else:
            loss = eager_step(model, optimizer, ids, targets)
        losses.append(loss.numpy().mean())  # collective: all ranks call it; a graph has one for each micro-batch
        if log_interval and flow.env.get_rank() == 0 and (step % log_interval == 0 or step == steps):
            rate = ids.size * (step - done) / (time.monotonic() - begin)
            print(f"step {step}  loss {losses[-1]:.3f}  {rate:.0f} tokens/s", flush=True)
        if checkpoint_dir and (step % save_every == 0 or step == steps):
            state = training_state(step, model, optimizer, training)
            checkpoints.save({**state, "config": dataclasses.asdict(config)}, step)
    return model, losses


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", type=int, default=0, help="ranks along the data axis (default: all that are left)")
    parser.add_argument("--tensor", type=int, default=1, help="ranks along the tensor axis")
    parser.add_argument("--pipeline", type=int, default=1, help="stages; they overlap in a graph with micro-batches")
    parser.add_argument("--context-parallel", action="store_true", help="along data split the sequence, not the batch")
    parser.add_argument("--sequence-parallel", action="store_true", help="split the residual along the tensor axis")
    parser.add_argument("--recompute", choices=["none", "full"], default="none", help="full: blocks again in backward")
    parser.add_argument("--shard-weights", action="store_true", help="split weights along the data axis (FSDP)")
    parser.add_argument("--experts", type=int, default=0, help="experts for each MLP, split along data; 0: none")
    sizes = ["num_layers", "hidden_size", "num_heads", "seq_len", "batch_size", "micro_batches"]
    for name in sizes:
        parser.add_argument(option_of(name), type=int, default=getattr(Config, name))
    parser.add_argument("--clip-grad", type=float, default=0.0, help="clip the gradients to this norm; 0: do not clip")
    parser.add_argument("--steps", type=int, default=400, help="train up to this step")
    parser.add_argument("--checkpoint-dir", help="save checkpoints here, and resume from the newest")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--keep", type=int, default=0, help="how many checkpoints to keep, the newest; 0: all")
    parser.add_argument("--check", action="store_true", help="train on one rank too, and compare the first losses")
    args = parser.parse_args()
    for name in [*sizes, "tensor", "pipeline", "save_every"]:
        if getattr(args, name) < 1:
            parser.error(f"{option_of(name)} {getattr(args, name)}: 1 or more")
    if args.keep < 0:
        parser.error(f"--keep {args.keep}: 0 or more")
    if args.checkpoint_dir == "":
        parser.error("--checkpoint-dir is empty")
    if args.recompute == "full" and not args.graph:
        parser.error("--recompute full: OneFlow does that in a graph alone; add --graph")

    config = Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})
    try:
        meshes = placements(args.device, flow.env.get_world_size(), args.data, args.tensor, args.pipeline)
        config.check(meshes)
    except ValueError as error:
        parser.error(str(error))  # each rank ends with this line before it waits for another
    return parser, args, meshes, config


def main():
    parser, args, meshes, config = parse_arguments()
    checkpoints = {"checkpoint_dir": args.checkpoint_dir, "save_every": args.save_every, "keep": args.keep}
    try:
        model, losses = train(meshes, config, args.graph, steps=args.steps, **checkpoints, log_interval=10)
    except CheckpointError as error:
        parser.error(str(error))  # on all ranks

    weights = list(model.parameters())
    print(f"{sum(w.to_local().numel() for w in weights):,} of {sum(w.numel() for w in weights):,} weights")
    held_out = SUMS[:HELD_OUT]
    lines = answer(model, held_out)
    if flow.env.get_rank() == 0:
        print(*(text_of(line) for line in lines[:8]))
        right = (lines == tokens_of(held_out)).all(1).sum()
        print(f"{right} of {HELD_OUT} sums that it was not trained on are right")
    done = args.steps - len(losses)  # in an earlier run
    last = min(args.steps, 50)  # later the loss falls steeply, and rounding shifts the fall
    if args.check and done < last:
        _, alone = train(placements(args.device, 1), config, args.graph, steps=last)
        np.testing.assert_allclose(losses[: last - done], alone[done:], rtol=1e-4)
        if flow.env.get_rank() == 0:
            print(f"the losses of steps {done + 1} to {last} are those of a single rank")


if __name__ == "__main__":
    main()
