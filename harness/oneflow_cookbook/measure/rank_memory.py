"""The memory of a script on this rank: its peak, and the bytes of its weights, gradients and optimizer state."""

import weakref

import oneflow as flow

from oneflow_cookbook.measure.calls import watching
from oneflow_cookbook.measure.graph import modules_in, training_bytes
from oneflow_cookbook.measure.script import run_script
from oneflow_cookbook.measure.tensors import layout_of

WATCHED = ("module", "backward", "update", "graph")  # kinds of calls after which the tensors are looked at


class Held:
    """The most bytes of each kind that this rank holds of a script's tensors.

    weights: the parameters of the modules that it calls and of its optimizers; gradients, state: theirs.
    """

    def __init__(self):
        self.modules, self.optimizers, self.graphs = weakref.WeakSet(), weakref.WeakSet(), weakref.WeakSet()
        self.most = dict.fromkeys(("weights", "gradients", "state"), 0)

    def see(self, call):
        result = call.proceed()
        if set(WATCHED) & set(call.around):  # a part of a module, or a module in a graph
            return result
        owners = {"module": self.modules, "update": self.optimizers, "graph": self.graphs}
        if call.kind in owners:
            owners[call.kind].add(call.arguments[0])
        for kind, count in bytes_held(self.parameters(), self.optimizers, self.graphs).items():
            self.most[kind] = max(self.most[kind], count)
        return result

    def parameters(self):
        modules = [*self.modules, *(module for graph in self.graphs for module in modules_in(graph).values())]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        for optimizer in self.optimizers:
            parameters += [parameter for group in optimizer.param_groups for parameter in group.parameters]
        return {id(parameter): parameter for parameter in parameters}.values()  # each once


def bytes_held(parameters, optimizers, graphs):
    """{"weights", "gradients", "state": bytes of these that this rank holds now}.

    Gradients and state of a graph cannot be seen from outside: they are computed from the compiled graph, gradients as
    its optimizers read them.
    """
    in_graphs = [training_bytes(graph, flow.env.get_rank()) for graph in graphs]
    gradients = [parameter.grad for parameter in parameters if parameter.is_leaf and parameter.requires_grad]
    states = [value for optimizer in optimizers for value in optimizer._state.values()]
    states = [tensor for value in states if isinstance(value, dict) for tensor in value.values()]
    return {
        "weights": sum(map(local_bytes, parameters)),
        "gradients": sum(map(local_bytes, gradients)) + sum(of_graph["gradients"] for of_graph in in_graphs),
        "state": sum(map(local_bytes, states)) + sum(of_graph["state"] for of_graph in in_graphs),
    }


def local_bytes(tensor):
    """The bytes of this rank's shard; 0 of what is no tensor, or has no value, as in a graph."""
    if not isinstance(tensor, flow.Tensor) or tensor.is_lazy:
        return 0
    return tensor.element_size() * layout_of(tensor).size(tuple(tensor.shape), flow.env.get_rank())


def memory(path, keywords=None, argv=(), module=None):
    """Run a script as script.run_script does; returns Held.most and the "peak" on this rank. Collective.

    The peak is the rise of the process's resident memory during the run. OneFlow gives no memory back to the system, so
    only the first run in a process counts.
    """
    held = Held()
    flow.comm.barrier()
    before = memory_size("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as references:
        references.write("5")  # resets VmHWM to VmRSS
    with watching(held.see, WATCHED):
        run_script(path, keywords, argv, module)
    flow._oneflow_internal.eager.Sync()
    peak = memory_size("VmHWM") - before
    flow.comm.barrier()
    return {**held.most, "peak": peak}


def memory_size(field):
    """Bytes of a field of /proc/self/status: "VmRSS", the resident memory, or "VmHWM", its peak."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
