"""What the tests of gpt.py call on the ranks of a pool."""

import argparse
import os
import pathlib
from collections import Counter

import oneflow as flow

from harness.measure.graph import gradient_bytes
from harness.measure.observe import recorded, replaced
from harness.measure.sbp import label
from harness.measure.sent import quiet
from harness.measure.tensors import snapshot
from harness.start import recipe

COUNTED = (2, 4)  # steps after which the bytes are read: the first one connects the ranks


def moment(state, i, name, second=False):
    """AdamW's first or second moment of the i-th weight, from a state of eager mode or of a graph."""
    if "optimizer" in state:
        return state["optimizer"]["state"][i]["exp_avg_sq" if second else "exp_avg"]
    return state[f"module.{name}-{'v' if second else 'm'}"]


def local_bytes(tensor):
    """The bytes of this rank's shard: none outside the placement."""
    shard = tensor.to_local()
    return shard.numel() * shard.element_size()


def trained(path, bare=(), folder="", **arguments):
    """Run gpt.py; what `run` returned, as a `snapshot` of each; AdamW's first moments after the first step, by name.

    And the SBPs of matmuls and the logits in the loss; of each forward pass the number of matmuls and {SBPs of a move
    and of its gradient: how many}; the stages of its graph and what it read without identity; the bytes that this rank
    "kept" after the first step, and what its connections had "sent" after the steps COUNTED, for `between_ranks`.
    bare: names of weights that it reads so on purpose.
    """
    module, moments, kept, sent, graphs, logits_sbps, passes = recipe.load(path), {}, {}, {}, [], set(), []
    entropy = flow._C.sparse_softmax_cross_entropy
    weight, save, call, update = module.Part.weight, module.save, flow.nn.Graph.__call__, flow.optim.AdamW.step
    forward = module.GPT.forward

    def without_identity(part, name):
        return getattr(part, name) if name in bare else weight(part, name)

    def keeping_call(graph, *inputs, **named):
        graphs.append(graph)
        return call(graph, *inputs, **named)

    def recording_forward(model, *arguments):
        before = {kind: len(seen[kind]) for kind in ("matmuls", "moves")}
        result = forward(model, *arguments)
        matmuls, moves = (seen[kind][count:] for kind, count in before.items())
        by_sbps = Counter((old[0], new[0], backward) for old, new, *grad_sbp in moves for backward in grad_sbp)
        passes.append((len(matmuls), by_sbps))
        return result

    def recording_entropy(logits, targets):
        logits_sbps.add((label(logits.sbp),))
        return entropy(logits, targets)

    def counting_update(optimizer, *rest, **named):
        weights = [weight for group in optimizer.param_groups for weight in group.parameters]
        kept["gradients"] = sum(local_bytes(weight.grad) for weight in weights)
        return update(optimizer, *rest, **named)

    def look(state, where, step):
        if not moments:
            names = state["module"]
            moments.update({name: moment(state, i, name).numpy() for i, name in enumerate(names)})  # collective
            kept["weights"] = sum(local_bytes(tensor) for tensor in names.values())
            both = [moment(state, i, name, second) for i, name in enumerate(names) for second in (False, True)]
            kept["moments"] = sum(map(local_bytes, both))
        if step in COUNTED:
            sent[step] = quiet()
        if folder:
            save(state, where, step)

    module.save = look
    places = {(module.Part, "weight"): without_identity, (flow.nn.Graph, "__call__"): keeping_call}
    places.update({(flow.optim.AdamW, "step"): counting_update, (flow._C, entropy.__name__): recording_entropy})
    places[module.GPT, "forward"] = recording_forward
    with replaced(places), recorded() as seen:
        tensors = module.run(folder=folder or "nowhere", every=1, **arguments)
    for graph in graphs[:1]:
        kept["gradients"] = gradient_bytes(graph, flow.env.get_rank())
    held = {name: snapshot(tensor) for name, tensor in tensors.items()}
    matmuls = {tuple(sbp for sbp, *_ in operands) for operands in seen["matmuls"]}
    passes.pop(-1 - arguments.get("sample", 0))  # that of rank 0 alone
    facts = {"matmuls": matmuls, "passes": passes, "logits": logits_sbps, "without_identity": seen["without_identity"]}
    facts["stages"] = seen["stages"] if graphs else None
    return {"tensors": held, "moments": moments, "kept": kept, "sent": sent, **facts}


def losses_and_letters(path, **arguments):
    """The losses of a run of gpt.py, and the letters that it drew."""
    module = recipe.load(path)
    tensors = module.run(**arguments)
    return tensors["losses"].numpy().tolist(), tensors["drawn"].numpy().tolist()


def refused(path, **arguments):
    """What gpt.py says, as of a bad option, before it ends with exit code 2."""

    def say(parser, message):
        raise ValueError(message)

    with replaced({(argparse.ArgumentParser, "error"): say}):
        try:
            recipe.load(path).run(**arguments)
        except ValueError as error:
            return str(error)


def die(path, moment, step, **arguments):
    """Run gpt.py; rank 0 dies in this step: before it saves, with not all files written, or before it is named."""
    module = recipe.load(path)
    save = module.save

    def dying(state, folder, now):
        if now < step:
            return save(state, folder, now)
        if moment == "in training":
            os._exit(9)
        places = {"not all files": (pathlib.Path, "write_bytes"), "not named": (os, "replace")}
        with replaced({places[moment]: lambda *_: os._exit(9)}):
            save(state, folder, now)

    if flow.env.get_rank() == 0:
        module.save = dying
    module.run(**arguments)
