"""What can be known of a recipe from its file: the world sizes it accepts, and its entry `run`."""

import ast
import difflib
import importlib.util
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def world_sizes(path):
    """The WORLD_SIZES of a script, a range or a tuple of int, read without running it; None if it has none.

    Raises SyntaxError if the file is not Python, ValueError if WORLD_SIZES is neither range(...) nor a sequence of int.
    """
    tree = ast.parse(Path(path).read_bytes(), filename=str(path))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["WORLD_SIZES"]:
            value = node.value
            try:
                if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "range" and not value.keywords:
                    sizes = range(*(ast.literal_eval(argument) for argument in value.args))
                else:
                    sizes = tuple(ast.literal_eval(value))
                if all(isinstance(size, int) and size > 0 for size in (sizes[0], *sizes[1:])):
                    return sizes
            except (IndexError, TypeError, ValueError):
                pass
            raise ValueError("WORLD_SIZES must be range(first, last + 1) or a tuple of numbers of ranks")
    return None


def load(path):
    """Import a recipe from its file, afresh, under a name of its own, and return the module."""
    name = f"recipe_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def near(path):
    """The existing script whose name is closest to that of a missing one, or None."""
    path = Path(path)
    places = {path.parent, RECIPES}
    scripts = [script for place in places if place.is_dir() for script in sorted(place.glob("*.py"))]
    names = {script.name: script for script in scripts}
    name = path.name if path.suffix == ".py" else path.name + ".py"
    for close in difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        script = names[close]
        try:
            return script.resolve().relative_to(Path.cwd())
        except ValueError:
            return script
    return None
