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


def matrices(model):
    """The number of elements in the weight matrices of a layer."""
    attention = model.hidden_size * (2 * model.query_size + 2 * model.kv_size)
    return attention + (3 if model.gated else 2) * model.hidden_size * model.inner_size


def layer_weights(model):
    """(split, whole): elements of the weights of a layer."""
    split, whole = matrices(model), 2 * model.hidden_size
    if model.biases:
        split += model.query_size + 2 * model.kv_size + model.inner_size
        whole = 6 * model.hidden_size  # norms with a bias, and the biases of two row-parallel matmuls
    return split, whole


def layers_of_stages(model, pipeline):
    """[number of layers of each stage]: layer i is on stage i * pipeline // num_layers, as in gpt.py."""
    first_layers = [math.ceil(stage * model.num_layers / pipeline) for stage in range(pipeline + 1)]
    return [end - start for start, end in zip(first_layers, first_layers[1:])]


def stages(model, pipeline):
    """[[split, whole] of each stage]: elements of its weights; the first stage has the embedding, the last the head.

    With biases all add up to 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), D. Narayanan et al., arXiv:2104.04473,
    and the last norm.
    """
    split, whole = layer_weights(model)
    elements = [[count * split, count * whole] for count in layers_of_stages(model, pipeline)]
    table = model.vocab_size * model.hidden_size
    elements[0][0] += table
    elements[0][1] += model.seq_len * model.hidden_size if model.learned_positions else 0
    elements[-1][0] += 0 if model.tied else table
    elements[-1][1] += (2 if model.biases else 1) * model.hidden_size
    return elements


def parameters(model):
    """The number of elements of all weights."""
    return sum(stages(model, 1)[0])


def elements_on_a_rank(stage, tensor, sharded_by=1):
    """Elements on a rank of a stage, (split, whole). sharded_by: number of ranks that also shard the split weights."""
    split, whole = stage
    return split / tensor / sharded_by + whole


def moved(model, mesh, batch_size, options=(), item=4, micro_batches=1):
    """{axis: bytes that all ranks together send along it in a step of a graph}, as docs/gpt.md measures them.

    options: of the layout, among "sequence_parallel", "shard_weights" and "recompute". item: bytes of a number.

    A ring all-reduce of K bytes among n ranks sends 2 (n-1) K. The data axis sums the gradients once; with
    shard_weights it gathers the weights and scatters the gradients in each micro-batch, the same number of bytes each
    time. A layer has 4 all-reduces of its activation along the tensor axis, or 4 pairs of an all-gather and a
    reduce-scatter; embedding and head have one each. Recomputation adds 2 to each layer, and gathers its weights
    once more. (arXiv:2104.04473, arXiv:2205.05198.)
    """
    data, tensor, pipeline = mesh
    activation = item * batch_size * model.seq_len * model.hidden_size
    table = item * model.vocab_size * model.hidden_size
    copies = 1 if "sequence_parallel" in options else tensor  # of the residual
    all_reduces = (6 if "recompute" in options else 4) * model.num_layers + 2
    split, whole = stages(model, 1)[0]
    if "shard_weights" in options:
        again = model.num_layers * layer_weights(model)[0] / 2 if "recompute" in options else 0
        split = micro_batches * (split + again)
    # a tied table goes from the first stage to the last in each micro-batch, and its gradient back
    tied = 2 * data * table * micro_batches if model.tied and pipeline > 1 else 0
    return {
        "data": 2 * (data - 1) * item * (split + tensor * whole),
        "tensor": 2 * (tensor - 1) * all_reduces * activation,
        "pipeline": 2 * (pipeline - 1) * copies * activation + tied,
    }


def layer_flops(model, tokens, recompute=False):
    """Operations of a layer, forward and backward: of a token 2 for an element of a matrix, 4 s for a query's column.

    With the head 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)) a step, arXiv:2104.04473. Backward takes twice as much as
    forward, and recomputation repeats forward. FlashAttention is counted the same: it computes the scores once more in
    backward, but leaves out those that the mask hides.
    """
    forward = 2 * matrices(model) + 4 * model.seq_len * model.query_size
    return tokens * forward * (4 if recompute else 3)


def head_flops(model, tokens):
    """Operations of the head, forward and backward."""
    return 3 * tokens * 2 * model.hidden_size * model.vocab_size


def activations(model, tokens, tensor, options=(), precision="amp", flash=True):
    """The bytes that a layer saves for backward on a rank. tokens: of a micro-batch. options: as in `moved`.

    In 16 bit a GPT with dropout saves 34 h + 5 a s bytes of a token, h being the hidden size, a the heads and s the
    sequence length: V. Korthikanti et al., arXiv:2205.05198, section 4.1. The second term is the scores, which
    FlashAttention does not save. Recomputation saves the layer's input alone. In float32 it is what gpt.py saves
    in eager mode, fitted to runs, always with the scores.
    """
    hidden, query, inner = model.hidden_size, model.query_size, model.inner_size
    residual = tensor if "sequence_parallel" in options else 1  # ranks that share what is between the matmuls
    if "recompute" in options:
        return PRECISIONS[precision].activation * tokens * hidden / residual
    scores = model.num_heads * model.seq_len
    if precision == "fp32":  # norms, and the inputs of qkv and up; queries, keys, values and project's input; relu
        return tokens * (10 * hidden / residual + 10 * hidden + (4 * 4 * query + 4 * scores + 4 * 2 * inner) / tensor)
    masks = 1 if model.dropout else 0  # a mask has a byte a number; the scores are saved before and after dropout
    between = (2 * 2 + 2 * 2 + 2 * masks) * hidden  # inputs of both norms, of qkv and up; masks
    inside = 2 * 2 * query + 2 * 2 * model.kv_size + 2 * (3 if model.gated else 2) * inner
    if not flash:
        inside += (2 + (2 + 1) * masks) * scores
    return tokens * (between / residual + inside / tensor)


def head_activations(model, tokens, tensor, precision="amp"):
    """The bytes that the head saves on a rank: its norm's input, its input, and the logits in float32.

    In 16 bit 4 s b h (1 + V / h), arXiv:2205.05198, section 4.3. In float32 the first two take 4 bytes a number, and
    the loss saves its probabilities besides the logits.
    """
    item = PRECISIONS[precision].activation
    logits = 4 if precision == "amp" else 8
    return tokens * (2 * item * model.hidden_size + logits * model.vocab_size / tensor)
