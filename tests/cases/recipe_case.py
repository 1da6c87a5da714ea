"""What a case is, and what the cases share."""

from dataclasses import dataclass, field
from typing import Callable

import numpy as np

from tests.cases.layouts import laid_out

UNEVEN = {"batch": 7, "in_features": 6, "out_features": 9, "seed": 1}
CASES, SIZES, GRAPH_ONLY = {}, {}, set()  # by the name of the recipe; filled by `case_of_recipe`
PROOFS = {}  # name of the recipe -> Proof


NOT_SQUARE = ([[0, 1, 2, 3]], [[0], [1], [2], [3]])  # meshes on which a size that is divided by the wrong axis shows


@dataclass
class Main:
    """What is special about the main of a recipe: see mains.py."""

    # its command line, and the number of ranks, where it is not the first of WORLD_SIZES
    arguments: list = field(default_factory=list)
    ranks: int = None
    # how often it calls np.testing.assert_allclose and the like
    comparisons: int = 1
    # what it prints besides shapes, sums and losses; "[0] line": rank 0 alone; or a list for each value of `graph`
    prints: list = field(default_factory=list)
    # whether a rank prints shapes of tensors of which it holds nothing
    prints_empty: bool = False
    # further command lines, which change each option, tried in the recipe's first mode; FOLDER is an empty folder;
    # None: one that changes all at once
    other_lines: list = None
    # option -> other values with which train or run may be called, as on a single device
    alone: dict = field(default_factory=dict)
    # number of a call -> arguments that it must have
    further: dict = field(default_factory=dict)
    # option -> its default in main and in train, where they differ
    defaults: dict = field(default_factory=dict)
    # placements of main that are on the CPU whatever --device is
    on_cpu: int = 0
    # options that reach no argument of their name
    elsewhere: tuple = ()
    # command lines that it refuses, besides Proof.refused; FOLDER has the files of `make_files`
    refused: list = field(default_factory=list)
    make_files: Callable = lambda folder: None
    # expressions of the recipe's names that it refuses
    refused_expressions: list = field(default_factory=list)
    # texts of refusals that other tests reach
    refused_elsewhere: tuple = ()


@dataclass
class Proof:
    """How a recipe is tested, besides its case."""

    # arguments with which the bytes of a step are measured, in place of those of measuring.py
    measured_at: dict = field(default_factory=dict)
    # other arguments with which a step sends something else; measured on 4 ranks
    variants: list = field(default_factory=list)
    # an argument that works in eager mode alone; its main refuses it with --graph
    eager_only: str = None
    # "--option number" with which the recipe would fail midway, abort or hang -> what its main says of it
    refused: dict = field(default_factory=dict)
    # whether its chapter's output needs a job of its own: it depends on how processes start, or on what ran in them
    whole_job: bool = False
    # whether in its graph one move serves several, so that it sends less than all of them
    shares_moves: bool = False
    main: Main = field(default_factory=Main)
    # files with tests of fixes that do not show in values; `mutate` runs those with the recipe's name, or with -k
    tests: list = field(default_factory=list)
    # pattern of a change that `mutate` makes -> why nothing changes
    equivalent: dict = field(default_factory=dict)


@dataclass
class Case:
    """What one recipe must do on one world size, in one mode, with given arguments."""

    # name -> Value
    values: dict
    # floating-point operations of the matmuls of each rank in a forward pass over the whole batch; None: no claim
    work: list = None
    # name -> SBP, or (SBP, ranks), of what the table in the docstring does not draw and no rule of layouts.py gives
    layout: dict = field(default_factory=dict)
    # where all tensors are, if not on all ranks, and if the table draws no rank with nothing
    ranks: list = None
    # how often such a pass is recorded; None: in each step in eager mode, and once, for a micro-batch, in a graph
    passes: int = None
    micro_batches: int = 1
    # where their order is the lesson: (x, w, out) of each matmul, each a name or (SBP, ranks, shape), and (SBP, ranks)
    # before and after each to_global, and its grad_sbp
    matmuls: list = None
    moves: list = None
    # name -> what each rank has of a P (without it the sum is checked), a local tensor, or a B that differs by rank
    parts: dict = field(default_factory=dict)
    # (number, ranks) that the graph sets; None: no claim
    stages: list = None
    # type of op -> how many of them the graph computes again in backward, as activation checkpointing does
    recomputed: dict = None
    # elements that each rank sends in one step of training, by the formula; of a single layer only whether it is 0
    sends: list = None
    # {name: array} of the weights that OneFlow has drawn -> (values, parts); for recipes where it draws them
    values_of: Callable = None
    # the tensors and arrays of each rank -> what else must be true of them: {sentence: whether it is true}
    claims: Callable = lambda seen: {}

    def passes_in(self, graph):
        """How many passes over the whole batch are recorded."""
        if self.passes is not None:
            return self.passes
        return 1 / self.micro_batches if graph else self.values["losses"].exact.size if "losses" in self.values else 1

    def draw(self, snapshots):
        """Compute the values from the weights in {name: snapshot of a tensor}, if OneFlow has drawn them."""
        names = [name for name in self.layout if f"new {name}" in self.layout]
        if self.values_of and set(names) <= set(snapshots):  # else the ladder says which one is missing
            self.values, self.parts = self.values_of({name: snapshots[name]["value"] for name in names})


def case_of_recipe(sizes=None, graph_only=False, **proof):
    """Register a function (n, graph, **arguments of the recipe's run) -> Case as the case of the recipe of its name.

    sizes: name -> the arguments with which the recipe runs, besides its defaults ("even"), or a function of n to them;
    the first one is used on every world size, the others on the first. graph_only: whether the recipe has no eager
    mode. proof: see Proof.
    """

    def register(function):
        name, other = function.__name__, {"uneven": UNEVEN} if sizes is None else sizes

        def laid_out_case(n, graph=graph_only, **arguments):
            case = function(n, graph, **arguments)
            case.layout = laid_out(name, case, n, graph)
            return case

        CASES[name], PROOFS[name] = laid_out_case, Proof(**proof)
        SIZES[name] = lambda n: {"even": {}, **(other(n) if callable(other) else other)}
        GRAPH_ONLY.update([name] * graph_only)
        return function

    return register


def shares(n, size, work=1):
    """What each of n ranks computes that split `size` rows, columns or heads, each of which costs `work`."""
    return [work * len(part) for part in np.array_split(np.arange(size), n)]


def reduced(n, elements):
    """What each of n ranks sends in an all-reduce."""
    return 2 * (n - 1) / n * elements


def weights_of(values):
    """Elements of all weights."""
    return sum(value.exact.size for name, value in values.items() if f"new {name}" in values)
