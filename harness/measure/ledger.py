"""The ledger: which steps of a script made this rank send bytes, how many, and how many a step of training sends."""

import argparse
import contextlib
import runpy
import sys
from pathlib import Path

import oneflow as flow

from harness.measure.memory import at_rest
from harness.measure.names import described
from harness.measure.observe import replaced, where
from harness.measure.sent import quiet_wchar, sent_by, wait_for
from harness.measure.trace import Refusal, Trace
from harness.start import recipe

ITEM_SIZES = {3: 8, 4: 1, 6: 8, 7: 1, 9: 2}  # bytes of OneFlow's data types, by its number for each; 4 for all others


def boxings_of(graph):
    """The moves in a graph that OneFlow has compiled: each edge whose ends differ in SBP or placement, once.

    A list of {"producer", "consumer": names of ops, "shape", "item", "old", "new": (SBP, ranks)}.
    """
    job = graph._full_job_proto
    signatures = job.job_parallel_view_conf.op_name2nd_sbp_signature_conf
    blobs = job.helper.lbn2logical_blob_desc
    ranks = {}
    for group in job.placement.placement_group:
        conf = group.parallel_conf
        members = [int(name.split(":")[0].lstrip("@")) for name in conf.device_name]
        dims = list(conf.hierarchy.dim)
        if len(dims) > 1:
            members = [members[i : i + dims[-1]] for i in range(0, len(members), dims[-1])]
        ranks.update(dict.fromkeys(group.op_set.op_name, members))

    def sbp_of(op, name):
        nd_sbp = signatures[op].bn_in_op2nd_sbp[name].sbp_parallel
        kinds = [(one.WhichOneof("parallel_type"), one) for one in nd_sbp]
        short = {"broadcast_parallel": "B", "partial_sum_parallel": "P"}
        return ", ".join(short.get(kind) or f"S({one.split_parallel.axis})" for kind, one in kinds)

    found = {}
    for op in job.net.op:
        kind = op.WhichOneof("op_type")
        if kind == "user_conf":
            inputs = sorted(op.user_conf.input.items())  # else they come in any order
            edges = [(f"{key}_{i}", lbn) for key, lbns in inputs for i, lbn in enumerate(lbns.s)]
        else:
            edges = [("in", getattr(op.output_conf, "in"))] if kind == "output_conf" else []
        for bn, lbn in edges:
            producer, out = lbn.split("/")
            if bn not in signatures[op.name].bn_in_op2nd_sbp or out not in signatures[producer].bn_in_op2nd_sbp:
                continue
            old, new = (sbp_of(producer, out), ranks[producer]), (sbp_of(op.name, bn), ranks[op.name])
            if old != new:
                blob = blobs[lbn]
                shape, item = tuple(blob.shape.dim), ITEM_SIZES.get(blob.data_type, 4)
                edge = {"producer": producer, "consumer": op.name, "shape": shape, "item": item, "old": old, "new": new}
                there = ("B", new[1]) if len(new[1]) == 1 else new  # one rank has it all, whatever the SBP
                found.setdefault((lbn, str(there)), edge)  # OneFlow moves it once for all who want it there
    return list(found.values())


def measure_script(path, given=None, words=()):
    """Run the script at `path` on this rank, traced. Collective.

    given: the arguments of its entry `run`; None: run it whole, as `python path *words` would.
    Returns {"tensors": those that `run` returned by name, else those that were seen, each with its name, "returned":
    which of the two, "names": {id: name}, "steps": see trace.py, "outside": bytes that this rank sent besides}, or,
    where it would leave a rank without a part of a tensor, or does not know its arguments, {"refusal": why}.
    """
    trace = Trace(path)

    def run():
        return as_main(path, words) if given is None else recipe.load(path).run(**given)

    try:
        with beside(path), trace.on():
            result, sent = sent_by(run)
    except Refusal as refusal:
        return {"refusal": str(refusal)}
    for step in trace.steps:
        if "graph" in step:
            step["boxings"] = boxings_of(step.pop("graph"))
    by_name = isinstance(result, dict) and all(isinstance(tensor, flow.Tensor) for tensor in result.values())
    returned = result if by_name else {}
    names, tensors = named(trace, returned)
    return {
        "tensors": tensors,
        "returned": bool(returned),
        "names": names,
        "steps": trace.steps,
        "outside": max(0, sent - sum(step["sent"] * step["times"] for step in trace.steps)),
    }


def named(trace, returned):
    """({id: name}, the tensors to draw, each with its name and "after": the number of steps before it)."""
    names, held, end = trace.names.all(), trace.names.described, len(trace.steps)
    if not returned:
        used = {one["id"] for step in trace.steps for one in step["inputs"] + step["outputs"]}
        seen = [one for number, one in held.items() if number in used or number in trace.names.shown]
        return names, [{**one, "name": names.get(one["id"], "·")} for one in seen if one["sbp"] != "local"]
    tensors, own = [], {}
    for name, tensor in returned.items():
        number, trained = id(tensor), name[:4] == "new "  # what is trained is the same tensor as before
        after = held[number]["after"] if number in held and not trained else end
        if number in own:  # one tensor with two names: it was moved to where it is
            made = [k for k, step in enumerate(trace.steps, 1) if number in [one["id"] for one in step["outputs"]]]
            after = max([after, *made])
        if not (trained and number in names):  # before the training, its path is its name
            own.setdefault(number, name)
        tensors.append({**described(tensor), "name": name, "after": after})
    return {**names, **own}, tensors


def measure(path, **arguments):
    """`measure_script` of a recipe's entry with these arguments."""
    return measure_script(path, arguments)


def as_main(path, words):
    """Run a script as `python path *words` does. Raises Refusal if it does not know the words."""

    def refuse(parser, message):
        raise Refusal(f"{Path(path).name}: {message}")

    with replaced({(sys, "argv"): [path, *words], (argparse.ArgumentParser, "error"): refuse}):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"the script called sys.exit({stop.code!r})") from None


@contextlib.contextmanager
def beside(path):
    """While it lasts, the script at `path` can import what lies beside it."""
    before = list(sys.path)
    sys.path.insert(0, str(Path(path).parent))
    try:
        yield
    finally:
        sys.path[:] = before


def per_step(path, **arguments):
    """What this rank sends for one step of the training recipe at `path`, all that it does in it, and what it keeps.

    In a graph of 3 steps the bytes from the end of the first to the end of the last call are those of 2. In eager mode
    nothing marks the end of a step; there 1 step and 3 steps are run, and what they do not have in common is 2.
    Returns {"sent": bytes, "weights": bytes of all weights, on whatever rank, "held": what memory.at_rest says,
    "graph": whether it runs in one}. Collective.
    """
    module = recipe.load(path)
    ends, call = {}, flow.nn.Graph.__call__  # the bytes sent at the end of each call of a graph

    def noted_call(graph, *arguments, **named):
        result = call(graph, *arguments, **named)
        wait_for(result)
        ends.setdefault(graph, []).append(quiet_wchar())
        return result

    def run(steps):
        return sent_by(lambda: module.run(steps=steps, **arguments))

    with replaced({(flow.nn.Graph, "__call__"): noted_call}):
        tensors, sent = run(3)
        two_steps = sum(sent[-1] - sent[0] for sent in ends.values()) if ends else sent - run(1)[1]
    weights = sum(one.numel() * one.element_size() for name, one in tensors.items() if name.startswith("new "))
    return {"sent": two_steps / 2, "weights": weights, "held": at_rest(tensors), "graph": bool(ends)}


SBPS = {"B": flow.sbp.broadcast, "S(0)": flow.sbp.split(0), "S(1)": flow.sbp.split(1), "P": flow.sbp.partial_sum}


def conversions(shape, source, target, graph):
    """Measure to_global from each SBP on the ranks `source` to each on the ranks `target`, for a tensor of this shape.

    Returns {(old SBP, new SBP): bytes that this rank sent}. Collective.
    """
    ranks, new_ranks = flow.placement("cpu", source), flow.placement("cpu", target)
    sent = {}
    for old in SBPS:
        x = flow.ones(*shape, placement=ranks, sbp=SBPS[old])
        for new in SBPS:
            sent[old, new] = one_call(lambda x, new=new: x.to_global(placement=new_ranks, sbp=SBPS[new]), graph, x)[1]
    return sent


def signatures(x_shape, w_shape, graph):
    """Measure matmul in each pair of SBPs, on all ranks.

    Returns {(SBP of x, of w): (SBP of the product, bytes that this rank sent)}. Collective.
    """
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    x, w = ({name: flow.ones(*shape, placement=ranks, sbp=SBPS[name]) for name in SBPS} for shape in (x_shape, w_shape))
    return {(i, j): one_call(flow.matmul, graph, x[i], w[j]) for i in SBPS for j in SBPS}


class OneCall(flow.nn.Graph):
    """A function as a graph."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, *tensors):
        return self.function(*tensors)


def one_call(function, graph, *tensors):
    """The SBP of what a function of global tensors returns, and the bytes that this rank sends for one call of it.

    graph: whether the function runs in an nn.Graph, which is built before.
    """
    if graph:
        function = OneCall(function)
        function._compile(*tensors)
    result, sent = sent_by(lambda: function(*tensors))
    return where(result)[0], sent
