"""Call a recipe's entry: its function `train`, or `run` for a single layer."""

import dataclasses
import inspect

import oneflow as flow

NAMES = ("train", "run")


def entry_of(module):
    """The function `train` or `run` of a recipe's module. Raises AttributeError if it has neither."""
    for name in NAMES:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{module.__name__} has no function {' or '.join(NAMES)}")


def required(function):
    """The names of a function's parameters without a default: the placement, the mesh, or the stages."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def call_entry(module, arguments):
    """Call a recipe's entry with {name: value}; returns its result. Collective.

    Its first argument comes from the recipe's `placements(device, n, ...)`, which gets the arguments that it has
    parameters for, such as the size of a mesh axis; an option that both have goes to both. Without that function it is
    a placement of the ranks that the arguments list, or of all ranks. If the recipe has a Config, the arguments that
    are its fields make `config`.
    """
    function = entry_of(module)
    arguments = dict(arguments)
    if hasattr(module, "Config"):
        fields = [field.name for field in dataclasses.fields(module.Config) if field.name in arguments]
        arguments["config"] = module.Config(**{name: arguments.pop(name) for name in fields})
    positional = required(function)
    if not positional:
        return function(**arguments)
    if not hasattr(module, "placements"):
        ranks = arguments.pop(positional[0], None)
        placement = flow.placement("cpu", ranks) if ranks else flow.placement.all("cpu")
        return function(placement, **arguments)
    parameters = inspect.signature(module.placements).parameters
    options = [name for name in inspect.signature(function).parameters if name not in positional]
    axes = {name: arguments[name] for name in arguments if name in parameters}
    arguments = {name: value for name, value in arguments.items() if name in options or name not in axes}
    placements = module.placements("cpu", flow.env.get_world_size(), **axes)
    if len(positional) == 1:
        placements = [placements]
    return function(*placements, **arguments)
