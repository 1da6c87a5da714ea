"""What OneFlow compiled from an nn.Graph: boxings, gradients, and parameters read without flow._C.identity."""

import re

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.events import GRADIENT, ONEFLOW, SCRIPT
from oneflow_cookbook.measure.sbp import Layout, label_of_proto

# Ops between a parameter's gradient and its optimizer that leave it the same gradient.
PASS_ON = {"acc", "add_n", "cast", "hierarchical_parallel_cast", "identity", "scalar_mul", "scalar_mul_by_tensor"}
ITEM_SIZES = {3: 8, 4: 1, 6: 8, 7: 1, 9: 2}  # bytes of OneFlow's data types by their numbers; all others have 4


class FunctionGraph(flow.nn.Graph):
    """A graph that calls a function of tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, *tensors):
        return self.function(*tensors)


def modules_in(graph):
    """{attribute of a graph: the nn.Module that it holds}."""
    return {name: block.to(flow.nn.Module) for name, block in graph._blocks.items()}


def boxings_of(graph):
    """The boxings in a compiled graph: each edge between two ops that differ in SBP or placement, once.

    A list of {"producer", "consumer": names of ops, "shape", "item": bytes of an element, "old", "new": Layout, "why":
    SCRIPT, GRADIENT or ONEFLOW, "parameter": the one whose gradient it is, or None}.
    """
    job, casts = graph._full_job_proto, casts_of(graph)
    parameters = parameters_of_gradients(job)
    signatures = job.job_parallel_view_conf.op_name2nd_sbp_signature_conf
    blobs = job.helper.lbn2logical_blob_desc
    ranks = ranks_of(job)
    boxings = {}
    for op in job.net.op:
        if op.WhichOneof("op_type") == "user_conf":
            inputs = sorted(op.user_conf.input.items())  # protobuf gives them in any order
            edges = [(f"{key}_{i}", lbn) for key, lbns in inputs for i, lbn in enumerate(lbns.s)]
        else:
            is_output = op.WhichOneof("op_type") == "output_conf"
            edges = [("in", getattr(op.output_conf, "in"))] if is_output else []
        for bn, lbn in edges:
            producer, out = lbn.split("/")
            before, after = signatures[producer].bn_in_op2nd_sbp, signatures[op.name].bn_in_op2nd_sbp
            if out not in before or bn not in after:
                continue
            old = Layout(label_of_proto(before[out]), ranks[producer])
            new = Layout(label_of_proto(after[bn]), ranks[op.name])
            if old != new:
                shape, item = tuple(blobs[lbn].shape.dim), ITEM_SIZES.get(blobs[lbn].data_type, 4)
                edge = {"producer": producer, "consumer": op.name, "shape": shape, "item": item, "old": old, "new": new}
                edge["parameter"] = parameters.get(lbn)
                edge["why"] = GRADIENT if lbn in parameters else why_moved(edge, (lbn, new.sbp) in casts)
                target = ("B", new.ranks) if len(new.ranks) == 1 else new  # on a single rank all SBPs are the same
                boxings.setdefault((lbn, str(target)), edge)  # OneFlow moves it once for all consumers there
    return list(boxings.values())


def casts_of(graph):
    """{(tensor of an op, its new SBP)} of each to_global in a graph, those that backward adds included.

    OneFlow removes most of these ops later, so that the next op converts its input.
    """
    before, casts = {}, set()
    for op in graph._forward_job_proto.net.op:
        if op.user_conf.op_type_name == "hierarchical_parallel_cast":
            [lbn] = op.user_conf.input["in"].s
            source = before[f"{op.name}/out_0"] = before.get(lbn, lbn)
            casts.add((source, ", ".join(op.user_conf.attr["nd_sbp"].at_list_string.val)))
    return casts


def why_moved(edge, is_cast):
    """Who moves an edge of boxings_of that is no gradient: SCRIPT, by to_global or between stages, or ONEFLOW."""
    ops = edge["producer"], edge["consumer"]
    if is_cast or any("hierarchical_parallel_cast" in op for op in ops):
        return SCRIPT
    if ops[1].endswith("_optimizer"):  # such as the learning rate
        return ONEFLOW
    return ONEFLOW if edge["old"].ranks == edge["new"].ranks else SCRIPT


def parameters_of_gradients(job):
    """{tensor of an op: the parameter whose gradient it is}, from where it is computed to the optimizer."""
    inputs = {op.name: op.user_conf.input for op in job.net.op}
    passes_on = {op.name for op in job.net.op if op.user_conf.op_type_name in PASS_ON}
    parameters = {}
    for op in job.net.op:
        gradients = list(inputs[op.name]["model_diff"].s) if "model_diff" in inputs[op.name] else []
        while gradients:
            gradient = gradients.pop()
            parameters[gradient] = re.sub("_optimizer$", "", op.name)
            producer = gradient.split("/")[0]
            if producer in passes_on:
                sources = [inputs[producer][key].s for key in ("in", "x") if key in inputs[producer]]
                gradients += [source for lbns in sources for source in lbns]
    return parameters


def ranks_of(job):
    """{name of an op: the ranks or the mesh that it runs on}."""
    ranks = {}
    for group in job.placement.placement_group:
        conf = group.parallel_conf
        members = [int(name.split(":")[0].lstrip("@")) for name in conf.device_name]
        mesh = np.reshape(members, list(conf.hierarchy.dim) or -1).tolist()
        ranks.update(dict.fromkeys(group.op_set.op_name, mesh))
    return ranks


def training_bytes(graph, rank):
    """{"gradients": bytes of the gradients on a rank, "state": bytes of the optimizer's state, as Adam's moments}.

    graph: compiled. Only gradients that an optimizer reads are counted.
    """
    job = graph._full_job_proto
    signatures, ranks = job.job_parallel_view_conf.op_name2nd_sbp_signature_conf, ranks_of(job)
    blobs = job.helper.lbn2logical_blob_desc
    variables = {op.name for op in job.net.op if op.WhichOneof("op_type") == "variable_conf"}

    def bytes_of(op, bn, blob):
        layout = Layout(label_of_proto(signatures[op.name].bn_in_op2nd_sbp[bn]), ranks[op.name])
        return ITEM_SIZES.get(blob.data_type, 4) * layout.size(tuple(blob.shape.dim), rank)

    totals = {"gradients": 0, "state": 0}
    for op in job.net.op:
        if "model_diff" in op.user_conf.input:
            totals["gradients"] += bytes_of(op, "model_diff_0", blobs[op.user_conf.input["model_diff"].s[0]])
        elif op.name in variables and op.name.rpartition("-")[0] in variables:  # "w-m" beside "w"
            totals["state"] += bytes_of(op, "out", op.variable_conf)
    return totals
