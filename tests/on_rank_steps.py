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


def forward(strategy, weights, x):
    for k, w in enumerate(weights):
        if x.placement != w.placement:
            x = x.to_global(placement=w.placement)
        x = flow.relu(x)
        if strategy in ("tensor", "data_tensor") and k % 2 == 0:
            x = x.to_global(sbp=x.sbp, grad_sbp=x.sbp)  # replicated where w is split, so its gradient is a partial sum
        if strategy in ("sharded", "zero"):
            w = w.to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))
        x = flow.matmul(x, w).to_global(sbp=sbps(LAYOUTS[strategy][2][k % 2]))
    return x


def sent_and_kept(strategy, layers, hidden, rows, micro_batches):
    """(bytes that this rank sends in a step, those that autograd keeps on it for backward: of inputs, of weights)."""
    n, rng = flow.env.get_world_size(), np.random.default_rng(0)
    of_weights, of_x, _ = LAYOUTS[strategy]
    ranks = np.arange(n).reshape(-1, 2) if strategy == "data_tensor" else np.arange(n)

    def draw(rows, k, sbp):
        place = flow.placement("cpu", [k * n // layers] if strategy == "pipeline" else ranks.tolist())
        value = rng.standard_normal((rows, hidden), dtype=np.float32) / hidden**0.5
        return flow.tensor(value, placement=place, sbp=sbps(sbp), requires_grad=True)

    weights = [draw(hidden, k, of_weights[k % 2]) for k in range(layers)]
    x = draw(rows, 0, of_x)  # it needs a gradient as if there were more layers before
    optimizer = flow.optim.Adam(weights, lr=1e-3)
    sizes_of_inputs, sizes_of_weights = {}, {}

    def step():
        optimizer.zero_grad(set_to_none=True)
        outs = [forward(strategy, weights, part) for part in x.chunk(micro_batches)]  # as in GPipe
        for out in outs:
            out.backward(flow.ones_like(out))
        optimizer.step()

    def keep(tensor):  # each content counts once
        content = tensor.detach().to_local().numpy().tobytes()
        sizes = sizes_of_weights if tuple(tensor.shape) == (hidden, hidden) else sizes_of_inputs
        sizes[hash(content)] = len(content)
        return tensor

    with flow.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()  # the first step also creates the state of Adam and connects the ranks
    return sent_by(step)[1], sum(sizes_of_inputs.values()), sum(sizes_of_weights.values())
