"""What each recipe must do, as data: a file for each chapter. Benchmarks import it too.

`reference.py` has the values in plain numpy, `ladder.py` what is asserted of a run.
"""

from functools import lru_cache

from oneflow_cookbook.start.recipe import RECIPES, ROOT, entry_options, path_of, world_sizes  # noqa: F401
from tests.cases import (  # noqa: F401
    byhand,
    data,
    forward,
    llama_training,
    memory,
    pipelines,
    starting,
    state,
    train,
    transformer,
    your_model,
)
from tests.cases.recipe_case import CASES, GRAPH_ONLY, PROOFS, SIZES

PROVEN = (1, 2, 3, 4)  # world sizes at which every recipe that accepts them is proven
TRANSFORMERS = [name for name in CASES if path_of(name).parent == RECIPES / "transformer"]
YOUR_MODEL = [name for name in CASES if path_of(name).parent == RECIPES / "your_model"]
LONG = (*TRANSFORMERS, *YOUR_MODEL)  # they take long: on few ranks in the default suite, and no main
WITHOUT_CASE = ("gpt", "training_run")  # whole models on any mesh: test_gpt.py, test_training_run.py
TRAINED = [name for name in CASES if "steps" in entry_options(path_of(name))]


@lru_cache(maxsize=None)
def proven_on(name):
    """The world sizes at which a recipe is proven, in the order of its WORLD_SIZES: first its own choice."""
    return [n for n in world_sizes(path_of(name)) if n in PROVEN]


@lru_cache(maxsize=None)
def modes(name):
    """The values of `graph` with which a recipe runs: (False, True) if it has the option, else the only mode it has."""
    if "graph" in entry_options(path_of(name)):
        return (False, True)
    return (name in GRAPH_ONLY,)


def sizes_of(name, n):
    """name -> arguments: those with which a recipe is proven on n ranks.

    All on its first world size. On the others the uneven ones (or the even ones, where there are no others), and those
    that there are only on that many ranks.
    """
    sizes, first = SIZES[name](n), proven_on(name)[0]
    if n == first:
        return sizes
    uneven, of_first = uneven_of(name, n), SIZES[name](first)
    return {key: arguments for key, arguments in sizes.items() if key == uneven or key not in of_first}


def uneven_of(name, n):
    """The name of the uneven sizes on n ranks, or of the even ones where there are no others."""
    return list(SIZES[name](n))[:2][-1]


def runs():
    """Every (recipe, world size, graph or not, name of the sizes) that must hold."""
    for name in CASES:
        for n in proven_on(name):
            for graph in modes(name):
                for sizes, arguments in sizes_of(name, n).items():
                    if not (graph and PROOFS[name].eager_only in arguments):
                        yield name, n, graph, sizes


def is_default(run):
    """Whether a run is in the default suite: the uneven sizes, in eager mode on most ranks, in a graph on the first.

    main runs the even ones. A recipe in LONG runs on the first world size in eager mode, too.
    """
    name, n, graph, sizes = run
    chosen = proven_on(name)[0] if graph or name in LONG else max(proven_on(name))
    return (n, sizes) == (chosen, uneven_of(name, n))


def run_id(run):
    name, n, graph, sizes = run
    return f"{name}-{n}-{'graph' if graph else 'eager'}-{sizes}"
