"""The cost of a layout on a cluster: memory of the fullest rank, bytes along each axis, seconds of a step."""

import itertools
from collections import namedtuple

from oneflow_cookbook.plan import formulas

# batch_size: sequences of a step, on all ranks together. precision: a key of formulas.PRECISIONS. flash: whether the
# attention is FlashAttention.
Problem = namedtuple("Problem", "model batch_size cluster precision flash", defaults=("amp", True))


class ParallelLayout(namedtuple("ParallelLayout", "data tensor pipeline micro_batch options", defaults=((),))):
    """A mesh of data x tensor x pipeline ranks.

    micro_batch: sequences that a rank takes at once. options: as formulas.moved takes them.
    """

    @property
    def mesh(self):
        return self[:3]

    def micro_batches(self, batch_size):
        """The number of micro-batches of a step."""
        return batch_size // (self.data * self.micro_batch)


class Cost(namedtuple("Cost", "layout memory sent rates time")):
    """The cost of a ParallelLayout.

    memory: {part: bytes} of the rank that needs most. sent: {axis: bytes} that a rank sends in a step, in the stage
    with most layers. rates: {axis: bytes a second}. time: {part: seconds} of a step.
    """

    @property
    def bytes(self):
        return sum(self.memory.values())

    @property
    def seconds(self):
        return sum(self.time.values())


def memory(problem, layout):
    """{part: bytes} of the rank that needs most: the first stage holds most micro-batches, the last stage the logits.

    A stage of 1F1B holds as many micro-batches as there are stages from it to the end (D. Narayanan et al.,
    arXiv:2104.04473, section 2.2). Like ZeRO's stage 3 (arXiv:1910.02054), sharded weights divide weights, gradients
    and Adam's state by the data axis, except those of norms and positions.
    """
    model, precision = problem.model, problem.precision
    data, tensor, pipeline = layout.mesh
    sharded = "shard_weights" in layout.options
    tokens = layout.micro_batch * model.seq_len
    layer = formulas.activations(model, tokens, tensor, layout.options, precision, problem.flash)
    working = 0  # for the layer that is computed again
    if "recompute" in layout.options:
        options = [option for option in layout.options if option != "recompute"]
        working = formulas.activations(model, tokens, tensor, options, precision, problem.flash)
    sizes = formulas.PRECISIONS[precision]
    copied = "copies of weights" if precision == "fp32" else "gathered weights"
    by_stage = []
    for stage, elements in enumerate(formulas.stages(model, pipeline)):
        owned = formulas.elements_on_a_rank(elements, tensor, data if sharded else 1)
        in_flight = min(layout.micro_batches(problem.batch_size), pipeline - stage)
        layers = in_flight * formulas.layers_of_stages(model, pipeline)[stage]
        is_last, copies = stage == pipeline - 1, formulas.elements_on_a_rank(elements, tensor)
        parts = {
            "weights": owned * sizes.weight,
            "gradients": owned * sizes.gradient,
            "Adam's state": owned * sizes.optimizer,
            "activations": layers * layer + working,
            "logits": formulas.head_activations(model, tokens, tensor, precision) if is_last else 0,
            # kept until backward has used them; in float32 gpt.py copies all weights
            copied: copies * sizes.weight if sharded or precision == "fp32" else 0,
        }
        by_stage.append(parts)
    return max(by_stage, key=lambda parts: sum(parts.values()))


def cost(problem, layout):
    """The Cost of a layout: each part of the time is operations or bytes, divided by their rate. Nothing overlaps.

    The slowest stage sets the pace: the first, which has most layers, or the last, which has the head. It is idle for
    the time of pipeline - 1 micro-batches.
    """
    model, batch_size, cluster, precision, _ = problem
    data, tensor, pipeline = layout.mesh
    micro_batches = layout.micro_batches(batch_size)
    layers = formulas.layers_of_stages(model, pipeline)
    sizes = (batch_size, layout.options, formulas.PRECISIONS[precision].activation, micro_batches)
    totals = formulas.moved(model, layout.mesh, *sizes)
    largest = max(layers) / model.num_layers  # share of the layers
    sent = {axis: totals[axis] * largest / (data * tensor) for axis in ("data", "tensor")}
    neighbours = formulas.moved(model, (data, tensor, min(pipeline, 2)), *sizes)
    sent["pipeline"] = neighbours["pipeline"] / (data * tensor)
    strides = {"data": tensor, "tensor": 1, "pipeline": data * tensor}
    rates = {axis: cluster.bandwidth(strides[axis], members) for axis, members in zip(formulas.AXES, layout.mesh)}

    tokens = batch_size // data * model.seq_len
    flops = [count * formulas.layer_flops(model, tokens, "recompute" in layout.options) for count in layers]
    flops[-1] += formulas.head_flops(model, tokens)
    computes = [count / tensor / cluster.flops(precision) for count in flops]
    reduces = [sent["tensor"] / rates["tensor"] * count / max(layers) for count in layers]
    compute, reduce = max(zip(computes, reduces), key=sum)
    exchange = sent["pipeline"] / rates["pipeline"]
    time = {
        "compute": compute,
        "data": sent["data"] / rates["data"],
        "tensor": reduce,
        "pipeline": exchange,
        "idle": (pipeline - 1) / micro_batches * (compute + reduce + exchange),
    }
    return Cost(layout, memory(problem, layout), sent, rates, time)


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def layouts(problem):
    """Yield every ParallelLayout that divides the model, the batch and the ranks, as gpt.py checks it.

    Stages may have different numbers of layers, so there may be as many stages as layers.
    """
    model, ranks = problem.model, problem.cluster.ranks
    kv_heads = model.kv_heads or model.num_heads
    for tensor in (number for number in divisors(ranks) if kv_heads % number == 0):
        for pipeline in divisors(ranks // tensor):
            data = ranks // tensor // pipeline
            if pipeline > model.num_layers or problem.batch_size % data:
                continue
            choices = {
                "sequence_parallel": tensor > 1 and model.seq_len % tensor == 0,
                "shard_weights": data > 1 and model.hidden_size % data == 0,
                "recompute": True,
            }
            possible = [option for option, applies in choices.items() if applies]
            subsets = [itertools.combinations(possible, count) for count in range(len(possible) + 1)]
            for options in itertools.chain(*subsets):
                for micro_batch in divisors(problem.batch_size // data):
                    yield ParallelLayout(data, tensor, pipeline, micro_batch, options)


def ranked(problem):
    """(Costs of the layouts that fit, fastest first; Costs of the others, smallest first)."""
    costs = [cost(problem, layout) for layout in layouts(problem)]
    fit = [candidate for candidate in costs if candidate.bytes <= problem.cluster.memory]
    too_large = [candidate for candidate in costs if candidate.bytes > problem.cluster.memory]
    fit.sort(key=lambda candidate: (candidate.seconds, candidate.bytes))
    return fit, sorted(too_large, key=lambda candidate: candidate.bytes)
