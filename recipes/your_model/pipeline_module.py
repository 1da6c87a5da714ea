"""Pipeline module: assign the parts of an unedited model to stages by index.

    two stages of two parts              rank 0     rank 1     SBP
    ids                   (8, 4)         whole      nothing    B
    targets               (8)            nothing    whole      B
    embedding.weight      (12, 8)        whole      nothing    B
    blocks.0.up.weight    (32, 8)        whole      nothing    B
    blocks.1.up.weight    (32, 8)        nothing    whole      B
    head.weight           (5, 8)         nothing    whole      B

Each part first moves its inputs to its stage: its __class__ becomes a subclass whose forward does so. In a graph with
micro-batches parameters must also be read through flow._C.identity: otherwise a layer may read them while the optimizer
changes them, silently (OneFlow 0.9.0).

Why:   a layer needs nothing of the others but its input, so only one activation crosses a boundary.
Moves: forward each stage's output, backward its gradient, (batch, seq_len, hidden_size) between neighbours.
Run:   ./launch.sh recipes/your_model/pipeline_module.py [--graph] [--micro-batches 4]
Use it when your model has many layers, or links are slow.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965.
"""

import argparse
import dataclasses

import numpy as np
import oneflow as flow
from graph_safe import prepare_for_graph  # the file beside this one: copy both
from oneflow import nn

# flow._oneflow_internal is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (2, 1, 3, 4)  # numbers of ranks; launch.sh refuses others


class Block(nn.Module):
    def __init__(self, hidden_size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """An ordinary text classifier; nothing in it refers to ranks."""

    def __init__(self, vocab_size=12, hidden_size=8, num_layers=2, num_classes=5, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList([Block(hidden_size, dropout) for _ in range(num_layers)])
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def assign_stages(model, parts, stages):
    """Put the parts of a model, in the order of its forward, on stages; returns the number of each part's stage.

    The Parameter objects stay, so an optimizer may hold them already, and frozen and tied weights stay so.
    """
    if len(parts) < len(stages):
        raise ValueError(f"{len(parts)} parts for {len(stages)} stages: each stage needs a part")
    stage_of = [k * len(stages) // len(parts) for k in range(len(parts))]
    check_parts(model, parts, stage_of)
    laid_out = {}  # (buffer, stage) -> its global tensor: a buffer that two modules of a stage share stays one
    for part, k in zip(parts, stage_of):
        for parameter in part.parameters():
            if not parameter.is_global or parameter.placement != stages[k]:  # a tied one may be there already
                parameter.data = parameter.detach().to_global(placement=stages[k], sbp=flow.sbp.broadcast)
        for layer in part.modules():
            for name, buffer in layer._buffers.items():
                if buffer is not None and (not buffer.is_global or buffer.placement != stages[k]):
                    if (buffer, k) not in laid_out:
                        laid_out[buffer, k] = buffer.to_global(placement=stages[k], sbp=flow.sbp.broadcast)
                    layer._buffers[name] = laid_out[buffer, k]
        move_inputs(part, stages[k])
    prepare_for_graph(model)
    return stage_of


def check_parts(model, parts, stage_of):
    """Raises ValueError if a parameter or buffer is in no part, or a parameter on two stages, before any change."""
    stages, buffers, problems = {}, set(), []
    names = {part: name for name, part in model.named_modules()}
    for part, k in zip(parts, stage_of):
        buffers.update(id(buffer) for buffer in part.buffers())  # one in two parts becomes two
        for name, parameter in part.named_parameters():
            first = stages.setdefault(id(parameter), k)
            if first != k:
                problems.append(
                    f"{names.get(part, type(part).__name__)}.{name}, on stage {k}, is tied to a weight on stage "
                    f"{first}: pass the weight to the later part as an argument"
                )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in stages and id(tensor) not in buffers:
            problems.append(f"{name} is in none of the parts")
    if problems:
        raise ValueError("; ".join(problems))


def move_inputs(part, ranks):
    """Make a part of a model move all tensors that it is called with to its ranks."""
    kind = type(part)

    def forward(self, *args, **kwargs):
        args, kwargs = moved(args, ranks), moved(kwargs, ranks)
        before = [*items_of(args), *items_of(kwargs)]
        out = kind.forward(self, *args, **kwargs)
        after = [*items_of(args), *items_of(kwargs)]
        is_changed = len(before) != len(after) or any(old is not new for old, new in zip(before, after))
        if is_changed and flow._oneflow_internal.lazy_mode.is_enabled():  # a stage of a graph gets a copy
            raise RuntimeError(f"{kind.__name__}.forward changes an argument, which nn.Graph loses; return it instead")
        return out

    part.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def moved(value, ranks):
    """Move all tensors in a value to other ranks: a tensor, or a list, tuple, dict or dataclass of such values.

    A list, dict or dataclass stays the caller's own, as the part may change it.
    """
    if isinstance(value, flow.Tensor):
        return value.to_global(placement=ranks)
    if isinstance(value, tuple):
        items = [moved(item, ranks) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        value[:] = [moved(item, ranks) for item in value]
    elif isinstance(value, dict):
        value.update({key: moved(item, ranks) for key, item in value.items()})
    elif dataclasses.is_dataclass(value):
        moved(vars(value), ranks)
    return value


def items_of(value):
    """A value, and all values in it."""
    inside = vars(value) if dataclasses.is_dataclass(value) else value
    inside = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, (list, tuple)) else ()
    return [value, *(item for each in inside for item in items_of(each))]


def parts_of(model):
    """The parts to place on stages. For an nn.Sequential this would be list(model)."""
    return [model.embedding, *model.blocks, model.head]


class TrainingGraph(nn.Graph):
    def __init__(self, model, stage_of, stages, optimizer, micro_batches):
        super().__init__()
        self.model = model
        for part, k in zip(parts_of(self.model), stage_of):
            part.to(nn.graph.GraphModule).set_stage(k, stages[k])
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, ids, targets):
        loss = nn.functional.cross_entropy(self.model(ids), targets)
        loss.backward()  # in a graph this includes the mean over micro-batches and the update
        return loss


def placements(device, n):
    """The ranks of each stage: one rank a stage."""
    return [flow.placement(device, [rank]) for rank in range(n)]


def train(stages, graph=False, seed=0, steps=20, optimizer="momentum", micro_batches=2, batch=8, hidden_size=8):
    """Train in float32 on a placement for each stage; returns the model and the loss of each step."""
    if batch % micro_batches:  # parts of different sizes would count the same
        raise ValueError(f"{micro_batches} micro-batches must divide the {batch} rows of a batch")
    flow.manual_seed(seed)
    model = Classifier(hidden_size=hidden_size)
    stage_of = assign_stages(model, parts_of(model), stages)
    rng = np.random.default_rng(seed)
    ids = flow.tensor(rng.integers(12, size=(batch, 4)), placement=stages[0], sbp=flow.sbp.broadcast)
    targets = flow.tensor(rng.integers(5, size=batch), placement=stages[-1], sbp=flow.sbp.broadcast)
    if optimizer == "adam":
        optimizer = flow.optim.Adam(model.parameters(), lr=0.01)
    else:
        optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = TrainingGraph(model, stage_of, stages, optimizer, micro_batches) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(ids, targets).mean()  # of the micro-batches
        else:
            loss = 0
            for ids_part, targets_part in zip(ids.chunk(micro_batches), targets.chunk(micro_batches)):
                loss = loss + nn.functional.cross_entropy(model(ids_part), targets_part) / micro_batches
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batches", type=int, choices=[1, 2, 4, 8], default=2)
    parser.add_argument("--optimizer", choices=["adam", "momentum"], default="momentum")
    args = parser.parse_args()

    n = flow.env.get_world_size()
    options = {"optimizer": args.optimizer, "micro_batches": args.micro_batches}
    model, losses = train(placements(args.device, n), args.graph, **options)
    held = [name for name, w in model.named_parameters() if w.to_local().numel()]
    print(f"{len(held)} of {len(list(model.parameters()))} parameters: {held[0]} to {held[-1]}")
    _, alone = train([flow.placement(args.device, [0])] * n, args.graph, **options)  # on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
