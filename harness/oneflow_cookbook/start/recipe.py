"""What a recipe's file declares, read without running it: WORLD_SIZES, and the options of `train` or `run`."""

import ast
import contextlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HARNESS = Path(__file__).resolve().parent.parent
ROOT = HARNESS.parent.parent
RECIPES = ROOT / "recipes"
MODULES = ("graph_safe",)  # files that recipes of their folder import: no recipes


def all_paths():
    """The files of all recipes, sorted by name."""
    return sorted((path for path in RECIPES.rglob("*.py") if path.stem not in MODULES), key=lambda path: path.stem)


def copied_with(path):
    """A recipe's file, and those of MODULES that it imports: what a reader copies."""
    names = [name for name in MODULES if f"\nfrom {name} import " in Path(path).read_text(encoding="utf-8")]
    return [Path(path), *(Path(path).with_name(f"{name}.py") for name in names)]


def path_of(name):
    """The file of a recipe, by its name without .py. Raises KeyError."""
    return {path.stem: path for path in all_paths()}[name]


def find(script):
    """The file of a script, by its path or, if it is a recipe, by its bare name; None if there is none."""
    if Path(script).is_file():
        return Path(script)
    named = [path for path in all_paths() if script in (path.stem, path.name)]
    return Path(os.path.relpath(named[0])) if named else None


def find_module(name):
    """The module that `python -m name` runs, and its file. Nothing is imported. Raises ValueError.

    sys.path[0] is ours, so the current folder replaces it.
    """
    places, folder = [os.getcwd(), *sys.path[1:]], f"{os.getcwd()}/"
    for part in name.split("."):  # part by part: a dotted name would need its package in sys.modules
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            words = "no such module in this folder, nor installed; type its name with dots, such as package.train"
            raise ValueError(f"-m {name}: {words}")
        places = list(spec.submodule_search_locations or ())
    if spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec("__main__", places)
        if spec is None:
            words = f"the package has no __main__.py; name one of its modules, as in -m {name}.train"
            raise ValueError(f"-m {name}: {words}")
        name += ".__main__"
    if not (spec.origin or "").endswith(".py"):
        raise ValueError(f"-m {name}: it is not written in Python")
    return name, Path(os.path.relpath(spec.origin) if spec.origin.startswith(folder) else spec.origin)


def world_sizes(path):
    """The WORLD_SIZES of a script, a range or a tuple of int; None if it has none.

    Raises SyntaxError if the file is not Python, ValueError if WORLD_SIZES is anything else.
    """
    for node in _parsed(path).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["WORLD_SIZES"]:
            with contextlib.suppress(Exception):
                sizes = eval(compile(ast.Expression(node.value), str(path), "eval"), {"__builtins__": {"range": range}})
                if sizes and isinstance(sizes, (range, tuple)) and all(size > 0 for size in sizes):
                    return sizes
            raise ValueError("WORLD_SIZES must be range(first, last + 1) or a tuple of numbers of ranks")
    return None


def entry_options(path):
    """{name: default} of the options of a script's function `train`, or else `run`.

    Those of `placements` come first, those of its dataclass `Config` last.

    Raises ValueError if there is no such function, if an option has no literal default, or if the function needs an
    argument and the script has no WORLD_SIZES: then it is no recipe, and the argument need not be a placement.
    """
    functions = {node.name: node for node in _parsed(path).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    work = functions.get("train") or functions.get("run")
    if work is None:
        raise ValueError(f"{path} has no function train or run")
    if len(work.args.args) > len(work.args.defaults) and world_sizes(path) is None:
        raise ValueError(f"{path}: {work.name} needs arguments, and the script has no WORLD_SIZES")
    nodes = [functions["placements"], work] if "placements" in functions else [work]
    try:
        options = {name: ast.literal_eval(default) for node in nodes for name, default in _options(node)}
        if "Config" in functions:  # its fields replace the argument `config`
            del options["config"]
            fields = [node for node in functions["Config"].body if isinstance(node, ast.AnnAssign)]
            options.update({field.target.id: ast.literal_eval(field.value) for field in fields})
        return options
    except ValueError:
        raise ValueError(f"{path}: an option of {work.name} has no literal default") from None


def _options(function):
    """(name, default) of each parameter that has one."""
    arguments = function.args
    defaults = arguments.defaults
    positional = zip(arguments.args[len(arguments.args) - len(defaults) :], defaults)
    keyword_only = [pair for pair in zip(arguments.kwonlyargs, arguments.kw_defaults) if pair[1] is not None]
    return [(argument.arg, default) for argument, default in [*positional, *keyword_only]]


def _parsed(path):
    return ast.parse(Path(path).read_bytes(), filename=str(path))


def load(path):
    """Import a recipe from its file, even if it was imported before; returns the module.

    Its folder is put on sys.path, so that processes that the recipe starts find the module, too.
    """
    name, folder = Path(path).stem, str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    for module in MODULES:  # so that it imports the one beside it
        sys.modules.pop(module, None)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
