"""What a training recipe keeps in the memory of this rank: weights, gradients, optimizer state; and the peak."""

import oneflow as flow

from harness.measure.observe import kept
from harness.start import recipe


def status(field):
    """A size in bytes from /proc/self/status: "VmRSS", the resident memory, or "VmHWM", the highest it has been."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def shard_bytes(tensor):
    """The bytes of a tensor on this rank."""
    shard = tensor.to_local() if tensor.is_global else tensor
    return shard.numel() * shard.element_size()


def at_rest(tensors):
    """The bytes of this rank's shards of what a recipe returned: {"weights": those after the last step, "gradients",
    "state": all that the optimizer keeps}."""
    sizes = dict.fromkeys(("weights", "gradients", "state"), 0)
    weights = {name[len("new ") :] for name in tensors if name.startswith("new ")}
    for name, tensor in tensors.items():
        if name.startswith("new "):
            sizes["weights"] += shard_bytes(tensor)
        elif name.split(" ")[0] in weights and " " in name:
            sizes["gradients" if name.endswith(" grad") else "state"] += shard_bytes(tensor)
    return sizes


def memory(path, **arguments):
    """Run the training recipe at `path`; returns its bytes `at_rest` and "peak", on this rank. Collective.

    "peak": how far the resident memory rose above where it was when the run began: inputs, weights before and after,
    all else at rest, and what a step needs on top. OneFlow gives memory that it no longer needs to the next tensors
    and not back to the system, so only the first run in a process has a peak that says something.
    """
    module = recipe.load(path)
    kept.append(module)
    flow.comm.barrier()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as references:
        references.write("5")  # VmHWM starts again from VmRSS
    tensors = module.run(**arguments)
    flow._oneflow_internal.eager.Sync()
    peak = status("VmHWM") - before
    flow.comm.barrier()
    kept.append(tensors)
    return {**at_rest(tensors), "peak": peak}
