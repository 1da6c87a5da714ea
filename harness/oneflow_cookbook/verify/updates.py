"""Record how a script trains on this rank: parameters, gradients, the norms that clip them, updates."""

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.graph import modules_in
from oneflow_cookbook.measure.names import tensors_inside
from oneflow_cookbook.measure.tensors import tensors_in
from oneflow_cookbook.verify.value_recorder import ValueRecorder, digest, frames_now, place_now
from oneflow_cookbook.verify.values import line_of

BY_HAND = "by hand"
MIXED = "docs/errors-tensors.md#all-parameters-must-be-global-tensor-from-clip_grad_norm_"


class EnoughSteps(BaseException):
    """Ends a script after the last step that is looked at; not an Exception, so that scripts do not catch it."""


class CannotFollow(BaseException):
    """Its text says why a script cannot be verified."""


class UpdateRecorder(ValueRecorder):
    """Records the values of training.

    A gradient is recorded as backward leaves it, and again when an optimizer uses it, as it may be clipped in between.
    An update by an optimizer is seen by its `step`. One that the script makes by hand, as by `p.sub_(lr * p.grad)`, is
    noticed when forward begins again: the parameters have changed since backward.
    """

    def __init__(self, writer, steps, replay=None):
        """steps: how many to look at. replay: the Run whose parameters to begin with."""
        super().__init__(writer)
        self.steps, self.replay = steps, replay
        self.models = []  # the outermost modules that were called
        self.paths = {}  # module -> its path in the outermost module
        self.parameters = {}  # id of a parameter -> it
        self.names = {}  # id of a parameter -> its path in the model, or the variable that holds it
        self.trainable = {}  # id of a parameter that needs gradients -> (it, the digest of its first value)
        self.updated = set()  # ids of the parameters of optimizers and graphs that have made a step
        self.has_gradients = False  # whether a parameter of an optimizer has ever had a gradient
        self.fresh = {}  # id of a parameter -> Key of its gradient, since its last update
        self.before_update = {}  # id of a parameter that no optimizer updates -> its digest after backward
        self.place_of_backward = ()

    def see(self, call):
        if self.before_update and not self.paused and begins_forward(call):
            self.find_update_by_hand()
        return super().see(call)

    def add_model(self, module):
        """Name the parameters of an outermost module by their paths."""
        if module not in self.models:
            self.models.append(module)
        for path, part in module.named_modules():
            self.paths.setdefault(part, path or type(module).__name__)
        parameters = list(module.named_parameters())
        is_mixed = any(parameter.is_global for _, parameter in parameters)
        for path, parameter in parameters:
            if id(parameter) not in self.names:
                taken = sum(name.split(" ")[0] == path for name in self.names.values())
                path = f"{path} ({taken + 1})" if taken else path
                if is_mixed and not parameter.is_global:
                    self.local.add(path)
                self.add_parameter(path, parameter)
                self.begin(path, parameter)
                if parameter.requires_grad:
                    with self.pause():
                        self.trainable[id(parameter)] = parameter, digest(parameter)

    def add_parameter(self, name, parameter):
        self.names[id(parameter)], self.parameters[id(parameter)] = name, parameter

    def add_variables(self):
        """Name tensors that have a gradient and belong to no module after the variables that hold them."""
        for frame in frames_now():
            module = frame.f_globals.get("__name__")
            for variable, value in list(frame.f_locals.items()):
                named = [(variable, value)] if isinstance(value, flow.Tensor) else []
                if isinstance(value, flow.nn.Module):  # one that the script never calls
                    named = list(value.named_parameters())
                for name, tensor in named or tensors_inside(variable, value, module):
                    if id(tensor) not in self.names and self.is_trained(tensor):
                        self.add_parameter(name, tensor)

    def is_trained(self, tensor):
        """Whether it is a tensor that backward has given a gradient."""
        is_leaf = not tensor.is_lazy and tensor.requires_grad and tensor.is_leaf
        return is_leaf and self.records(tensor) and tensor.grad is not None

    def begin(self, path, parameter):
        """Record the initial value of a parameter."""
        self.observe("initial", path, parameter)

    def see_backward(self, call):
        self.stop_if_enough()
        self.observe("loss", "loss", call.arguments[0])
        return self.backward(call)

    def see_autograd(self, call):
        """flow.autograd.grad or backward, called by the script."""
        if "backward" in call.around:
            return call.proceed()
        self.stop_if_enough()
        result = self.backward(call)
        if call.name == "grad":
            inputs = call.keywords["inputs"] if "inputs" in call.keywords else call.arguments[1]
            for tensor, gradient in zip(tensors_in(inputs), result):
                if id(tensor) in self.names:
                    self.observe("gradient from grad", self.names[id(tensor)], gradient)
        return result

    def backward(self, call):
        """Make a call that computes gradients, and record them."""
        if "graph" in call.around:
            return call.proceed()
        self.backward_facts = {}
        result = call.proceed()
        self.add_variables()
        for number, parameter in reversed(list(self.parameters.items())):  # backward comes to the last ones first
            if parameter.grad is not None:
                self.observe_gradient(number, parameter.grad)
        self.place_of_backward = place_now()
        with self.pause():
            self.before_update = {
                number: digest(parameter)
                for number, parameter in self.parameters.items()
                if parameter.requires_grad and number not in self.updated and self.records(parameter)
            }
        return result

    def observe_gradient(self, number, gradient):
        """Record the gradient of a parameter; it replaces that of an earlier backward of the same step."""
        if number in self.fresh:
            self.write(self.fresh[number], gradient)
        else:
            key = self.observe("gradient", self.names[number], gradient)
            if key:
                self.fresh[number] = key

    def see_clip(self, call):
        """clip_grad_norm_(parameters, ...)"""
        named = {**dict(zip(("parameters", "max_norm", "norm_type"), call.arguments)), **call.keywords}
        parameters = named.pop("parameters")
        parameters = [parameters] if isinstance(parameters, flow.Tensor) else list(parameters)
        local = [p for p in parameters if p.grad is not None and not p.is_global]
        if local and any(p.is_global for p in parameters if p.grad is not None):
            names = ", ".join(self.names.get(id(p), "a tensor") for p in local)
            words = "OneFlow cannot clip local and global parameters together; make these global with to_global"
            raise CannotFollow(f"{line_of(place_now())}: {words}: {names} ({MIXED})")
        with self.pause():
            norm = call.function(parameters, **named)
        self.observe("norm", call.name, norm)
        return norm

    def see_zero_grad(self, call):
        self.stop_if_enough()
        return call.proceed()

    def see_update(self, call):
        optimizer = call.arguments[0]
        if self.updates[id(optimizer)] >= self.steps:
            raise EnoughSteps
        parameters = [parameter for group in optimizer.param_groups for parameter in group.parameters]
        names = {id(p): self.names.get(id(p), f"parameter {i} of the optimizer") for i, p in enumerate(parameters)}
        self.updated.update(names)
        if any(parameter.grad is not None for parameter in parameters):
            self.has_gradients = True
        for parameter in reversed(parameters):
            kind = "gradient at the update" if id(parameter) in self.fresh else "gradient"
            self.observe(kind, names[id(parameter)], parameter.grad)
        result = call.proceed()
        self.observe_update(parameters, names)
        self.updates[id(optimizer)] += 1
        self.referenced.append(optimizer)
        return result

    def observe_update(self, parameters, names, **when):
        """Record parameters after their update, and the buffers of the models, as the statistics of BatchNorm.

        when: place and step, if not now.
        """
        for parameter in parameters:
            self.observe("parameter", names[id(parameter)], parameter, **when)
            self.fresh.pop(id(parameter), None)
            self.before_update.pop(id(parameter), None)
        for model in self.models:
            for path, buffer in model.named_buffers():
                self.observe("buffer", path, buffer, **when)

    def find_update_by_hand(self):
        """Record the parameters that no optimizer updates, if any has changed since backward. Collective then."""
        before, self.before_update = self.before_update, {}
        with self.pause():
            changed = any(digest(self.parameters[number]) != old for number, old in before.items())
            if not self.on_any_rank(changed):
                return
        self.updates[BY_HAND] += 1
        when = {"place": self.place_of_backward, "step": self.updates[BY_HAND]}
        self.observe_update([self.parameters[number] for number in before], self.names, **when)

    def finish(self):
        """Record what the script has updated last."""
        if self.before_update:
            self.find_update_by_hand()

    def on_any_rank(self, flag):
        """Whether a flag is set on any rank, as ranks whose shards are unchanged must count the step too."""
        if self.replay is not None:  # there is one rank
            return flag
        flags = flow.tensor([float(flag)]).to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.partial_sum)
        return flags.numpy().item() > 0

    def see_graph(self, call):
        graph = call.arguments[0]
        self.stop_if_enough()
        for module in modules_in(graph).values():
            self.add_model(module)
        result = super().see_graph(call)
        micro_batches = graph.config.proto.num_gradient_accumulation_steps
        for tensor in tensors_in(result):
            self.observe_graph_output(graph, tensor, micro_batches=micro_batches)
        if graph._opts:
            self.observe_training(graph, micro_batches=micro_batches)
            self.updates[id(graph)] += 1
        return result

    def observe_graph_output(self, graph, tensor, **facts):
        self.observe("graph output", type(graph).__name__, tensor, **facts)

    def observe_training(self, graph, **facts):
        """Record the gradients and norms, as far as OneFlow gives them, and the parameters after a step of a graph."""
        trained = [p for module in modules_in(graph).values() for p in module.parameters()]
        self.updated.update(map(id, trained))
        for parameter in reversed(trained):
            self.observe("gradient", self.names[id(parameter)], self.gradients.get(id(parameter)))
        for options in graph._opts:
            for group in options["optim"].param_groups:
                self.observe_norm(group)
        for parameter in trained:
            self.observe("parameter", self.names[id(parameter)], parameter, **facts)
        self.observe_update([], {})

    def observe_norm(self, group):
        """Record the norm by which a graph clips the gradients of a parameter group."""
        gradients = [self.gradients[id(p)] for p in group.parameters if id(p) in self.gradients]
        if not gradients or not group._enable_clip_grad:
            return
        with self.pause():
            whole = np.concatenate([gradient.numpy().ravel() for gradient in gradients])
            norm = np.linalg.norm(whole, group["clip_grad_norm_type"])
            placement = gradients[0].placement
            sbp = [flow.sbp.broadcast] * placement.ranks.ndim
            norm = flow.tensor(np.float32(norm), placement=placement, sbp=sbp)
        self.observe("norm", "the optimizer of a graph", norm)

    def never_updated(self):
        """The number of trainable parameters, if optimizers make steps, and update none of these, nor anything else."""
        if not self.updated or self.has_gradients or self.updated & set(self.trainable):
            return 0
        with self.pause():
            unchanged = [digest(parameter) == before for parameter, before in self.trainable.values()]
        return len(unchanged) if all(unchanged) else 0

    def stop_if_enough(self):
        """Raises EnoughSteps if an optimizer or graph has made the last step that is looked at."""
        if max(self.updates.values(), default=0) >= self.steps:
            raise EnoughSteps


def begins_forward(call):
    """Whether a call is not part of an update by hand, as the matmuls of Muon are, but of what follows it."""
    if call.kind in ("matmul", "to_global"):
        inputs = tensors_in(call.arguments)
        return flow.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return call.kind in ("module", "graph", "backward", "autograd", "zero_grad") and "update" not in call.around
