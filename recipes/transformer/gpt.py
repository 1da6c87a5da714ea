"""GPT: one model whose layout is a table: data, tensor, sequence, pipeline parallel, fully sharded.

    kind of tensor       shape                      along data    along tensor
    ids                  (batch, length)            S(0)          B
    batch, residual      (length, batch, width)     S(1)          B       --sequence-parallel: residual S(1), S(0)
    vocabulary           (letters, width)           B             S(0)    --shard-weights: S(1), S(0)
    column weight        (width, more)              B             S(1)    --shard-weights: S(0), S(1)
    row weight           (more, width)              B             S(0)    --shard-weights: S(1), S(0)
    norms, positions     (width), (length, width)   B             B

Stage k of a pipeline has the k-th part of the ranks and of the layers. It learns to write Python's documentation.
Moves: data: all-reduce of the gradients; sharded: all-gather and reduce-scatter of the weights. Tensor: in each layer 2
       all-reduces forward, 2 backward, or all-gathers and reduce-scatters of the sequence. Pipeline: the residual.
Run:   ./launch.sh recipes/transformer/gpt.py [--graph] [--tensor 2] [--steps 1000] [--folder FOLDER]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/transformer/gpt.py [--graph]
Use it where the layout may change from run to run: training continues from a checkpoint on any other mesh.
Source: D. Narayanan et al., arXiv:2104.04473; V. Korthikanti et al., arXiv:2205.05198.
"""

import argparse
import os
import pydoc_data.topics
import time

import numpy as np
import oneflow as flow

WORLD_SIZES = (2, 1, 4, 8, 16)
B, S = flow.sbp.broadcast, flow.sbp.split
LAYOUT = {  # SBPs along the data and the tensor axis of a stage's mesh
    "ids": (S(0), B),
    "batch": (S(1), B),
    "residual": (S(1), B),
    "vocabulary": (B, S(0)),
    "column": (B, S(1)),
    "row": (B, S(0)),
    "whole": (B, B),
}
SEQUENCE_PARALLEL = {"residual": (S(1), S(0))}
SHARDED = {"vocabulary": (S(1), S(0)), "column": (S(0), S(1)), "row": (S(1), S(0))}  # of weights that are not in use


class Part(flow.nn.Module):
    def __init__(self, stage, mesh, layout, at_rest, heads, rng, **weights):
        super().__init__()
        self.stage, self.mesh, self.layout, self.heads, self.weights = stage, mesh, layout, heads, weights
        for name, (kind, *shape) in weights.items():
            array = 0.05 * rng.standard_normal(shape, dtype=np.float32) if shape[1:] else np.ones(shape, np.float32)
            setattr(self, name, flow.nn.Parameter(flow.tensor(array, placement=mesh, sbp=at_rest[kind])))

    def weight(self, name):
        # without identity a graph that gathers a parameter aborts, and one with micro-batches may update it wrongly
        weight, sbp = flow._C.identity(getattr(self, name)), self.layout[self.weights[name][0]]
        return weight if weight.sbp == sbp else weight.to_global(sbp=sbp, grad_sbp=weight.sbp)

    def normed(self, x, name):
        x = x - x.mean(-1, keepdim=True).expand(*x.shape)  # nn.LayerNorm, or - without expand, is slow on a CPU
        x = x / flow.sqrt((x * x).mean(-1, keepdim=True) + 1e-5).expand(*x.shape) * self.weight(name)
        return x.to_global(sbp=self.layout["batch"], grad_sbp=self.layout["residual"])  # the whole sequence

    def summed(self, x):
        return x.to_global(sbp=self.layout["residual"], grad_sbp=self.layout["batch"])  # of partial sums


class Embedding(Part):
    def forward(self, ids):
        table = self.weight("tokens")
        x = flow._C.gather(table, ids.transpose(0, 1), 0)  # the gradient of table[ids] is wrong, silently
        return self.summed(x) + self.weight("positions").unsqueeze(1), table


class Block(Part):
    def forward(self, x):
        x = x.to_global(placement=self.mesh)
        length, batch, width = x.shape  # in a graph, of a micro-batch
        qkv = flow.matmul(self.normed(x, "norm"), self.weight("qkv"))  # columns head by head: nothing moves
        q, k, v = qkv.reshape(length, batch, self.heads, 3 * width // self.heads).permute(1, 2, 0, 3).chunk(3, -1)
        sbp = self.layout["whole"]
        future = flow._C.global_constant((length, length), -1e9, dtype=x.dtype, placement=self.mesh, sbp=sbp).triu(1)
        scores = flow.matmul(q, k.transpose(2, 3)) * (width // self.heads) ** -0.5 + future  # where() would gather
        values = flow.matmul(scores.softmax(-1), v).permute(2, 0, 1, 3).reshape(length, batch, width)
        x = x + self.summed(flow.matmul(values, self.weight("project")))
        hidden = flow.nn.functional.gelu(flow.matmul(self.normed(x, "norm_mlp"), self.weight("up")))
        return x + self.summed(flow.matmul(hidden, self.weight("down")))


class Head(Part):
    def forward(self, x, table):
        table = table.to_global(placement=self.mesh)  # tied: it is the embedding's
        return flow.matmul(self.normed(x, "norm"), table.transpose(0, 1))


class GPT(flow.nn.Module):
    def __init__(self, meshes, layout, at_rest, letters, length, layers, width, heads, seed):
        super().__init__()
        rng = np.random.default_rng(seed)  # all ranks draw the same weights
        where = [(stage, mesh, layout, at_rest, heads, rng) for stage, mesh in enumerate(meshes)]
        own = {"norm": ("whole", width), "qkv": ("column", width, 3 * width), "project": ("row", width, width)}
        own.update(norm_mlp=("whole", width), up=("column", width, 4 * width), down=("row", 4 * width, width))
        self.embedding = Embedding(*where[0], tokens=("vocabulary", letters, width), positions=("whole", length, width))
        self.blocks = flow.nn.ModuleList(Block(*where[i * len(meshes) // layers], **own) for i in range(layers))
        self.head = Head(*where[-1], norm=("whole", width))

    def forward(self, ids, targets=None):
        x, table = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x, table)
        if targets is None:
            return logits  # (length, batch, letters)
        logits = logits.transpose(0, 1).flatten(0, 1)  # the loss keeps only two-dimensional logits split
        return flow._C.sparse_softmax_cross_entropy(logits, targets.flatten()).mean()


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer, micro_batches):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)
        for part in [self.module.embedding, *self.module.blocks, self.module.head]:
            part.to(flow.nn.graph.GraphModule).set_stage(part.stage, part.mesh)

    def build(self, ids, targets):
        loss = self.module(ids, targets)
        loss.backward()  # in a graph this includes the update
        return loss


def save(state, folder, step):
    flow.save(state, f"{folder}/unfinished", global_dst_rank=0)  # gathers each tensor: all ranks call it
    if flow.env.get_rank() == 0:
        os.sync()  # everything is on disk before it gets its name
        os.replace(f"{folder}/unfinished", f"{folder}/{step}")


def run(
    graph=False, device="cpu", seed=0, steps=3, data=0, tensor=1, pipeline=1, sequence_parallel=False,
    shard_weights=False, micro_batches=1, clip=0.0, folder="", every=100, sample=0, report=False,
    batch=16, length=48, layers=4, width=96, heads=4
):  # fmt: skip
    """Train up to a step, from the last checkpoint on; returns weights, losses (also of the next batch), letters."""
    n, rank, refuse = flow.env.get_world_size(), flow.env.get_rank(), argparse.ArgumentParser().error  # exit code 2
    data = data or max(1, n // (tensor * pipeline))
    if data * tensor * pipeline != n:
        refuse(f"data {data} x tensor {tensor} x pipeline {pipeline} must be the number of ranks, {n}")
    for option, parts, what, size in (
        ("--data", data, "rows of a batch", batch),
        ("--micro-batches", micro_batches, "rows of a batch on each rank", batch // data),
        ("--tensor", tensor, "heads", heads),
        ("--tensor", tensor if sequence_parallel else 1, "letters of a sequence", length),
        ("--data", data if shard_weights else 1, "columns of a weight", width),
        ("--pipeline", pipeline, "layers", layers),
    ):
        if size % parts:  # each rank ends with this line, before it waits for another
            fit = ", ".join(str(part) for part in range(1, size + 1) if size % part == 0)
            refuse(f"{option} {parts} does not divide the {size} {what}; these do: {fit}")

    letters, text = np.unique(list("".join(pydoc_data.topics.topics.values())), return_inverse=True)
    sizes = (-(-len(letters) // heads) * heads, length, layers, width, heads, seed)  # letters that --tensor divides
    meshes = [flow.placement(device, ranks.tolist()) for ranks in np.arange(n).reshape(pipeline, data, tensor)]
    layout = {**LAYOUT, **(SEQUENCE_PARALLEL if sequence_parallel else {})}
    module = GPT(meshes, layout, {**layout, **(SHARDED if shard_weights else {})}, *sizes)
    clipping = {"clip_grad_max_norm": clip, "clip_grad_norm_type": 2.0} if clip else {}
    optimizer = flow.optim.AdamW([{"params": module.parameters(), **clipping}], lr=1e-3, weight_decay=0.01)
    model = TrainingGraph(module, optimizer, micro_batches) if graph else module
    saved = [int(name) for name in (os.listdir(folder) if os.path.isdir(folder) else []) if name.isdecimal()]
    first = max(saved, default=0)
    if first:
        state = flow.load(f"{folder}/{first}", global_src_rank=0)
        if graph:
            model.load_state_dict(state)  # before the first call of the graph
        else:
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])

    def call(model, *rows):  # ids and targets, which the first and the last stage want
        own = [flow.tensor(np.split(ids, data)[rank // tensor % data], device=device) for ids in rows]
        return model(*[x.to_global(placement=meshes[-i], sbp=layout["ids"]) for i, x in enumerate(own)])

    def batch_of(step):  # of the step alone, so that a job that goes on draws the same
        starts = np.random.default_rng([seed, step]).integers(len(text) - length, size=(batch, 1))
        return text[starts + np.arange(length + 1)]

    losses, began = [], time.monotonic()
    for step in range(first + 1, steps + 1):
        parts = [batch_of(step)] if graph else np.split(batch_of(step), micro_batches)  # a graph splits by itself
        losses.append(0)
        for rows in parts:
            loss = call(model, rows[:, :-1], rows[:, 1:])
            if not graph:
                (loss / micro_batches).backward()  # adds to .grad
            losses[-1] += loss.detach().numpy().mean() / len(parts)  # collective: all ranks call it
        if not graph:
            if clip:
                optimizer.clip_grad()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if report and rank == 0 and (step % 10 == 0 or step == steps):
            pace = (time.monotonic() - began) / (step - first)
            line = f"step {step}  loss {losses[-1]:.3f}  {batch * length / pace:.0f} tokens/s  "
            print(line + f"{pace * (steps - step):.0f} s left", flush=True)
        if folder and (step % every == 0 or step == steps):
            eager = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
            save(model.state_dict() if graph else eager, folder, step)

    with flow.no_grad():
        rows, rng, seen = batch_of(steps + 1), np.random.default_rng(seed), [0]
        losses.append(call(module, rows[:, :-1], rows[:, 1:]).numpy())
        alone = GPT([flow.placement(device, [[0]])], LAYOUT, LAYOUT, *sizes)
        alone.load_state_dict(module.state_dict())
        ids = flow.tensor(rows, placement=alone.head.mesh, sbp=LAYOUT["ids"])
        same = alone(ids[:, :-1], ids[:, 1:])
        for _ in range(sample):
            last = seen[-length:]
            logits = call(module, np.array([last + [0] * (length - len(last))] * data)).numpy()[len(last) - 1, 0]
            chances = np.exp(logits[: len(letters)].astype(float)).cumsum()
            seen.append(int(np.searchsorted(chances, rng.random() * chances[-1])))
    print("".join(letters[i] for i in seen[1:])) if report and rank == 0 and sample else None
    losses, seen = (flow.tensor(np.array(x), placement=flow.placement.all(device), sbp=B) for x in (losses, seen))
    return {**dict(module.named_parameters()), "losses": losses, "loss alone": same, "drawn": seen}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the model inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", type=int, default=0, help="ranks along the data axis (default: all that are left)")
    parser.add_argument("--tensor", type=int, default=1, help="ranks along the tensor axis")
    parser.add_argument("--pipeline", type=int, default=1, help="stages")
    parser.add_argument("--sequence-parallel", action="store_true", help="split the residual along the tensor axis")
    parser.add_argument("--shard-weights", action="store_true", help="split weights along the data axis (FSDP)")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument("--folder", default="", help="save checkpoints here, and go on from the last one")
    parser.add_argument("--every", type=int, default=100, help="save after every so many steps")
    parser.add_argument("--sample", type=int, default=200, help="write so many letters at the end")
    tensors = run(**vars(parser.parse_args()), report=True)

    *_, loss = tensors["losses"].numpy()  # collective: all ranks call it
    np.testing.assert_allclose(loss, tensors["loss alone"].numpy(), rtol=1e-4)
    if flow.env.get_rank() == 0:
        print(f"the loss of the next batch, {loss:.4f}, is that of the same weights on a single rank")


if __name__ == "__main__":
    main()
