"""The cost of a training recipe on this rank: the bytes that a step sends, and those of its tensors."""

from harness.measure.calls import watching
from harness.measure.observe import observed
from harness.measure.recorder import Recorder
from harness.measure.sent import growth, quiet, sent_by, wait_for


def per_step(path, **arguments):
    """{"sent": bytes that this rank sends in a step, "graph": whether it is an nn.Graph}, and `costs`. Collective.

    A graph runs 3 steps: what 2 steps send is counted from the end of its first call to that of its last. In eager mode
    nothing marks the end of a step, so it is the difference between a run of 3 steps and a run of 1 step.
    """
    at_end = {}  # graph -> the result of `quiet` at the end of each call

    def count(call):
        result = call.proceed()
        wait_for(result)
        at_end.setdefault(call.arguments[0], []).append(quiet())
        return result

    def run(steps):
        return sent_by(lambda: observed(path, Recorder(keeps_initial=False), steps=steps, **arguments)[0])

    with watching(count, ["graph"]):
        tensors, sent = run(3)
        two_steps = sum(growth(first, last) for first, *_, last in at_end.values()) if at_end else sent - run(1)[1]
    return {"sent": two_steps / 2, "graph": bool(at_end), **costs(tensors)}


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
