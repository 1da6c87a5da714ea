"""The recipes as data: for each the layout that it must show. A chapter has the rows of its recipes."""

from pathlib import Path

from harness.start.recipe import entry, path_of, world_sizes
from tests.chapters import byhand, data, forward, memory, starting, state, training, transformer

ROOT = Path(__file__).resolve().parent.parent
PROVEN = (1, 2, 3, 4)  # world sizes at which every recipe that accepts them is proven
CHAPTERS = (
    forward,
    training,
    memory,
    byhand,
    data,
    state,
    starting,
    transformer,
)  # each with CASES, SIZES where they are its own, and GRAPH_ONLY
CASES = {name: case for chapter in CHAPTERS for name, case in chapter.CASES.items()}
SIZES = {name: sizes for chapter in CHAPTERS for name, sizes in chapter.SIZES.items()}
GRAPH_ONLY = {name for chapter in CHAPTERS for name in chapter.GRAPH_ONLY}
TRAINED = [name for name in CASES if "steps" in entry(path_of(name))]
UNEVEN = {"batch": 7, "in_features": 6, "out_features": 9, "seed": 1}
PAIRS = {  # placements that are not the two halves, by world size
    2: {"growing": ((0,), (0, 1)), "shrinking": ((0, 1), (0,))},
    3: {"overlapping": ((0, 1), (1, 2)), "two to one": ((0, 1), (2,))},
    4: {"growing": ((0, 1), (0, 1, 2, 3)), "shrinking": ((0, 1, 2, 3), (0, 1)), "overlapping": ((0, 1, 2), (1, 2, 3))},
}


def sizes_of(name, n):
    """The arguments with which a recipe is proven on n ranks, by name."""
    sizes = SIZES.get(name, {"even": {}, "uneven": UNEVEN})
    if name == "matmul_signatures" and n == 2:
        sizes = {**sizes, "large x": {"batch": 36}, "large w": {"out_features": 36}}
    if name == "gradient_accumulation" and n == 3:
        sizes = {**sizes, "even": {"batch": 12}}
    if name == "cross_placement":
        pairs = {pair: {"source": source, "target": target} for pair, (source, target) in PAIRS[n].items()}
        sizes = {**sizes, **pairs}
    everywhere = {
        *forward.CASES,
        "loss_placement",
        "context_parallel",
    }  # the others: all sizes on the first world size, odd ones elsewhere
    if name not in everywhere and n != world_sizes(path_of(name))[0]:
        odd = [which for which in sizes if which != "even"]
        sizes = {which: sizes[which] for which in odd[:1] or ["even"]}
    return sizes


def modes(name):
    """Whether a recipe runs in a graph: (False, True) if it has an option for it, else the one mode that it has."""
    if "graph" in entry(path_of(name)):
        return (False, True)
    return (name in GRAPH_ONLY,)


def runs():
    """Every (recipe, world size, graph or not, name of the sizes) that must hold."""
    for name in CASES:
        for n in PROVEN:
            if n in world_sizes(path_of(name)):
                for graph in modes(name):
                    for sizes in sizes_of(name, n):
                        yield name, n, graph, sizes


def run_id(run):
    name, n, graph, sizes = run
    return f"{name}-{n}-{'graph' if graph else 'eager'}-{sizes}"
