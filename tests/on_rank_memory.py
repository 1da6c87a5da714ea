"""What the tests of the memory chapter call on the ranks of a pool."""

from oneflow.nn.graph.graph_config import GraphConfig

from oneflow_cookbook.measure.calls import replaced, watching
from oneflow_cookbook.measure.entry import call_entry
from oneflow_cookbook.measure.graph import boxings_of
from oneflow_cookbook.measure.sbp import label_of_proto
from oneflow_cookbook.measure.sent import wait_for
from oneflow_cookbook.start import recipe


def compiled(path, stage=None, **arguments):
    """The job into which OneFlow compiled a recipe's graph; stage: of ZeRO, in place of the recipe's own.

    Returns {"ops": {name: (type, {tensor of the op: SBP})}, "boxings": [(old SBP, new SBP, shape), ...], sorted}.
    """
    graphs, stages, enable_zero = [], [], GraphConfig.enable_zero

    def keep(call):
        graphs.append(call.arguments[0])
        return call.proceed()

    def other_stage(config, mode, **options):
        stages.append(stage)
        enable_zero(config, mode, **{**options, "stage": stage})

    places = {(GraphConfig, "enable_zero"): other_stage} if stage else {}
    with replaced(places), watching(keep, ["graph"]):
        wait_for(call_entry(recipe.load(path), arguments))  # if OneFlow aborts, then here
    [graph] = set(graphs)
    assert stages == [stage] * bool(stage)
    ops = {}
    job = graph._full_job_proto
    signatures = job.job_parallel_view_conf.op_name2nd_sbp_signature_conf
    for op in job.net.op:
        kind = op.WhichOneof("op_type")
        sbps = {tensor: label_of_proto(sbp) for tensor, sbp in signatures[op.name].bn_in_op2nd_sbp.items()}
        ops[op.name] = (op.user_conf.op_type_name if kind == "user_conf" else kind, sbps)
    boxings = [boxing for boxing in boxings_of(graph) if boxing["shape"] != (1,)]
    return {"ops": ops, "boxings": sorted((b["old"][0], b["new"][0], b["shape"]) for b in boxings)}
