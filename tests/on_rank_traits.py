"""Models with one unusual trait each, trained under a layout and on one device by the same loop."""

import copy
import dataclasses
import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import oneflow as flow
from oneflow import nn

from oneflow_cookbook.measure.tensors import layout_of
from oneflow_cookbook.start import recipe

B, S = flow.sbp.broadcast, flow.sbp.split
RESHARDED = "fully sharded, resharded after forward"
VOCAB, HIDDEN, CLASSES, ROWS, LENGTH = 12, 8, 6, 8, 4


class Block(nn.Module):
    def __init__(self, up=None):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = up or nn.Linear(HIDDEN, 16)
        self.down = nn.Linear(16, HIDDEN)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """An embedding, two blocks and a head: the model that each trait changes in one place."""

    def __init__(self, blocks=None, head=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(blocks or [Block(), Block()])
        self.head = head or nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def parts_of(model):
    return [model.embedding, *model.blocks, model.head]


TRAITS = {}


def trait(make):
    TRAITS[make.__name__.lower()] = make
    return make


@trait
def plain():
    return Plain()


@trait
def frozen():
    model = Plain()
    for parameter in [*model.embedding.parameters(), *model.blocks[0].up.parameters()]:
        parameter.requires_grad = False
    return model


class Adapter(nn.Linear):
    """LoRA: a low-rank part beside a frozen weight."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__(inputs, outputs)
        self.weight.requires_grad = False
        self.a = nn.Parameter(flow.randn(rank, inputs))
        self.b = nn.Parameter(flow.randn(outputs, rank))

    def forward(self, x):
        return super().forward(x) + flow.matmul(flow.matmul(x, self.a, transpose_b=True), self.b, transpose_b=True)


@trait
def adapter():
    return Plain([Block(Adapter(HIDDEN, 16)), Block(Adapter(HIDDEN, 16))])


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.5, self.bias)


@trait
def linear_with_its_own_forward():
    return Plain([Block(ScaledLinear(HIDDEN, 16)), Block()])


@trait
def no_bias():
    model = Plain([Block(nn.Linear(HIDDEN, 16, bias=False)), Block()], nn.Linear(HIDDEN, CLASSES, bias=False))
    model.blocks[1].down = nn.Linear(16, HIDDEN, bias=False)
    return model


class Pair(nn.Module):
    """Two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.second.weight = self.first.weight

    def forward(self, x):
        return x + self.second(flow.relu(self.first(x)))


@trait
def tied_on_one_stage():
    return Plain([Pair(), Block()])


class TiedEmbedding(Plain):
    def __init__(self):
        super().__init__(head=nn.Linear(HIDDEN, VOCAB, bias=False))
        self.head.weight = self.embedding.weight


@trait
def tied_on_two_stages():
    return TiedEmbedding()


class CalledTwice(Plain):
    def forward(self, ids):
        x = self.blocks[0](self.blocks[0](self.embedding(ids)))
        return self.head(self.blocks[1](x).mean(1))


@trait
def shared_module():
    return CalledTwice()


class Scaled(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("scale", flow.arange(HIDDEN).float() / 4, persistent=persistent)

    def forward(self, x):
        return self.linear(x) * self.scale


@trait
def buffer():
    return Plain([Scaled(True), Scaled(False)])


class Rotary(nn.Module):
    """Rotary position embedding from a table that is a buffer."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        angles = np.outer(np.arange(LENGTH), 0.5 ** np.arange(HIDDEN // 2))
        self.register_buffer("cos", flow.tensor(np.cos(angles).astype(np.float32)))
        self.register_buffer("sin", flow.tensor(np.sin(angles).astype(np.float32)))

    def forward(self, x):
        a, b = flow.chunk(self.proj(x), 2, dim=-1)
        return flow.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)


@trait
def rotary_table():
    return Plain([Rotary(), Block()])


class Mixer(nn.Module):
    """Parameters of its own, which belong to no layer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(flow.ones(HIDDEN))
        self.mix = nn.Parameter(flow.randn(HIDDEN, HIDDEN) * 0.3)

    def forward(self, x):
        return x + flow.matmul(x * self.gain, self.mix)


@trait
def own_parameters():
    return Plain([Mixer(), Mixer()])


class Positions(Plain):
    """A parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(flow.randn(LENGTH, HIDDEN))

    def forward(self, ids):
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@trait
def root_parameter():
    return Positions()


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(flow.randn(HIDDEN, HIDDEN) * 0.3) for _ in range(2)])

    def forward(self, x):
        return flow.matmul(flow.relu(flow.matmul(x, self.weights[0])), self.weights[1])


@trait
def parameter_list():
    return Plain([Listed(), Block()])


class Reader(nn.Module):
    """Reads the weight of a layer without calling that layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight) + self.inner.bias


@trait
def weight_of_another_layer():
    return Plain([Reader(), Block()])


class Masked(Block):
    def forward(self, x, mask=None, scale=1.0):
        out = self.down(nn.functional.gelu(self.up(self.norm(x)))) * scale
        return x + (out if mask is None else out * mask)


class WithKeywords(Plain):
    def __init__(self):
        super().__init__([Masked(), Masked()])

    def forward(self, ids):
        x = self.embedding(ids)
        mask = (ids > 3).to(flow.float32).unsqueeze(-1)
        x = self.blocks[0](x, mask=mask, scale=0.5)
        return self.head(self.blocks[1](x, mask=None).mean(1))


@trait
def keywords_and_none():
    return WithKeywords()


class Splits(Block):
    def forward(self, x):
        return x, self.down(nn.functional.gelu(self.up(self.norm(x))))


class Joins(Block):
    def forward(self, pair):
        x, y = pair
        return x + self.down(flow.relu(self.up(self.norm(y))))


@trait
def tuple_between_parts():
    return Plain([Splits(), Joins()])


class State(NamedTuple):
    x: object
    y: object


@dataclasses.dataclass
class Data:
    x: object
    y: object
    name: str = "state"


class SplitsDict(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = nn.Linear(HIDDEN, HIDDEN), kind

    def forward(self, x):
        return self.kind(x=x, y=self.inner(x))


class JoinsDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state):
        x, y = (state["x"], state["y"]) if isinstance(state, dict) else (state.x, state.y)
        return x + flow.relu(self.inner(y))


@trait
def dict_between_parts():
    return Plain([SplitsDict(dict), JoinsDict()])


@trait
def named_tuple_between_parts():
    return Plain([SplitsDict(State), JoinsDict()])


@trait
def dataclass_between_parts():
    return Plain([SplitsDict(Data), JoinsDict()])


class Keeps(Block):
    """Keeps an auxiliary loss in self, which the model reads."""

    def forward(self, x):
        out = self.down(nn.functional.gelu(self.up(self.norm(x))))
        self.auxiliary = out.square().mean()
        return x + out


class WithKept(Plain):
    def __init__(self):
        super().__init__([Keeps(), Block()])


@trait
def value_kept_in_self():
    return WithKept()


class Counts(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(flow.relu(self.up(self.norm(x)))) / self.calls


@trait
def counter_in_self():
    return Plain([Counts(), Block()])


@trait
def forward_hook():
    model = Plain()
    model.blocks[0].register_forward_hook(lambda module, inputs, out: out * 0.5)
    return model


@trait
def weight_norm():
    return Plain([Block(nn.utils.weight_norm(nn.Linear(HIDDEN, 16))), Block()])


def with_pre_hook(hook, raw=True):
    """A model with a layer whose weight a hook computes before forward. raw: from a parameter of this name."""
    layer = nn.Linear(HIDDEN, 16)
    if raw:
        layer.raw = nn.Parameter(layer.weight.detach().clone())
    layer.register_forward_pre_hook(hook)
    return Plain([Block(layer), Block()])


def set_weight(layer, inputs):
    layer.weight = layer.raw * 2.0


@trait
def weight_that_a_hook_sets():
    """In PyTorch, spectral_norm does so. There is no weight before the first step."""
    model = with_pre_hook(set_weight)
    del model.blocks[0].up._parameters["weight"]
    return model


def put_data(layer, inputs):
    layer.weight.data = (layer.raw * 2.0).detach()


@trait
def parameter_whose_data_a_hook_sets():
    return with_pre_hook(put_data)


def look(layer, inputs):
    assert inputs[0].shape[-1] == HIDDEN


class KeepsOutput(nn.Linear):
    def forward(self, x):
        self.output = super().forward(x)
        return self.output


@trait
def pre_hook_that_looks():
    model = with_pre_hook(look, raw=False)
    model.blocks[0].up.__class__ = KeepsOutput
    return model


class Squared(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.original = nn.Parameter(weight)

    def forward(self):
        return self.original * self.original


class Parametrized(nn.Linear):
    """What torch.nn.utils.parametrize makes of a Linear."""

    def __init__(self):
        super().__init__(HIDDEN, 16)
        self.parametrizations = nn.ModuleDict({"weight": Squared(self._parameters.pop("weight").detach())})

    @property
    def weight(self):
        return self.parametrizations.weight()


@trait
def parametrized():
    return Plain([Block(Parametrized()), Block()])


class SuperNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 0.5


class SuperBlock(Block):
    def __init__(self):
        super().__init__()
        self.norm = SuperNorm(HIDDEN)

    def forward(self, x):
        return super().forward(x) * 2


@trait
def super_forward():
    return Plain([SuperBlock(), Block()])


class Vision(nn.Module):
    """Convolutions on the embedded words."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.norm = nn.GroupNorm(2, HIDDEN)

    def forward(self, x):
        return x + flow.relu(self.norm(self.conv(x.permute(0, 2, 1)))).permute(0, 2, 1)


@trait
def convolution():
    return Plain([Vision(), Block()])


class Sliced(Plain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids):
        x = self.blocks[:1](self.embedding(ids))
        return self.head(self.blocks[1:](x).mean(1))


@trait
def sliced_sequential():
    return Sliced()


class Normed(Plain):
    """Methods of its own, a property, and train and eval."""

    def pool(self, x):
        return x.mean(1) * self.factor

    @property
    def factor(self):
        return 2.0 if self.training else 1.0

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(x))


@trait
def methods_and_train_mode():
    return Normed()


class WithScale(Block):
    """A parameter without dimensions, and a buffer that both blocks hold."""

    scale = flow.tensor([0.0] + [1.0] * (HIDDEN - 1))

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(flow.tensor(0.5))
        self.register_buffer("mask", WithScale.scale)

    def forward(self, x):
        return super().forward(x) * self.mask * self.temperature


@trait
def scalar_parameter_and_shared_buffer():
    return Plain([WithScale(), WithScale()])


class CountsInPlace(Block):
    """A buffer that forward changes in place."""

    def __init__(self, total):
        super().__init__()
        self.register_buffer("total", total)

    def forward(self, x):
        self.total.add_(0.1)
        return super().forward(x) * self.total


@trait
def buffer_changed_in_place():
    return Plain([CountsInPlace(flow.ones(1)), Block()])


class CountsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        total = flow.ones(1)
        self.first, self.second = CountsInPlace(total), CountsInPlace(total)

    def forward(self, x):
        return self.second(self.first(x))


@trait
def shared_buffer_changed_in_place():
    return Plain([CountsTwice(), Block()])


@trait
def max_norm():
    model = Plain()
    model.embedding = nn.Embedding(VOCAB, HIDDEN, max_norm=1.0)
    return model


@dataclasses.dataclass
class Seen:
    x: object = None


class Collects(Block):
    """Changes a list, a dict and a dataclass that it is called with, and reads what others put there."""

    def forward(self, x, means, counts, state):
        means.append(x.mean(dim=2, keepdim=True))  # of each row, as a graph has micro-batches
        counts["blocks"] = counts.get("blocks", 0) + 1
        counts["last"] = x
        state.x = x + sum(means) + counts["blocks"]
        return super().forward(x)


class PassesCollections(Plain):
    def forward(self, ids):
        x, means, counts, state = self.embedding(ids), [], {}, Seen()
        for block in self.blocks:
            x = block(x, means, counts, state)
        return self.head((x + state.x + counts["last"]).mean(1))


@trait
def collections_that_parts_change():
    return PassesCollections([Collects(), Collects()])


class PassesWeight(Plain):
    """The head reads the weight of the embedding, which it is called with."""

    def __init__(self):
        super().__init__(head=OutputHead())

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1), weight=self.embedding.weight)


class OutputHead(nn.Module):
    def forward(self, x, weight):
        return nn.functional.linear(x, weight)


@trait
def tied_weight_as_an_argument():
    return PassesWeight()


class NoGrad(Block):
    def forward(self, x):
        with flow.no_grad():
            target = self.norm(x)
        return x + self.down(flow.relu(self.up(target)))


@trait
def no_grad_inside():
    return Plain([NoGrad(), Block()])


class Unused(Block):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(HIDDEN, HIDDEN)


class Smooth(Block):
    """OneFlow has no second derivative of GELU."""

    def forward(self, x):
        return x + self.down(flow.tanh(self.up(self.norm(x))))


class Slopes(Plain):
    """Classifies by the gradient of an energy, as a potential's forces are: its own gradient is of second order."""

    def forward(self, ids):
        x = self.embedding(ids).detach().requires_grad_()
        energy = x
        for block in self.blocks:
            energy = block(energy)
        [slope] = flow.autograd.grad(0.1 * energy.square().sum(), x, create_graph=True)
        return self.head(slope.mean(1))


@trait
def gradient_of_a_gradient():
    return Slopes([Smooth(), Smooth()])


@trait
def penalty_on_gradients():
    return Plain([Smooth(), Smooth()])


@trait
def unused_parameters():
    return Plain([Unused(), Block()])


class WithLSTM(nn.Module):
    """From a state of zeros that is made of x, and so has its layout."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True).to("cpu")

    def forward(self, x):
        zeros = (x[:, :1] * 0).permute(1, 0, 2)
        return x + self.lstm(x, (zeros, zeros))[0]


@trait
def lstm():
    return Plain([WithLSTM(), Block()])


class BatchNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x):
        return x + self.norm(self.linear(x).permute(0, 2, 1)).permute(0, 2, 1)


@trait
def batch_norm():
    return Plain([BatchNormed(), Block()])


class TwoInputs(Plain):
    """Takes the ids and a segment of each word, with an embedding of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = Embeddings()

    def forward(self, ids, segments):
        x = self.embedding(ids, segments)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.segments = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(2, HIDDEN)

    def forward(self, ids, segments):
        return self.words(ids) + self.segments(segments)


@trait
def two_inputs():
    return TwoInputs()


@trait
def average_by_deepcopy():
    return Plain()


@trait
def parameter_groups():
    return Plain()


@trait
def evaluation_between_steps():
    return Normed()


PLAN = {r"blocks\.\d+\.up": "Column", r"blocks\.\d+\.down": "Row"}


def plan_of(model, module):
    names = [name for name, _ in model.named_modules()]
    plan = {**PLAN, "head": "Column"} if isinstance(model, TiedEmbedding) else PLAN  # one of two layers with its weight
    return {k: getattr(module, kind) for k, kind in plan.items() if any(re.fullmatch(k, name) for name in names)}


class TrainingGraph(nn.Graph):
    def __init__(self, model, optimizer, micro_batches, stages=(), stage_of=()):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)
        for part, k in zip(parts_of(self.model), stage_of):
            part.to(nn.graph.GraphModule).set_stage(k, stages[k])

    def build(self, targets, *inputs):
        loss = nn.functional.cross_entropy(self.model(*inputs), targets)
        loss.backward()
        return loss


def optimizer_of(model, name):
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "parameter_groups":
        matrices, vectors = [[p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
        parameters = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.05, "weight_decay": 0.0}]
    return flow.optim.SGD(parameters, lr=0.2, momentum=0.9)


def laid_out(model, layout, paths):
    """The model under a layout; returns where ids and targets go, and for a pipeline its stages."""
    n = flow.env.get_world_size()
    if layout in ("fully sharded", RESHARDED):
        ranks = flow.placement.all("cpu")
        recipe.load(paths["fully_sharded_module"]).shard(model, ranks, reshard_after_forward=layout == RESHARDED)
        return (ranks, S(0)), (ranks, S(0)), {}
    if layout == "pipeline":
        module = recipe.load(paths["pipeline_module"])
        stages = module.placements("cpu", n)
        stage_of = module.assign_stages(model, parts_of(model), stages)
        more = {"stages": stages, "stage_of": stage_of}
        return (stages[0], B), (stages[-1], B), more
    module = recipe.load(paths["tensor_parallel_module"])
    data = {"data": n, "tensor": 1, "data x tensor": 2}[layout]
    mesh = module.placements("cpu", n, data)
    module.lay_out(model, mesh, plan_of(model, module) if data < n else {})
    return (mesh, (S(0), B)), (mesh, (S(0), B)), {}


def losses_and_weights(name, layout=None, graph=False, paths=None, steps=3, micro_batches=2):
    flow.manual_seed(0)
    model = TRAITS[name]()
    optimizer = optimizer_of(model, name)  # before the layout, as in a script that is not edited
    ids_at, targets_at, more = laid_out(model, layout, paths) if layout else (None, None, {})
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(VOCAB, size=(ROWS, LENGTH)), rng.integers(CLASSES, size=ROWS)
    inputs = [ids, ids % 2] if name == "two_inputs" else [ids]

    def placed(array, at):
        return flow.tensor(array, placement=at[0], sbp=at[1]) if at else flow.tensor(array)

    inputs, targets = [placed(array, ids_at) for array in inputs], placed(targets, targets_at)
    training = TrainingGraph(model, optimizer, micro_batches, **more) if graph else None
    average = copy.deepcopy(model) if name == "average_by_deepcopy" else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(targets, *inputs).numpy().mean()
        else:
            loss = nn.functional.cross_entropy(model(*inputs), targets)
            if name == "penalty_on_gradients":
                loss = loss + squares_of_gradients(model, *inputs)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss = loss.numpy()
        losses.append(loss)
        if average:
            move_towards(average, model)
        if name == "evaluation_between_steps":
            losses.append(evaluated(model, inputs))
    if average:
        losses.append(evaluated(average, inputs))
    return losses, {key: value.numpy() for key, value in (average or model).state_dict().items()}


def squares_of_gradients(model, ids):
    """Their sum, to be trained: its own gradient is a product with the Hessian, as in MAML."""
    out = model(ids)
    gradients = flow.autograd.grad(out.square().mean(), list(model.blocks.parameters()), create_graph=True)
    squares = [(g * g).mean() for g in gradients]
    return sum(square.to_global(placement=out.placement) if out.is_global else square for square in squares)


def move_towards(average, model):
    """A step of an exponential moving average of the weights."""
    with flow.no_grad():
        for old, new in zip(average.parameters(), model.parameters()):
            old.copy_(0.5 * old + 0.5 * new)


def evaluated(model, inputs):
    """The largest logit, in eval mode."""
    model.eval()
    with flow.no_grad():
        logit = model(*inputs).numpy().max()
    model.train()
    return logit


@lru_cache(maxsize=None)
def on_one_device(name):
    return losses_and_weights(name)


def outcome(name, layout, graph, paths):
    """How far losses and weights are off those of the model on one device; or the one-line refusal."""
    losses_alone, weights_alone = on_one_device(name)
    try:
        losses, weights = losses_and_weights(name, layout, graph, paths)
    except (ValueError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    assert list(weights) == list(weights_alone)  # the names of a checkpoint
    off = [abs(weights[key] - array).max() for key, array in weights_alone.items()]
    return float(max(abs(np.subtract(losses, losses_alone)).max(), *off))


def outcomes(names, layout, graph, paths):
    return {name: outcome(name, layout, graph, paths) for name in names}


def names():
    return list(TRAITS)


def layouts(trait, kind, layout, paths):
    """{name: (SBP, ranks)} of the buffers or parameters of a model under a layout. kind: "buffers" or "parameters"."""
    model = TRAITS[trait]()
    laid_out(model, layout, paths)
    return {name: tuple(layout_of(tensor)) for name, tensor in getattr(model, f"named_{kind}")()}
