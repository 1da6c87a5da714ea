"""The cost of a training recipe on this rank: the bytes that a step sends, and those of its tensors."""

from oneflow_cookbook.measure.calls import watching
from oneflow_cookbook.measure.observe import observed
from oneflow_cookbook.measure.recorder import Recorder
from oneflow_cookbook.measure.sent import growth, quiet, wait_for


def per_step(path, **arguments):
    """{"sent": bytes that this rank sends in a step, "graph": whether it is an nn.Graph}, and `costs`. Collective.

    Of 3 steps the first is not counted. A step ends with a call of the graph, or in eager mode with an update of the
    optimizer. AssertionError if not every step can have the same number of these.
    """
    ends = {"graph": [], "update": []}  # kind of call -> the result of `quiet` at the end of each

    def count(call):
        result = call.proceed()
        if call.kind == "graph":
            wait_for(result)
        ends[call.kind].append(quiet())
        return result

    with watching(count, list(ends)):
        tensors, _ = observed(path, Recorder(keeps_initial=False), steps=3, **arguments)
    counts = ends["graph"] or ends["update"]
    assert counts and len(counts) % 3 == 0, f"{len(counts)} updates in 3 steps"
    sent = growth(counts[len(counts) // 3 - 1], counts[-1]) / 2
    return {"sent": sent, "graph": bool(ends["graph"]), **costs(tensors)}


def costs(tensors):
    """Bytes of the tensors of a training recipe after the last step. tensors: from `observed`.

    {"weights": of the whole trained weights, "kept": {"weights", "gradients", "state": of the optimizer} of the shards
    on this rank}.
    """
    weights, resident = 0, dict.fromkeys(("weights", "gradients", "state"), 0)
    for name, tensor in tensors.items():
        first, _, rest = name.partition(" ")
        if first == "new" or (rest and f"new {first}" in tensors):
            shard = tensor.to_local() if tensor.is_global else tensor
            if first == "new":
                kind = "weights"
                weights += tensor.numel() * tensor.element_size()
            else:
                kind = "gradients" if rest.endswith("grad") else "state"
            resident[kind] += shard.numel() * shard.element_size()
    return {"weights": weights, "kept": resident}
