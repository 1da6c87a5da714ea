"""What a step of gpt.py must move along each axis of a mesh, and what a rank keeps, by the formulas of Megatron-LM.

D. Narayanan et al., arXiv:2104.04473, and V. Korthikanti et al., arXiv:2205.05198: a ring all-reduce of K bytes among n
ranks sends 2(n-1)K, all ranks together; a layer needs 4 all-reduces of its activation along the tensor axis, or as many
pairs of an all-gather and a reduce-scatter; a weight with AdamW takes 16 bytes: itself, its gradient and two moments.
"""

ITEM = 4  # bytes of a float32
KEPT = 4  # numbers that are kept for each weight: itself, its gradient, two moments
AXES = ("data", "tensor", "pipeline")


def weights(vocab_size, seq_len, num_layers, hidden_size):
    """(elements that the mesh splits, elements that it does not) of the token table, of the layers, and of the rest."""
    return {
        "table": (vocab_size * hidden_size, 0),
        "layers": (12 * num_layers * hidden_size**2, 2 * num_layers * hidden_size),
        "positions": (0, seq_len * hidden_size),
        "norm": (0, hidden_size),
    }


def kept(mesh, vocab_size, seq_len, num_layers, hidden_size, shard_weights=False, **_):
    """The bytes of weights, gradients and moments on the rank that keeps most."""
    data, tensor, pipeline = mesh
    parts = weights(vocab_size, seq_len, num_layers // pipeline, hidden_size)
    stages = [["layers"] for _ in range(pipeline)]
    stages[0] += ["table", "positions"]
    stages[-1] += ["norm"]
    split = tensor * (data if shard_weights else 1)
    sizes = [[parts[name] for name in stage] for stage in stages]
    return KEPT * ITEM * max(sum(large / split + whole for large, whole in stage) for stage in sizes)


def moved(mesh, vocab_size, batch_size, seq_len, num_layers, hidden_size, sequence_parallel=False, **_):
    """{axis: bytes that all ranks together send along it in a step}."""
    data, tensor, pipeline = mesh
    activation, table = ITEM * batch_size * seq_len * hidden_size, ITEM * vocab_size * hidden_size
    parts = weights(vocab_size, seq_len, num_layers, hidden_size).values()
    copies = 1 if sequence_parallel else tensor  # of the residual
    return {
        # the gradients, or under --shard-weights the weights forward and the gradients backward
        "data": 2 * (data - 1) * ITEM * sum(large + tensor * whole for large, whole in parts),
        # also of the embedding forward, and of the head backward
        "tensor": 2 * (tensor - 1) * (4 * num_layers + 2) * activation,
        # the residual and its gradient; the tied table and its gradient between the first stage and the last
        "pipeline": 2 * (pipeline - 1) * copies * activation + (2 * data * table if pipeline > 1 else 0),
    }
