"""The ledger: which steps of a recipe made this rank send bytes, how many, and how many the formula says.

Bytes are counted in the `wchar` of /proc/self/io, which grows with all that the process writes, its sockets included.
"""

import argparse
import inspect
import linecache
import time

import oneflow as flow

from harness import recipe
from harness.memory import at_rest
from harness.observe import MATMULS, TO_GLOBAL, kept, replaced, where

ITEM_SIZES = {3: 8, 4: 1, 6: 8, 7: 1, 9: 2}  # bytes of OneFlow's data types, by its number for each; 4 for all others


def wchar():
    """The bytes that this process has written so far."""
    with open("/proc/self/io") as counters:
        return int(dict(line.split(": ") for line in counters)["wchar"])


def quiet_wchar():
    """The same once every rank has done all that it was told and what it sent is on its way.

    No rank goes on before all have read, for what one rank sends makes others send, whatever their scripts are doing.
    """
    flow._oneflow_internal.eager.Sync()
    flow.comm.barrier()
    before, same = wchar(), 0
    while same < 2:
        time.sleep(0.005)
        now = wchar()
        before, same = now, same + 1 if now == before else 0
    flow.comm.barrier()
    return now


def tensors_in(values):
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(values, flow.Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_in(value)]


def sent_by(function):
    """What a call returns, and the bytes that this rank sent for it. Collective: every rank makes the same call."""
    before = quiet_wchar()
    result = function()
    wait_for(result)
    return result, quiet_wchar() - before


def wait_for(result):
    """Wait until this rank has its part of all tensors in `result`: a graph runs on when its call has returned."""
    for tensor in tensors_in(result):
        if not tensor.is_global or flow.env.get_rank() in tensor.placement.ranks:
            (tensor.to_local() if tensor.is_global else tensor).detach().numpy()


def described(tensor):
    """A tensor without its content."""
    sbp, device, ranks = where(tensor)
    item = tensor.element_size()
    return {"sbp": sbp, "device": device, "ranks": ranks, "shape": tuple(tensor.shape), "item": item, "id": id(tensor)}


class Ledger:
    """Measures the calls that go through `step`; those inside another one belong to it."""

    def __init__(self, path):
        self.path, self.steps, self.inside, self.kept = str(path), [], False, []

    def step(self, what, function):
        def call(*arguments, **named):
            tensors = tensors_in([arguments, named])
            if self.inside or any(tensor.is_lazy for tensor in tensors):
                return function(*arguments, **named)
            self.inside = True
            try:
                result, sent = sent_by(lambda: function(*arguments, **named))
            finally:
                self.inside = False
            turned = [bool(named.get(name, False)) for name in ("transpose_a", "transpose_b")]
            self.note(what, sent, tensors, tensors_in(result), transposed=turned)
            return result

        return call

    def note(self, what, sent, inputs, outputs, **more):
        self.kept += inputs + outputs  # so that no other tensor gets the id of one of them
        inputs, outputs = ([described(tensor) for tensor in tensors] for tensors in (inputs, outputs))
        self.steps.append({"what": what, "sent": sent, "inputs": inputs, "outputs": outputs, **self.line(), **more})

    def line(self):
        """Where in the script we are: number and text of the line; number 0 outside of it."""
        frame = inspect.currentframe()
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        number = frame.f_lineno if frame else 0
        return {"line": number, "text": linecache.getline(self.path, number).strip()}

    def graph_call(self, call):
        """A graph's first call builds it; here it is built before, so that what is measured is the call alone."""
        measured = []

        def graph(self_, *arguments, **named):
            if self.inside or self_ in measured:
                return call(self_, *arguments, **named)
            measured.append(self_)
            self.inside = True
            try:
                if not self_._is_compiled:
                    self_._compile(*arguments, **named)
                result, sent = sent_by(lambda: call(self_, *arguments, **named))
            finally:
                self.inside = False
            what, inputs = f"a call of {type(self_).__name__}", tensors_in([arguments, named])
            self.note(what, sent, inputs, tensors_in(result), boxings=boxings_of(self_))
            return result

        return graph


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
            edges = [(f"{key}_{i}", lbn) for key, lbns in op.user_conf.input.items() for i, lbn in enumerate(lbns.s)]
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


def measure(path, **arguments):
    """Run the recipe at `path` on this rank; returns {"tensors": {name: described}, "steps": [...], "outside": bytes}.

    "outside" is what this rank sent between the steps, such as making tensors and building graphs. Where the recipe
    refuses the arguments, or does not return tensors by name: {"refusal": why}. Collective.
    """
    module = recipe.load(path)
    if hasattr(module, "refusal"):
        defaults = {name: parameter.default for name, parameter in inspect.signature(module.run).parameters.items()}
        refusal = module.refusal(argparse.Namespace(**{**defaults, **arguments}))
        if refusal:
            return {"refusal": refusal}
    ledger = Ledger(path)
    kept.append(module)
    before = {name: getattr(*name) for name in [*MATMULS, TO_GLOBAL]}
    places = {name: ledger.step("matmul", before[name]) for name in MATMULS}
    places[TO_GLOBAL] = ledger.step("to_global", before[TO_GLOBAL])
    places[flow.Tensor, "backward"] = ledger.step("backward", flow.Tensor.backward)
    places[flow.nn.Graph, "__call__"] = ledger.graph_call(flow.nn.Graph.__call__)
    with replaced(places):
        tensors, sent = sent_by(lambda: module.run(**arguments))
    if not isinstance(tensors, dict) or not all(isinstance(tensor, flow.Tensor) for tensor in tensors.values()):
        return {"refusal": f"its function run must return a dict of tensors by name, and returned {tensors!r:.80}"}
    kept.append((tensors, ledger.kept))
    steps = ledger.steps
    outside = sent - sum(step["sent"] for step in steps)
    return {
        "tensors": {name: described(tensor) for name, tensor in tensors.items()},
        "steps": steps,
        "outside": outside,
    }


def per_step(path, **arguments):
    """What this rank sends for one step of the training recipe at `path`, all that it does in it, and what it keeps.

    In a graph of 3 steps the bytes from the end of the first to the end of the last call are those of 2. In eager mode
    nothing marks the end of a step; there 1 step and 3 steps are run, and what they do not have in common is 2.
    Returns {"sent": bytes, "weights": bytes of all weights, on whatever rank, "held": what memory.at_rest says,
    "graph": whether it runs in one}. Collective.
    """
    module = recipe.load(path)
    kept.append(module)
    ends, call = {}, flow.nn.Graph.__call__  # the bytes sent at the end of each call of a graph

    def noted_call(graph, *arguments, **named):
        result = call(graph, *arguments, **named)
        wait_for(result)
        ends.setdefault(graph, []).append(quiet_wchar())
        return result

    def run(steps):
        tensors, sent = sent_by(lambda: module.run(steps=steps, **arguments))
        kept.append((vars(module.run).copy(), tensors))  # with its graph
        return tensors, sent

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
        kept.append(function)
        function._compile(*tensors)
    result, sent = sent_by(lambda: function(*tensors))
    return where(result)[0], sent
