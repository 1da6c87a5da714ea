"""The cost of a layout on a cluster: memory of the fullest rank, bytes along each axis, seconds of a step."""

import dataclasses
import itertools

from oneflow_cookbook.plan import formulas
from oneflow_cookbook.plan.devices import Cluster
from oneflow_cookbook.plan.model import Model


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan is for: model, batch size, cluster, allowed recomputation."""

    model: Model
    batch_size: int  # sequences of a step, on all ranks together
    cluster: Cluster
    recompute: tuple  # the kinds of recomputation that the plan may choose from, see formulas.RECOMPUTE
    on_gpus: bool


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    """A mesh of data x tensor x pipeline ranks, and its options. micro_batch: sequences that a rank takes at once."""

    data: int
    tensor: int
    pipeline: int
    micro_batch: int
    sequence_parallel: bool = False
    shard_weights: bool = False
    recompute: str = "none"

    @property
    def mesh(self):
        return self.data, self.tensor, self.pipeline

    @property
    def options(self):
        """Its options, by the names of formulas.moved."""
        switches = {"sequence_parallel": self.sequence_parallel, "shard_weights": self.shard_weights}
        return (*(name for name, on in switches.items() if on), self.recompute)

    def micro_batches(self, batch_size):
        """The number of micro-batches of a step."""
        return batch_size // (self.data * self.micro_batch)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a ParallelLayout."""

    layout: ParallelLayout
    layers: list  # the number of layers of each stage
    memory: dict  # {part: bytes} of the rank that needs most
    sent: dict  # {axis: bytes} that a rank sends in a step; along data and tensor, a rank of the stage with most layers
    links: dict  # {axis: "inside a host" or "between hosts"}
    time: dict  # {part: seconds} of a step

    @property
    def bytes(self):
        return sum(self.memory.values())

    @property
    def seconds(self):
        return sum(self.time.values())


def memory(model, layout, batch_size, precision):
    """{part: bytes} of the rank that needs most: the first stage holds most micro-batches, the last stage the logits.

    A stage of 1F1B holds as many micro-batches as there are stages from it to the end (D. Narayanan et al.,
    arXiv:2104.04473, section 2.2). Like ZeRO's stage 3 (arXiv:1910.02054), --shard-weights divides weights, gradients
    and Adam's state by the data axis, except those of norms and positions.
    """
    data, tensor, pipeline = layout.mesh
    sharded_by = data if layout.shard_weights else 1
    tokens = layout.micro_batch * model.seq_len
    how = {"precision": precision, "sequence_parallel": layout.sequence_parallel}
    layer = formulas.activations(model, tokens, tensor, recompute=layout.recompute, **how)
    working = formulas.activations(model, tokens, tensor, **how) if layout.recompute == "full" else 0
    elements, layers = formulas.stages(model, pipeline), formulas.layers_of_stages(model, pipeline)
    weight, gradient, optimizer, _ = formulas.PRECISIONS[precision]
    by_stage = []
    for stage in range(pipeline):
        held = formulas.elements_on_a_rank(elements[stage], tensor, sharded_by)
        in_flight = min(layout.micro_batches(batch_size), pipeline - stage)
        parts = {
            "weights": held * weight,
            "gradients": held * gradient,
            "optimizer": held * optimizer,
            "activations": in_flight * layers[stage] * layer + working,
        }
        if layout.shard_weights or precision == "fp32":  # gpt.py frees its copies after backward, not after forward
            parts["copies of weights"] = weight * formulas.elements_on_a_rank(elements[stage], tensor)
        if stage == pipeline - 1:
            parts["activations"] += formulas.head_activations(model, tokens, tensor, precision)
        by_stage.append(parts)
    return max(by_stage, key=lambda parts: sum(parts.values()))


def cost(model, layout, batch_size, cluster):
    """The Cost of a layout. Nothing overlaps: a rank computes, or it sends.

    The slowest stage sets the pace: the first, which has most layers, or the last, which has the head. It computes each
    micro-batch, and is idle for the time of pipeline - 1 of them.
    """
    data, tensor, pipeline = layout.mesh
    weight, gradient, optimizer, item = formulas.PRECISIONS[cluster.precision]
    micro_batches = layout.micro_batches(batch_size)
    totals = formulas.moved(model, layout.mesh, batch_size, layout.options, item, micro_batches)
    sent = {axis: total / cluster.ranks for axis, total in totals.items()}
    layers = formulas.layers_of_stages(model, pipeline)
    for axis in ("data", "tensor"):
        sent[axis] *= max(layers) * pipeline / model.num_layers
    groups = {"data": (tensor, data), "tensor": (1, tensor), "pipeline": (data * tensor, pipeline)}
    rates, links = {}, {}
    for axis, (stride, members) in groups.items():
        rates[axis], leaves = cluster.bandwidth(stride, members)
        links[axis] = "between hosts" if leaves else "inside a host"

    tokens = layout.micro_batch * model.seq_len
    flops = [count * formulas.layer_flops(model, tokens, layout.recompute) for count in layers]
    flops[-1] += formulas.head_flops(model, tokens)
    most_reduced = sent["tensor"] / rates["tensor"] / micro_batches
    seconds = [(flops[k] / tensor / cluster.flops, most_reduced * layers[k] / max(layers)) for k in range(pipeline)]
    compute, reduce = max(seconds, key=sum)
    # a stage sends the residual forward and its gradient back; the first stage also the tied table
    table = model.vocab_size * model.hidden_size if model.tied else 0
    hop = 2 * item * (tokens * model.hidden_size + table) / tensor / rates["pipeline"] if pipeline > 1 else 0
    # forward and backward read the weights, and backward adds to the gradients
    held = max(formulas.elements_on_a_rank(stage, tensor) for stage in formulas.stages(model, pipeline))
    reads = 2 * (weight + gradient) * held / cluster.device.hbm
    sharded_by = data if layout.shard_weights else 1
    time = {
        "matmuls": micro_batches * compute,
        "weights": micro_batches * reads,
        "tensor": micro_batches * reduce,
        "pipeline": micro_batches * hop,
        "idle": (pipeline - 1) * (compute + reads + reduce + hop),
        "data": sent["data"] / rates["data"],
        # reads weight, gradient and optimizer state, and writes all but the gradient
        "update": (2 * (weight + optimizer) + gradient) * held / sharded_by / cluster.device.hbm,
    }
    return Cost(layout, layers, memory(model, layout, batch_size, cluster.precision), sent, links, time)


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def layouts(model, batch_size, ranks, recompute=formulas.RECOMPUTE):
    """Yield every ParallelLayout that divides the model, the batch and the ranks, as gpt.py checks it.

    Stages may have different numbers of layers, so there may be as many stages as layers.
    """
    kv_heads = model.kv_heads or model.num_heads
    for tensor in divisors(model.num_heads):
        if ranks % tensor or kv_heads % tensor:
            continue
        for pipeline in divisors(ranks // tensor):
            data = ranks // tensor // pipeline
            if pipeline > model.num_layers or batch_size % data:
                continue
            micro_batches = divisors(batch_size // data)
            sequence_parallel = (False, True) if tensor > 1 and model.seq_len % tensor == 0 else (False,)
            shard_weights = (False, True) if data > 1 and model.hidden_size % data == 0 else (False,)
            for options in itertools.product(micro_batches, sequence_parallel, shard_weights, recompute):
                yield ParallelLayout(data, tensor, pipeline, *options)


def ranked(model, batch_size, cluster, recompute=formulas.RECOMPUTE):
    """(Costs of the layouts that fit, fastest first; Costs of the others, smallest first)."""
    costs = [
        cost(model, layout, batch_size, cluster) for layout in layouts(model, batch_size, cluster.ranks, recompute)
    ]
    fit = [candidate for candidate in costs if candidate.bytes <= cluster.memory]
    fit.sort(key=lambda candidate: (candidate.seconds, candidate.bytes))
    refused = [candidate for candidate in costs if candidate.bytes > cluster.memory]
    refused.sort(key=lambda candidate: candidate.bytes)
    return fit, refused
