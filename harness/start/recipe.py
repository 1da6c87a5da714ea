"""What can be known of a recipe from its file: the world sizes it accepts, and its entry `run`."""

import ast
import importlib.util
import os
import sys
from pathlib import Path

HARNESS = Path(__file__).resolve().parent.parent
RECIPES = HARNESS.parent / "recipes"


def all_paths():
    """The files of all recipes, in the order of their names."""
    return sorted(RECIPES.rglob("*.py"), key=lambda path: path.stem)


def path_of(name):
    """The file of a recipe, by its name without .py. Raises KeyError if there is none."""
    return {path.stem: path for path in all_paths()}[name]


def world_sizes(path):
    """The WORLD_SIZES of a script, a range or a tuple of int, read without running it; None if it has none.

    Raises SyntaxError if the file is not Python, ValueError if WORLD_SIZES is neither range(...) nor a sequence of int
    and *range(...).
    """
    tree = ast.parse(Path(path).read_bytes(), filename=str(path))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["WORLD_SIZES"]:
            value = node.value
            try:
                if isinstance(value, ast.Call):
                    sizes = _range(value)
                else:
                    sizes = tuple(size for one in value.elts for size in _sizes(one))
                ends = (sizes[0], sizes[-1]) if isinstance(sizes, range) else (sizes[0], *sizes)
                if all(isinstance(size, int) and size > 0 for size in ends):
                    return sizes
            except (AttributeError, IndexError, TypeError, ValueError):
                pass
            raise ValueError("WORLD_SIZES must be range(first, last + 1) or a tuple of numbers of ranks")
    return None


def _range(call):
    if getattr(call.func, "id", "") != "range" or call.keywords:
        raise ValueError
    return range(*(ast.literal_eval(argument) for argument in call.args))


def _sizes(node):
    """Those that an element of a tuple stands for: 2, or *range(3, 65)."""
    return _range(node.value) if isinstance(node, ast.Starred) else [ast.literal_eval(node)]


def entry(path):
    """The parameters of a script's function `run`, name -> default, read without running it.

    Raises ValueError, saying what to add, if there is no such function or one of its parameters has no plain default.
    """
    for node in ast.parse(Path(path).read_bytes(), filename=str(path)).body:
        if isinstance(node, ast.FunctionDef) and node.name == "run":
            names = [argument.arg for argument in node.args.args + node.args.kwonlyargs]
            missing = len(node.args.args) - len(node.args.defaults)
            defaults = [None] * missing + list(node.args.defaults) + node.args.kw_defaults
            for name, default in zip(names, defaults):
                if default is None:
                    raise ValueError(f"its function run must have a default for each parameter: give {name} one")
            try:
                return {name: ast.literal_eval(default) for name, default in zip(names, defaults)}
            except ValueError:
                raise ValueError("the defaults of its function run must be numbers, texts, True or False") from None
    raise ValueError('it has no entry: add a function such as `def run(graph=False): ...; return {"x": x, "out": out}`')


class Loaded:
    """An import hook: processes that a recipe starts find it by the name under which `load` has it in this one."""

    def find_spec(self, name, path=None, target=None):
        known = os.environ.get(f"HARNESS_{name}")
        return known and importlib.util.spec_from_file_location(name, known)


sys.meta_path.append(Loaded())


def load(path):
    """Import a recipe from its file, afresh, under a name of its own, and return the module."""
    name = f"recipe_{Path(path).stem}"
    os.environ[f"HARNESS_{name}"] = str(Path(path).resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find(script):
    """The file of a script, by its path or, if it is a recipe, by its bare name. None if there is none."""
    if Path(script).is_file():
        return Path(script)
    named = [path for path in all_paths() if script in (path.stem, path.name)]
    return Path(os.path.relpath(named[0])) if named else None
