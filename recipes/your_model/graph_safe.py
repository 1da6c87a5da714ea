"""Make nn.Graph train any model as eager mode does, or refuse it: what the module recipes of this folder share.

nn.Graph calls each forward with a proxy of the layer in place of the layer. This makes three differences, and
`prepare_for_graph(model)` gives each layer a forward that takes them away:

- `super().forward(x)` raises TypeError, as the proxy is no instance of the class. So forward gets the layer itself. The
  layer's parameters are those of eager mode, which a graph would not train: while forward runs, `vars(layer)` holds the
  graph's own parameters, buffers and proxies of its parts, and then the old ones again.
- forward runs once, when the graph is compiled, and hooks never: what forward keeps in self or changes in place would
  be lost after the first step, silently. Both are refused. After a change in place a tensor of a graph is the same
  Python object, and stands for the output of a different op. Only the job that is being built names that output: as
  the input of the op that was added last, for which `output_of` adds an identity.
- A graph with micro-batches may read a parameter while the optimizer changes it, unless it reads through identity.

Use it after the layout and before the graph is made: lay_out, shard and assign_stages call it.
"""

import oneflow as flow
from oneflow import nn
from oneflow.core.job.job_pb2 import Job

# flow._C and flow._oneflow_internal are private to OneFlow 0.9.0: a different version may lack what is called here


def prepare_for_graph(model):
    """Make nn.Graph train a model as eager mode does, or refuse it."""
    for layer in model.modules():
        if type(layer).forward is not nn.Module.forward and not getattr(type(layer), "_prepared_for_graph", False):
            prepare_layer(layer)


def prepare_layer(layer):
    """Give a layer a subclass of its own class: nn.Graph ignores a forward that is set on the layer itself."""
    kind = type(layer)

    def forward(self, *args, **kwargs):
        if isinstance(self, nn.Module):
            return kind.forward(self, *args, **kwargs)
        return forward_in_graph(kind, self, args, kwargs)

    attributes = {"forward": forward, "__module__": kind.__module__, "_prepared_for_graph": True}
    layer.__class__ = type(kind.__name__, (kind,), attributes)


def forward_in_graph(kind, proxy, args, kwargs):
    """Call forward on the layer and not on the graph's proxy of it, with which super().forward fails."""
    layer = proxy.to(nn.Module)
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise RuntimeError(f"{kind.__name__} has a forward hook, which nn.Graph does not call; train in eager mode")
    for parameter in proxy.parameters():
        builder = parameter.lazy_origin_builder()
        if not isinstance(builder.method, ThroughIdentity):
            builder.method = ThroughIdentity(builder.method)
    tables = {}  # during forward, the graph's tensors and proxies take the place of the layer's own
    for table in ("_parameters", "_buffers", "_modules"):
        tables[table] = {name: getattr(proxy, name) for name in vars(layer)[table]}
    before = {**vars(layer), **tables["_buffers"]}
    watched = {**tables["_buffers"], **(tables["_parameters"] if may_change_parameters(kind, layer) else {})}
    outputs = {name: output_of(tensor) for name, tensor in watched.items() if tensor is not None}
    vars(layer).update(tables)
    try:
        out = kind.forward(layer, *args, **kwargs)
    finally:
        vars(layer).update({table: before[table] for table in tables})
    for name, value in {**vars(layer), **tables["_buffers"]}.items():
        if name not in before or before[name] is not value:  # forward runs once, when the graph is compiled
            raise RuntimeError(f"{kind.__name__}.forward keeps {name} in self, which nn.Graph loses; return it instead")
    for name, output in outputs.items():
        if output_of(watched[name]) != output and name != "num_batches_tracked":  # BatchNorm does not use its number
            raise RuntimeError(
                f"{kind.__name__}.forward changes {name} in place, which nn.Graph loses; train in eager mode"
            )
    return out


def may_change_parameters(kind, layer):
    """Whether it has a forward of yours, or max_norm; OneFlow's other layers only read their parameters."""
    is_of_a_recipe = {"split", "_gathers_parameters"} & set(vars(kind))  # Column, Row, or of a fully sharded layer
    only_reads = kind.__module__.startswith("oneflow.") or is_of_a_recipe
    return not only_reads or getattr(layer, "max_norm", None) is not None


def output_of(tensor):
    """The output of an op that a tensor of a graph stands for; after a change in place it is a different one."""
    flow._C.identity(tensor)
    job = Job.FromString(flow._oneflow_internal.GetSerializedCurrentJob())
    return job.net.op[-1].user_conf.input["in"].s[0]


class ThroughIdentity:
    """Reads a parameter of a graph through identity: else micro-batches may read it while it is updated, silently."""

    def __init__(self, read):
        self.read = read

    def __call__(self):
        return flow._C.identity(self.read())
