"""Layers of oneflow.nn that OneFlow 0.9.0 refuses, and what works instead, on ranks of a pool, for test_layers.py."""

import re
import traceback

import numpy as np
import oneflow as flow
from oneflow import nn

from oneflow_cookbook.measure.sbp import sbp_of

B = flow.sbp.broadcast
STEPS, BATCH, INPUTS, HIDDEN = 3, 12, 4, 6


class Trained(nn.Graph):
    """SGD at lr=1 takes from each parameter its gradient."""

    def __init__(self, model, function):
        super().__init__()
        self.model, self.function = model, function
        self.add_optimizer(flow.optim.SGD(model.parameters(), lr=1.0))

    def build(self, *tensors):
        out = self.function(self.model, *tensors)
        out.sum().backward()
        return out


def everywhere():
    return flow.placement("cpu", list(range(flow.env.get_world_size())))


def layer(kind, ranks, **options):
    """A layer of 4 inputs and 6 outputs with the same parameters on every rank."""
    flow.manual_seed(0)
    return getattr(nn, kind)(INPUTS, HIDDEN, **options).to_global(placement=ranks, sbp=B)


def tensor(ranks, sbp, *shape):
    values = np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)
    return flow.tensor(values, placement=ranks, sbp=sbp_of(sbp))


def forward(kind, sbp, graph=False, **options):
    """A recurrent layer without h0, on x in this SBP."""
    recurrent = layer(kind, everywhere(), **options)
    shape = (BATCH, STEPS, INPUTS) if options.get("batch_first") else (STEPS, BATCH, INPUTS)
    x = tensor(everywhere(), sbp, *shape)
    if graph:
        return Trained(recurrent, lambda model, x: model(x)[0])(x)
    return recurrent(x)


def local(kind):
    """The same on tensors of this rank. It fails on ranks above 0."""
    flow.comm.barrier()
    return getattr(nn, kind)(INPUTS, HIDDEN)(flow.ones(STEPS, BATCH, INPUTS))


def cell(kind):
    """A cell without h0."""
    return layer(kind, everywhere())(tensor(everywhere(), "S(0)", BATCH, INPUTS))


def sync_batch_norm():
    x = tensor(everywhere(), "S(0)", BATCH, INPUTS)
    return nn.SyncBatchNorm(INPUTS).to_global(placement=everywhere(), sbp=B)(x)


def missing(name):
    return getattr(nn, name)


def error(what, **arguments):
    """The last line of what a function above raises, without its colors; None if nothing is raised on this rank."""
    try:
        globals()[what](**arguments)
        return None
    except Exception:
        return re.sub(r"\x1b\[[\d;]*m", "", traceback.format_exc().strip().splitlines()[-1])


def recurrent_with_h0(kind, sbp, graph, batch_first=False):
    """A recurrent layer whose h0 is split along its own batch, S(1): how far out and gradients are off."""
    shape = (BATCH, STEPS, INPUTS) if batch_first else (STEPS, BATCH, INPUTS)

    def function(model, x, *h):
        return model(x, h if len(h) > 1 else h[0])[0]

    inputs = [(sbp, *shape)] + [("S(1)", 1, BATCH, HIDDEN)] * (2 if kind == "LSTM" else 1)
    return compared(kind, function, inputs, graph, batch_first=batch_first)


def cell_in_a_loop(kind, graph):
    """A cell over a sequence, with h0: how far out and gradients are off."""

    def function(model, *tensors):
        *sequence, h = tensors
        h = (h, h) if kind == "LSTMCell" else h
        for x in sequence:
            h = model(x, h)
        return h[0] if kind == "LSTMCell" else h

    return compared(kind, function, [("S(0)", BATCH, INPUTS)] * STEPS + [("S(0)", BATCH, HIDDEN)], graph)


def compared(kind, function, inputs, graph, **options):
    """The largest difference of the output and of the gradients from those on rank 0 alone, in eager mode."""
    results = step_of(kind, function, inputs, everywhere(), graph, options)
    expected = step_of(kind, function, inputs, flow.placement("cpu", [0]), False, options)
    return max(float(abs(array - other).max()) for array, other in zip(results, expected))


def step_of(kind, function, inputs, ranks, graph, options):
    """The output and the gradients of the parameters."""
    model = layer(kind, ranks, **options)
    tensors = [tensor(ranks, "B" if ranks.ranks.size == 1 else sbp, *shape) for sbp, *shape in inputs]
    if graph:
        before = [w.numpy().copy() for w in model.parameters()]
        out = Trained(model, function)(*tensors).numpy()
        return [out, *(old - w.numpy() for old, w in zip(before, model.parameters()))]
    out = function(model, *tensors)
    out.sum().backward()
    return [out.numpy(), *(w.grad.numpy() for w in model.parameters())]
