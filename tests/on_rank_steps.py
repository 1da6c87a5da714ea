"""A training step of the stack of layers that docs/explore/steps.js describes, on the ranks of a pool."""

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.sbp import sbp_of
from oneflow_cookbook.measure.sent import sent_by

# The SBPs of the weights of a pair of layers, of x, and of what each layer returns.
LAYOUTS = {
    "data": (("B", "B"), "S(0)", ("S(0)", "S(0)")),
    "tensor": (("S(1)", "S(0)"), "B", ("S(1)", "B")),
    "data_tensor": (("B, S(1)", "B, S(0)"), "S(0), B", ("S(0), S(1)", "S(0), B")),
    "sharded": (("S(0)", "S(0)"), "S(0)", ("S(0)", "S(0)")),
    "zero": (("S(0)", "S(0)"), "S(0)", ("S(0)", "S(0)")),  # as zero_optimizer.py keeps weights between steps
    "pipeline": (("B", "B"), "B", ("B", "B")),
}


def sbps(name):
    return [sbp_of(sbp) for sbp in name.split(", ")]


def placements(strategy, layers):
    """The placement of each layer."""
    n = flow.env.get_world_size()
    if strategy == "pipeline":
        return [flow.placement("cpu", [k * n // layers]) for k in range(layers)]
    ranks = np.arange(n).reshape(-1, 2) if strategy == "data_tensor" else np.arange(n)
    return [flow.placement("cpu", ranks.tolist())] * layers


class Layer(flow.nn.Module):
    def __init__(self, w, ranks, strategy, place):
        """place: 0 for the first of a pair, 1 for the second."""
        super().__init__()
        weights, _, outs = LAYOUTS[strategy]
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=sbps(weights[place])))
        self.ranks, self.out, self.gather = ranks, sbps(outs[place]), strategy in ("sharded", "zero")
        # x is replicated along the axis that splits w, so its gradient is a partial sum
        self.pin = strategy in ("tensor", "data_tensor") and place == 0

    def forward(self, x):
        if x.placement != self.ranks:
            x = x.to_global(placement=self.ranks)
        x = flow.relu(x)
        if self.pin:
            x = x.to_global(sbp=x.sbp, grad_sbp=x.sbp)
        w = self.w
        if self.gather:
            w = w.to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))
        return flow.matmul(x, w).to_global(sbp=self.out)


def stack(strategy, layers, hidden, rows):
    """The model, and x, which needs a gradient as if there were more layers before."""
    rng = np.random.default_rng(0)
    model = flow.nn.ModuleList()
    for k, ranks in enumerate(placements(strategy, layers)):
        w = rng.standard_normal((hidden, hidden), dtype=np.float32) / hidden**0.5
        model.append(Layer(w, ranks, strategy, k % 2))
    x = rng.standard_normal((rows, hidden), dtype=np.float32)
    x_sbp = sbps(LAYOUTS[strategy][1])
    return model, flow.tensor(x, placement=model[0].ranks, sbp=x_sbp, requires_grad=True)


def forward_and_backward(model, x, micro_batches):
    """As in GPipe: forward of all micro-batches, then backward."""
    outs = []
    for part in x.chunk(micro_batches):
        for layer in model:
            part = layer(part)
        outs.append(part)
    for out in outs:
        out.backward(flow.ones_like(out))


def sent_and_kept(strategy, layers, hidden, rows, micro_batches):
    """(bytes that this rank sends in a step, those that autograd keeps on it for backward: of inputs, of weights)."""
    model, x = stack(strategy, layers, hidden, rows)
    optimizer = flow.optim.Adam(model.parameters(), lr=1e-3)
    inputs, weights = {}, {}

    def step():
        optimizer.zero_grad(set_to_none=True)
        forward_and_backward(model, x, micro_batches)
        optimizer.step()

    def keep(tensor):  # each content counts once
        content = tensor.detach().to_local().numpy().tobytes()
        sizes = weights if tuple(tensor.shape) == (hidden, hidden) else inputs
        sizes[hash(content)] = len(content)
        return tensor

    with flow.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()  # the first step also creates the state of Adam and connects the ranks
    return sent_by(step)[1], sum(inputs.values()), sum(weights.values())
