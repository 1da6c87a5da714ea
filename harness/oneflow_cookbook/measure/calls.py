"""Watch a script's calls of OneFlow, by wrapping its functions while the script runs."""

import contextlib
import functools
from unittest import mock

import oneflow as flow

CREATORS = ("tensor", "ones", "zeros", "empty", "full", "rand", "randn")
RANDOM = ("randint", "randperm", "normal", "bernoulli", "multinomial", "randn_like", "randint_like")
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d")
OPTIMIZERS = [kind for kind in vars(flow.optim).values() if isinstance(kind, type) and "step" in vars(kind)]
CLIPPING = (flow.nn.utils, flow.nn.utils.clip_grad, flow.optim.optimizer)  # modules with the name clip_grad_norm_
# kind of call -> (owner, attribute) of every name by which a script, or a layer of OneFlow, calls the function
PLACES = {
    "matmul": [
        (flow, "matmul"),
        (flow, "mm"),
        (flow._C, "matmul"),
        (flow.Tensor, "matmul"),
        (flow.Tensor, "mm"),
        (flow.Tensor, "__matmul__"),
    ],
    "to_global": [(flow.Tensor, "to_global")],
    "to_local": [(flow.Tensor, "to_local")],
    "backward": [(flow.Tensor, "backward")],
    "autograd": [(flow.autograd, "grad"), (flow.autograd, "backward")],
    "read": [(flow.Tensor, "numpy"), (flow.Tensor, "item"), (flow.Tensor, "__repr__")],
    "create": [(flow, name) for name in CREATORS],
    "random": [*((flow, name) for name in RANDOM), (flow._C, "uniform_")],
    "dropout": [(owner, name) for owner in (flow._C, flow.nn.functional) for name in DROPOUT if hasattr(owner, name)],
    "module": [(flow.nn.Module, "__call__")],
    "module to_global": [(flow.nn.Module, "to_global")],
    "graph": [(flow.nn.Graph, "__call__")],
    "new graph": [(flow.nn.Graph, "__init__")],
    "set_stage": [(flow.nn.graph.GraphModule, "set_stage")],
    "zero_grad": [(flow.optim.Optimizer, "zero_grad")],
    "clip": [(owner, "clip_grad_norm_") for owner in CLIPPING],
    "update": [(kind, "step") for kind in OPTIMIZERS],
    "index": [(flow.Tensor, "__getitem__"), *((owner, "gather_nd") for owner in (flow, flow._C))],
    "cross_entropy": [(flow._C, "sparse_softmax_cross_entropy")],
}


class Call:
    """A call that a script makes. `proceed` runs it; `around` holds the kinds of the calls that it is inside of."""

    def __init__(self, kind, name, function, arguments, keywords, around):
        self.kind, self.name, self.function = kind, name, function
        self.arguments, self.keywords, self.around = arguments, keywords, around

    def proceed(self):
        return self.function(*self.arguments, **self.keywords)


@contextlib.contextmanager
def watching(handler, kinds=tuple(PLACES)):
    """Inside it, handler(Call) replaces each call of these kinds, and its result is the call's result.

    A call inside a call of the same kind, such as a matmul that calls matmul, is not handled, except for modules.
    """
    around = []

    def watched(kind, name, function):
        @functools.wraps(function)  # so that help() and inspect show the original
        def call(*arguments, **keywords):
            if kind in around and kind != "module":
                return function(*arguments, **keywords)
            this = Call(kind, name, function, arguments, keywords, tuple(around))
            around.append(kind)
            try:
                return handler(this)
            finally:
                around.pop()

        return call

    init = flow.optim.Optimizer.__init__

    @functools.wraps(init)
    def init_optimizer(optimizer, *arguments, **keywords):
        """Also watch the step of optimizers that the script defines."""
        init(optimizer, *arguments, **keywords)
        if type(optimizer) not in OPTIMIZERS:
            step = optimizer.step  # does not take the optimizer
            own = watched("update", "step", lambda _, *arguments, **keywords: step(*arguments, **keywords))
            optimizer.step = functools.partial(own, optimizer)

    places = {place: kind for kind in kinds for place in PLACES[kind]}
    functions = {(owner, name): watched(kind, name, getattr(owner, name)) for (owner, name), kind in places.items()}
    if "update" in kinds:
        functions[flow.optim.Optimizer, "__init__"] = init_optimizer
    with replaced(functions):
        yield


@contextlib.contextmanager
def replaced(functions):
    """Inside it, each (owner, attribute) has the value of this dict."""
    with contextlib.ExitStack() as stack:
        for (owner, name), function in functions.items():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield
