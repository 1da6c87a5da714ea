"""What a training step of a transformer computes, holds and sends on a mesh. Each function names its source.

A mesh is (data, tensor, pipeline). Neighbouring ranks are along the tensor axis, then data, then pipeline. A weight is
"split" by the tensor axis, or "whole": each rank of the tensor axis has a copy of it. Sizes are in bytes.
"""

import math
from collections import namedtuple

AXES = ("data", "tensor", "pipeline")
Precision = namedtuple("Precision", "weight gradient optimizer activation")  # bytes of a number
# Adam has two moments; mixed precision adds a copy of the weight in float32 (S. Rajbhandari et al., arXiv:1910.02054).
PRECISIONS = {"fp32": Precision(4, 4, 8, 4), "amp": Precision(2, 2, 12, 2)}
RECOMPUTE = ("none", "selective", "full")


def matrices(model):
    """The number of elements in the weight matrices of a layer."""
    attention = model.hidden_size * (2 * model.query_size + 2 * model.kv_size)
    return attention + (3 if model.gated else 2) * model.hidden_size * model.inner_size


def weights(model, num_layers=None):
    """{part: (split, whole)}: the numbers of elements of the weights. num_layers: of a stage, by default of the model.

    With biases they add up to 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), D. Narayanan et al., arXiv:2104.04473.
    """
    hidden, layers = model.hidden_size, model.num_layers if num_layers is None else num_layers
    split, whole = matrices(model), 2 * hidden
    norm = hidden
    if model.biases:
        split += model.query_size + 2 * model.kv_size + model.inner_size
        whole, norm = 6 * hidden, 2 * hidden  # norms with a bias, and the biases of two row-parallel matmuls
    return {
        "table": (model.vocab_size * hidden, 0),
        "layers": (layers * split, layers * whole),
        "positions": (0, model.seq_len * hidden if model.learned_positions else 0),
        "norm": (0, norm),
        "head": (0 if model.tied else model.vocab_size * hidden, 0),
    }


def parameters(model):
    """The number of elements of all weights."""
    return sum(split + whole for split, whole in weights(model).values())


def layers_of_stages(model, pipeline):
    """[number of layers of each stage]: layer i is on stage i * pipeline // num_layers, as in gpt.py."""
    first_layers = [math.ceil(stage * model.num_layers / pipeline) for stage in range(pipeline + 1)]
    return [end - start for start, end in zip(first_layers, first_layers[1:])]


def stages(model, pipeline):
    """[(split, whole) of each stage]: elements of its weights; the first stage has the embedding, the last the head."""
    parts_of_stages = [["layers"] for _ in range(pipeline)]
    parts_of_stages[0] += ["table", "positions"]
    parts_of_stages[-1] += ["norm", "head"]
    totals = []
    for parts, num_layers in zip(parts_of_stages, layers_of_stages(model, pipeline)):
        elements = weights(model, num_layers)
        split = sum(elements[part][0] for part in parts)
        whole = sum(elements[part][1] for part in parts)
        totals.append((split, whole))
    return totals


def elements_on_a_rank(stage, tensor, sharded_by=1):
    """Elements on a rank of a stage, (split, whole). sharded_by: number of ranks that also shard the split weights."""
    split, whole = stage
    return split / tensor / sharded_by + whole


def moved(model, mesh, batch_size, layout=(), item=4, micro_batches=1):
    """{axis: bytes that all ranks together send along it in a step of a graph}, as docs/gpt.md measures them.

    layout: its options among "sequence_parallel", "shard_weights" and "full" (recomputation). item: bytes of a number.

    A ring all-reduce of K bytes among n ranks sends 2 (n-1) K. The data axis sums the gradients once; with
    shard_weights it gathers the weights and scatters the gradients in each micro-batch, the same number of bytes each
    time. A layer has 4 all-reduces of its activation along the tensor axis, or 4 pairs of an all-gather and a
    reduce-scatter; embedding and head have one each. Full recomputation adds 2 to each layer, and gathers its weights
    once more. (arXiv:2104.04473, arXiv:2205.05198.)
    """
    data, tensor, pipeline = mesh
    activation = item * batch_size * model.seq_len * model.hidden_size
    table = item * model.vocab_size * model.hidden_size
    copies = 1 if "sequence_parallel" in layout else tensor  # of the residual
    all_reduces = (6 if "full" in layout else 4) * model.num_layers + 2
    elements = weights(model)
    split, whole = (sum(part[i] for part in elements.values()) for i in (0, 1))
    if "shard_weights" in layout:
        split = micro_batches * (split + (elements["layers"][0] / 2 if "full" in layout else 0))
    # a tied table goes from the first stage to the last in each micro-batch, and its gradient back
    tied = 2 * data * table * micro_batches if model.tied and pipeline > 1 else 0
    return {
        "data": 2 * (data - 1) * item * (split + tensor * whole),
        "tensor": 2 * (tensor - 1) * all_reduces * activation,
        "pipeline": 2 * (pipeline - 1) * copies * activation + tied,
    }


def layer_flops(model, tokens, recompute="none"):
    """Operations of a layer, forward and backward: of a token 2 for an element of a matrix, 4 s for a query's column.

    Backward takes twice as much as forward. Full recomputation repeats forward, selective recomputation the attention.
    """
    products = 2 * matrices(model)
    attention = 4 * model.seq_len * model.query_size
    again = {"none": 0, "selective": attention, "full": products + attention}[recompute]
    return tokens * (3 * (products + attention) + again)


def head_flops(model, tokens):
    """Operations of the head, forward and backward."""
    return 3 * tokens * 2 * model.hidden_size * model.vocab_size


def flops(model, batch_size, recompute="none"):
    """Operations of a step: 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)), arXiv:2104.04473.

    With full recomputation 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)).
    """
    tokens = batch_size * model.seq_len
    return model.num_layers * layer_flops(model, tokens, recompute) + head_flops(model, tokens)


# What a layer saves for backward. size: numbers for each token, an attribute of Model, or "scores": a row of them for
# each head. bytes: of a number. split: "sequence", by sequence parallelism only; "tensor", always; "gathered", never.
# selective: whether selective recomputation drops it.
Saved = namedtuple("Saved", "size bytes split selective", defaults=(False,))


def saved_in_16_bit(model):
    """{name: Saved} of a layer: V. Korthikanti et al., arXiv:2205.05198, section 4.1.

    A GPT with dropout saves s b h (34 + 5 a s / h) bytes. Without dropout there are no masks and no dropped scores. A
    gated MLP saves three inner activations.
    """
    inner = 3 if model.gated else 2
    masks = {
        "mask of the scores": Saved("scores", 1, "tensor", True),
        "scores after dropout": Saved("scores", 2, "tensor", True),
        "mask of attention": Saved("hidden_size", 1, "sequence"),
        "mask of the MLP": Saved("hidden_size", 1, "sequence"),
    }
    return {
        "inputs of the norms": Saved("hidden_size", 2 * 2, "sequence"),
        "inputs of qkv and up": Saved("hidden_size", 2 * 2, "sequence"),
        "queries": Saved("query_size", 2, "tensor"),
        "keys and values": Saved("kv_size", 2 * 2, "tensor"),
        "scores after softmax": Saved("scores", 2, "tensor", True),
        "input of project": Saved("query_size", 2, "tensor"),
        "inner activations": Saved("inner_size", 2 * inner, "tensor"),
        **(masks if model.dropout else {}),
    }


def saved_in_gpt_py(_):
    """{name: Saved} of a layer of gpt.py, eager, float32, as tests/slow/test_plan_measured.py measures."""
    return {
        "norms": Saved("hidden_size", 4 * 2.5, "sequence"),
        "inputs of qkv and up": Saved("hidden_size", 4 * 2.5, "gathered"),
        "queries, keys and values": Saved("query_size", 4 * 3, "tensor"),
        "scores after softmax": Saved("scores", 4, "tensor", True),
        "input of project": Saved("query_size", 4, "tensor"),
        "relu, and its square": Saved("inner_size", 4 * 2, "tensor"),
    }


def activations(model, tokens, tensor, precision="fp32", sequence_parallel=False, recompute="none"):
    """The bytes that a layer saves for backward on a rank. tokens: of a micro-batch, sequences times seq_len.

    Selective recomputation drops the scores, full recomputation all but the layer's input.
    """
    if recompute == "full":
        return PRECISIONS[precision].activation * tokens * model.hidden_size / (tensor if sequence_parallel else 1)
    saved = saved_in_16_bit(model) if precision == "amp" else saved_in_gpt_py(model)
    total = 0
    for tensor_saved in saved.values():
        if tensor_saved.selective and recompute == "selective":
            continue
        size = tensor_saved.size
        numbers = model.num_heads * model.seq_len if size == "scores" else getattr(model, size)
        splits = tensor_saved.split == "tensor" or (tensor_saved.split == "sequence" and sequence_parallel)
        total += tensor_saved.bytes * tokens * numbers / (tensor if splits else 1)
    return total


def head_activations(model, tokens, tensor, precision="fp32"):
    """The bytes that the head saves on a rank: its norm's input, its input, and the logits in float32.

    In 16 bit 4 s b h (1 + V / h), arXiv:2205.05198, section 4.3. In float32 the first two take 4 bytes a number, and
    the loss saves its probabilities besides the logits.
    """
    item = PRECISIONS[precision].activation
    logits = 4 if precision == "amp" else 8
    return tokens * (2 * item * model.hidden_size + logits * model.vocab_size / tensor)
