"""What the tests of training_run.py call on the ranks of a pool."""

from functools import partial

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.entry import call_entry
from oneflow_cookbook.measure.sent import sent_by
from oneflow_cookbook.measure.tensors import snapshot
from oneflow_cookbook.start import recipe
from tests.on_rank_recipe import RECORDED, RecipeRecorder, observed, optimizer_state


def trained(path, **arguments):
    """Train training_run.py; returns what `observe` does, with its weights before and after ("new") and moments."""
    recorder = RecipeRecorder()
    _, seen = observed(path, recorder, **arguments)
    model = seen.outer["model"]
    parameters = dict(model.named_parameters())
    moments = optimizer_state({"optimizer": seen.outer["optimizer"]}, parameters)
    tensors = {name: snapshot(moment) for name, moment in moments.items()}
    for name, parameter in parameters.items():
        tensors[name] = recorder.initial[id(parameter)]
        tensors[f"new {name}"] = snapshot(parameter)
    return {
        "tensors": tensors,
        "arrays": {name: np.array(seen.outer[name]) for name in ("losses", "held_out")},
        "in_graph": {},
        **{name: getattr(recorder, name) for name in RECORDED},
    }


def rows_read(path, **arguments):
    """The indices of the samples that this rank reads in a run, in order."""
    module, read = recipe.load(path), []
    sample = module.sample

    def reading(index, config):
        read.append(int(index))
        return sample(index, config)

    module.sample = reading
    call_entry(module, arguments)
    return read


def refused(path, samples=None, **arguments):
    """The error that training_run.py ends with. samples: an id and a target, which all positions then have."""
    module = recipe.load(path)
    if samples:
        module.sample = lambda index, config: [np.full(config.seq_len, number) for number in samples]
    try:
        call_entry(module, arguments)
    except (ValueError, FloatingPointError, module.CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def with_another_head(path, frozen, **arguments):
    """The error of a run whose model has a parameter that its loss does not use, and what the run has changed."""
    module, models = recipe.load(path), []
    initialize = module.Model.__init__

    def with_head(self, config, mesh, seed):
        initialize(self, config, mesh, seed)
        self.value_head = module.parameter(np.random.default_rng(5), (4, 1), mesh, module.REPLICATED)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)
        with flow.no_grad():  # else OneFlow's autograd.grad fails
            models.append((self, {name: parameter.numpy() for name, parameter in self.named_parameters()}))

    module.Model.__init__ = with_head
    try:
        call_entry(module, arguments)
        error = "no error"
    except (ValueError, module.CheckpointError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    [(model, before)] = models
    return error, [name for name, new in model.named_parameters() if not np.array_equal(new.numpy(), before[name])]


def with_wrong_gradient(path, **arguments):
    """The error of a run whose loss is finite and whose gradient is not, and (before, after) of each weight."""
    module, weights = recipe.load(path), []
    forward, optimizer = module.Model.forward, flow.optim.AdamW

    def wrong(self, ids):
        return forward(self, ids) + flow.sqrt(0 * self.positions.sum())

    def adam(groups, **options):
        parameters = [parameter for group in groups for parameter in group["params"]]
        with flow.no_grad():  # else OneFlow's autograd.grad fails
            weights.extend((parameter, parameter.numpy().copy()) for parameter in parameters)
        return optimizer(groups, **options)

    module.Model.forward, flow.optim.AdamW = wrong, adam
    try:
        call_entry(module, arguments)
        error = "no error"
    except FloatingPointError as raised:
        error = f"FloatingPointError: {raised}"
    finally:
        flow.optim.AdamW = optimizer
    return error, [(before, parameter.numpy()) for parameter, before in weights]


def modes_of_calls(path, **arguments):
    """[whether the model is in training mode, whether gradients are recorded] of each forward pass."""
    module, modes = recipe.load(path), []
    forward = module.Model.forward

    def recording(self, ids):
        modes.append([self.training, flow.is_grad_enabled()])
        return forward(self, ids)

    module.Model.forward = recording
    call_entry(module, arguments)
    return modes


def bytes_of_a_step(path, graph, micro_batches):
    """(bytes that this rank sends in a step, bytes of all weights), all ranks along the data axis."""
    module = recipe.load(path)
    config = module.Config(micro_batches=micro_batches, num_layers=1, hidden_size=256)
    mesh = module.placements("cpu", flow.env.get_world_size())
    model, batches = module.Model(config, mesh, 0), module.Batches(config, mesh, 0)
    optimizer = flow.optim.AdamW(model.parameters())
    gradients_of = module.GradientGraph(model) if graph else partial(module.sums_and_gradients, model)
    for step in (1, 2):  # the first builds the graph
        arguments = (step, model, optimizer, gradients_of, batches.next(), config)
        _, sent = sent_by(lambda arguments=arguments: module.train_step(*arguments))
    return sent, 4 * sum(parameter.numel() for parameter in model.parameters())


def loaded(folder):
    """What is in a checkpoint: {name: array, number or text}."""
    flat = {}

    def visit(name, value):
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)) and name.startswith(".optimizer"):
            for i, item in enumerate(value):
                visit(f"{name}.{i}", item)
        else:
            flat[name] = value.numpy() if isinstance(value, flow.Tensor) else value

    visit("", flow.load(folder, global_src_rank=0))
    return flat
