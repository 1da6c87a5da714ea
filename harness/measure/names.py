"""By which name a script knows each of its tensors: a parameter's path in its module, or a variable."""

import contextlib
import sys

import oneflow as flow

from harness.measure.observe import where


def described(tensor):
    """A tensor without its content."""
    sbp, device, ranks = where(tensor)
    item = tensor.element_size()
    return {"sbp": sbp, "device": device, "ranks": ranks, "shape": tuple(tensor.shape), "item": item, "id": id(tensor)}


def layout(tensor):
    """What tensors that look alike have in common, as a key."""
    return str((where(tensor), tuple(tensor.shape)))


def inside(name, value, module):
    """The tensors that a variable has in a list, a dict or an object of a class of this module, by name."""
    pairs = []
    if isinstance(value, (list, tuple, dict)) and len(value) < 1000:  # what is longer is data
        items = value.items() if isinstance(value, dict) else enumerate(value)
        pairs = [(f"{name}[{key!r}]", one) for key, one in items]
    elif type(value).__module__ == module and hasattr(value, "__dict__"):
        pairs = [(f"{name}.{key}", one) for key, one in vars(value).items()]
    return [(name, one) for name, one in pairs if isinstance(one, flow.Tensor)]


class Names:
    """Collects the names of tensors while the script at `path` runs."""

    def __init__(self, path):
        self.path = path
        self.held = {}  # id -> tensor, in the order in which they are seen; no other gets the id of one that is held
        self.described = {}  # the same tensors as they were then (zero_grad, for one, makes a B a P), after which step
        self.steps = 0  # how many have been made
        self.shown = set()  # parameters and what a variable holds, and not something in the variable
        self.leaves = []  # those that get gradients; to ask others may end the process
        self.variables = {}  # id -> (the number of the script's frames around the variable, its name)
        self.parameters = {}  # id, of buffers too -> (path in the module, id of the module)
        self.modules = {}  # id -> (module, the variable that holds it)
        self.origins = {}  # id -> (id of the tensor that it comes from, what that adds to its name)
        self.found = set()  # names with layouts, of tensors that variables hold

    def hold(self, tensors):
        for tensor in tensors:
            if id(tensor) not in self.held:
                self.held[id(tensor)] = tensor
                self.described[id(tensor)] = {**described(tensor), "after": self.steps}
                self.leaves += [tensor] if tensor.requires_grad and tensor.is_leaf else []

    def moved(self, old, new):
        """A tensor that is moved keeps its name, if it gets none of its own."""
        if new is not old:
            self.origins.setdefault(id(new), (id(old), ""))

    def gradients(self):
        """The gradients of all parameters that are held."""
        leaves = [leaf for leaf in self.leaves if leaf.grad is not None]
        self.origins.update({id(leaf.grad): (id(leaf), ".grad") for leaf in leaves})
        return [leaf.grad for leaf in leaves]

    def know(self, module, variable=""):
        """Name the parameters and buffers of a module by their path in the outermost one; returns the parameters."""
        self.modules[id(module)] = (module, self.modules.get(id(module), (module, ""))[1] or variable)
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self.hold([tensor])
            self.shown.add(id(tensor))
            before, _ = self.parameters.get(id(tensor), (None, 0))
            if before is None or path.count(".") > before.count("."):
                self.parameters[id(tensor)] = (path, id(module))
        return list(module.parameters())

    @contextlib.contextmanager
    def watched(self):
        """While it lasts, look at the variables of the script and of its functions when they return."""

        def on_call(frame, event, argument):
            if frame.f_code.co_filename != self.path:
                return None
            frame.f_trace_lines = False
            return on_return

        def on_return(frame, event, argument):
            if event == "return":
                self.look(frame)
            return on_return

        before = sys.gettrace()
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def look(self, frame, deep=False):
        """Name the tensors that variables of a frame hold, if it is the script's; deep: also of those around it."""
        own = []
        while frame:
            own += [frame] if frame.f_code.co_filename == self.path else []
            frame = frame.f_back
        for depth, one in list(zip(range(len(own), 0, -1), own))[: None if deep else 1]:
            for name, value in list(one.f_locals.items()):
                if isinstance(value, flow.nn.Module) and name != "self":
                    self.know(value, name)
                elif name.startswith("_"):
                    continue
                elif isinstance(value, flow.Tensor):
                    self.see(value, name, depth)
                    self.shown.add(id(value))
                else:
                    for inner, tensor in inside(name, value, one.f_globals.get("__name__")):
                        self.see(tensor, inner, depth)

    def see(self, tensor, name, depth):
        """A variable holds a tensor. Of several names the outermost function's is the one; of those the first."""
        if tensor.is_lazy:
            return
        look = (name, layout(tensor))
        if id(tensor) not in self.held and look in self.found:  # of another pass of a loop
            return
        self.found.add(look)
        self.hold([tensor])
        if depth < self.variables.get(id(tensor), (sys.maxsize,))[0]:
            self.variables[id(tensor)] = (depth, name)

    def all(self):
        """The name of each tensor that has one, by its id."""
        owners = {}
        for path, module in self.parameters.values():
            owners.setdefault(path, set()).add(module)
        names = {number: name for number, (_, name) in self.variables.items()}
        for number, (path, module) in self.parameters.items():
            variable = self.modules[module][1]
            names[number] = f"{variable}.{path}" if variable and len(owners[path]) > 1 else path
        for number in self.held:
            if number not in names:
                added, origin = "", number
                while origin in self.origins and origin not in names:
                    origin, more = self.origins[origin]
                    added = more + added
                if origin in names:
                    names[number] = names[origin] + added
        return names
