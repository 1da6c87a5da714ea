"""Name the tensors of a script: a parameter after its path in the module, others after their variable."""

import contextlib
import re
import sys

import oneflow as flow

from oneflow_cookbook.measure.tensors import describe, layout_of

# Nodes of autograd between a parameter and its use that leave its gradient the same.
PASS_ON = {"cast_backward", "global_to_global_backward", "identity_backward", "scalar_mul_backward"}


def layout_and_shape(tensor):
    """The layout and shape of a tensor as text."""
    return str((layout_of(tensor), tuple(tensor.shape)))


def tensors_inside(name, value, module):
    """[(name, tensor)] of a variable's list or dict, or of an object whose class the module named `module` defines."""
    pairs = []
    if isinstance(value, (list, tuple, dict)) and len(value) < 1000:  # longer lists are data
        items = value.items() if isinstance(value, dict) else enumerate(value)
        pairs = [(f"{name}[{key!r}]", item) for key, item in items]
    elif type(value).__module__ == module and hasattr(value, "__dict__"):
        pairs = [(f"{name}.{key}", item) for key, item in vars(value).items()]
    return [(path, item) for path, item in pairs if isinstance(item, flow.Tensor)]


def of_sequential(path, in_a_list=False):
    """The path of a parameter as recipes call it: "w0" for "0.w", the w of part 0 of a Sequential.

    in_a_list: whether "layers.0.w" is w0, too.
    """
    return re.sub(r"^(?:\w+\.)?(\d+)\.(\w+)$" if in_a_list else r"^(\d+)\.(\w+)$", r"\2\1", path)


@contextlib.contextmanager
def returns_of(path, handler):
    """Inside it, handler(frame) is called when the file at `path`, or a function of it, returns."""

    def look(frame, event, _):
        if event == "return" and frame.f_code.co_filename == path:
            handler(frame)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


class Names:
    """Collects the tensors of the script at `path` while it runs, and what can name them. Most keys are tensor ids."""

    def __init__(self, path, events, others=()):
        """events: the list of a Trace. others: paths of more files that belong to the script."""
        self.path, self.events, self.files = path, events, {path, *others}
        self.tensors = {}  # in order of appearance; while they are here, Python does not reuse their ids
        self.described = {}  # tensors as they appeared: zero_grad may change an SBP; "after": number of events before
        self.shown = set()  # parameters, and tensors that are variables
        self.leaves = []  # tensors that get gradients; asking other tensors for theirs may end the process
        self.variables = {}  # id -> (depth of the frame, name of the variable)
        self.parameters = {}  # id of a parameter or buffer -> (path in the module, module)
        self.modules = {}  # module -> the variable that holds it
        self.returned = {}  # id of an output of a part of a module -> the part's path with "()"
        self.origins = {}  # id -> (id of the tensor that it comes from, suffix of the name)
        self.seen = set()  # (name, look) of tensors that variables hold

    def add(self, tensors):
        """Add tensors that are new."""
        for tensor in tensors:
            if id(tensor) not in self.tensors:
                self.tensors[id(tensor)] = tensor
                self.described[id(tensor)] = {**describe(tensor), "after": len(self.events)}
                if tensor.requires_grad and tensor.is_leaf:
                    self.leaves.append(tensor)

    def add_moved(self, old, new):
        """Unless it gets its own name, the result `new` of a to_global is named like `old`."""
        if new is not old:
            self.origins.setdefault(id(new), (id(old), ""))

    def add_returned(self, path, tensors):
        """Unless it gets its own name, the output of a part of a module is named after the part."""
        self.add(tensors)
        for tensor in tensors[:1]:
            self.returned.setdefault(id(tensor), f"{path}()")

    def parameter_of(self, tensor):
        """The id of the parameter that a tensor is, or that it comes from by operators such as identity; else None."""
        if tensor.is_lazy or not tensor.requires_grad:
            return None
        if tensor.is_leaf:
            return id(tensor)
        node = tensor.grad_fn
        while node.name() in PASS_ON and len(node.next_functions) == 1:
            node = node.next_functions[0]
        parameters = [leaf for leaf in self.leaves if leaf.grad_fn is node]
        if not parameters:
            return None
        if id(tensor) in self.tensors:  # else Python may reuse its id
            self.origins.setdefault(id(tensor), (id(parameters[0]), ""))
        return id(parameters[0])

    def gradients(self):
        """The gradients of all tensors that have a gradient."""
        leaves = [leaf for leaf in self.leaves if leaf.grad is not None]
        self.origins.update({id(leaf.grad): (id(leaf), ".grad") for leaf in leaves})
        return [leaf.grad for leaf in leaves]

    def add_module(self, module, variable=""):
        """Name parameters and buffers of a module after their path in the outermost module; returns the parameters."""
        self.modules[module] = self.modules.get(module) or variable
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_lazy:
                continue
            self.add([tensor])
            if self.described[id(tensor)]["sbp"] != describe(tensor)["sbp"]:  # its data was laid out since
                self.described[id(tensor)] = {**describe(tensor), "after": len(self.events)}
            self.shown.add(id(tensor))
            if id(tensor) not in self.parameters or path.count(".") > self.parameters[id(tensor)][0].count("."):
                self.parameters[id(tensor)] = (path, module)
        return list(module.parameters())

    def watching(self):
        """Inside it, name tensors after the variables of the script and of its functions when they return."""
        return returns_of(self.path, self.add_variables_on_return)

    def add_variables_on_return(self, frame):
        self.add_variables_of(frame, depth=len(self.frames_of_script(frame)))

    def add_variables(self):
        """Name the tensors that variables of the script hold now, in all running functions."""
        for depth, frame in enumerate(self.frames_of_script(sys._getframe()), 1):
            self.add_variables_of(frame, depth)

    def frames_of_script(self, frame):
        """The frames of the script among `frame` and its callers; the outermost first, as its tensors are older."""
        frames = []
        while frame:
            if frame.f_code.co_filename in self.files:
                frames.insert(0, frame)
            frame = frame.f_back
        return frames

    def add_variables_of(self, frame, depth):
        """Name the tensors that the variables of a frame hold. depth: number of frames of the script down to it."""
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, flow.nn.Module) and name != "self":
                self.add_module(value, name)
            elif name.startswith("_"):
                continue
            elif isinstance(value, flow.Tensor):
                self.add_variable(value, name, depth)
                self.shown.add(id(value))
            else:
                for path, tensor in tensors_inside(name, value, frame.f_globals.get("__name__")):
                    self.add_variable(tensor, path, depth)

    def add_variable(self, tensor, name, depth):
        """Name a tensor after a variable; of several variables, the first in the outermost function."""
        if tensor.is_lazy:
            return
        key = (name, layout_and_shape(tensor))
        if id(tensor) not in self.tensors and key in self.seen:  # the same variable in a later iteration of a loop
            return
        self.seen.add(key)
        self.add([tensor])
        if depth < self.variables.get(id(tensor), (sys.maxsize,))[0]:
            self.variables[id(tensor)] = (depth, name)

    def all(self):
        """{id: name} of the tensors that have a name.

        A parameter is named after its path, any other tensor after its variable, else after the part of a module that
        returned it, else after the tensor that it comes from.
        """
        variables = {key: variable for key, (_, variable) in self.variables.items()}
        names = {**self.returned, **variables, **self.parameter_names()}
        for key in set(self.tensors) - set(names):
            origin, suffix = key, ""
            while origin in self.origins and origin not in names:
                origin, last_suffix = self.origins[origin]
                suffix = last_suffix + suffix
            if origin in names:
                names[key] = names[origin] + suffix
        return names

    def parameter_names(self):
        """{id: name}: the path in the model, after the model's variable if several models have that path."""
        owners = {}
        for path, module in self.parameters.values():
            owners.setdefault(path, set()).add(module)
        names = {}
        for key, (path, module) in self.parameters.items():
            variable = self.modules[module]
            names[key] = f"{variable}.{path}" if variable and len(owners[path]) > 1 else of_sequential(path)
        return names
