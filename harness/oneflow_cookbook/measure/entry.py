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

    Its first arguments come from the recipe's `placements(device, n, ...)`. Each named argument goes to the function
    that has a parameter of that name, or to both; one that neither has goes to the entry, which refuses it. A recipe
    without `placements` gets a placement: of the ranks in the argument of that name, or of all. If the recipe has a
    Config, the arguments that are its fields make `config`.
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
    of_placements = inspect.signature(module.placements).parameters
    of_function = [name for name in inspect.signature(function).parameters if name not in positional]
    for_placements = {name: value for name, value in arguments.items() if name in of_placements}
    for_function = {
        name: value for name, value in arguments.items() if name in of_function or name not in of_placements
    }
    placements = module.placements("cpu", flow.env.get_world_size(), **for_placements)
    if len(positional) == 1:
        placements = [placements]
    return function(*placements, **for_function)
