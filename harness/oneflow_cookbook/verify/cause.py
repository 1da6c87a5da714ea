"""The likely cause of a difference, from what it looks like: the first row of CAUSES that fits the numbers."""

from dataclasses import dataclass

import numpy as np

from oneflow_cookbook.measure.sbp import Split, parse
from oneflow_cookbook.verify.compare import Comparison, comparable, diverging
from oneflow_cookbook.verify.values import Run, largest_difference

PAGE = "docs/silently-wrong.md#"
BATCH_NORM = PAGE + "batchnorm-normalizes-each-shard-by-itself"
ROWS = PAGE + "the-gradient-of-weightids-x-j-xi-j-or-xmask-is-wrong"
BEGIN = PAGE + "where-does-the-difference-begin"
APART = "the copies on ranks {0} and {1} differ, although B says that they are equal"
OUTPUTS = ("output", "graph output")


@dataclass
class Evidence:
    """What is known of the first difference. again: a second Run on n ranks, {} if there is none."""

    comparison: Comparison
    parallel: Run
    again: object

    def __post_init__(self):
        self.first = self.comparison.first
        self.key, self.value, self.rounding = self.first.key, self.first.value, self.first.rounding
        self.actual, self.expected, self.layout = self.first.actual, self.first.expected, self.value.layout
        self.is_gradient = self.key.kind.startswith("gradient")
        self.agreeing = {key.kind for key in self.comparison.agreeing}
        self.splits = [isinstance(sbp, Split) for sbp in parse(self.layout.sbp)] if self.layout.sbp != "local" else []

    def fact(self, name, default=None):
        return self.value.facts.get(name, default)

    def blocks(self):
        """[(rank, what it holds of the value, what one rank computes there)]"""
        for rank in self.layout.members:
            part = self.layout.slices(self.value.shape, rank)
            yield rank, self.actual[part], self.expected[part]


def cause_of(comparison, parallel, again):
    """The likely cause of the first difference, in one line, or None.

    parallel, again: the Run on n ranks, and a second one.
    """
    evidence = Evidence(comparison, parallel, again)
    for fits, words in CAUSES:
        details = fits(evidence)
        if details:
            return words.format(*(details if isinstance(details, tuple) else [details]))
    return None


def changes(e):
    """A second run on n ranks has another value."""
    before, now = (comparable(run, e.key) if e.key in run else None for run in (e.parallel, e.again))
    return before is not None and now is not None and largest_difference(before, now) > e.rounding


def diverging_parameter(e):
    return e.value.step > 1 and (diverging(e.parallel) or [None])[0]


def copies_apart(e):
    """The first two ranks whose copies differ."""
    return e.first.apart and e.first.apart[0][:2]


def has_nan_on_n_ranks(e):
    return (
        e.actual.dtype.kind == "f"
        and np.isnan(e.actual).any()
        and not np.isnan(e.expected).any()
        and e.parallel.world_size
    )


def is_less_by_fractions(e):
    """A tensor in P of whole numbers is less than it must be, by less than 1 for each rank."""
    return e.layout.sbp == "P" and e.actual.dtype.kind == "i" and e.first.error < len(e.layout.members)


def is_sum_of_norms(e):
    """The root of the sum of the squares of the addends is right: they are the norms of shards."""
    if e.layout.sbp != "P" or e.actual.dtype.kind != "f":
        return False
    squares = sum(block.astype(np.float64) ** 2 for block in e.parallel.blocks(e.key).values())
    return largest_difference(np.sqrt(squares), e.expected) <= max(e.rounding, 1e-5 * abs(e.expected).max(initial=0))


def times(e, too_large):
    """The number of ranks, in all or along an axis, by which the value is too large or too small."""
    actual, expected = (array.astype(np.float64) for array in (e.actual, e.expected))
    small, large = (expected, actual) if too_large else (actual, expected)
    for size in sorted({e.parallel.world_size, *e.layout.grid.shape} - {1}, reverse=True):
        if largest_difference(large, small * size) <= e.rounding * size:
            return size
    return None


def is_in_another_order(e):
    """The numbers are right, up to their signs, but in the wrong places."""
    if e.expected.size < 2 or e.expected.dtype.kind == "b":
        return False
    return largest_difference(*(np.sort(np.abs(array), axis=None) for array in (e.actual, e.expected))) <= e.rounding


def is_off_by_a_bias(e):
    """Every row is off by the same numbers, one for each feature."""
    if e.expected.ndim < 2 or e.key.kind not in OUTPUTS or len(e.expected) < 2:
        return False
    off = e.actual.astype(np.float64) - e.expected
    by_feature = [np.moveaxis(off, dim, -1).reshape(-1, off.shape[dim]) for dim in (-1, 1)]  # of Linear, of Conv2d
    return min(np.abs(rows - rows[:1]).max(initial=0) for rows in by_feature) <= e.rounding


def is_normalized_by_shard(e):
    """On each rank the block is off by a factor and a constant for each feature."""
    if not any(e.splits) or e.expected.ndim < 2 or e.key.kind not in OUTPUTS:
        return False
    for _, own, right in e.blocks():
        own, right = columns_of(own), columns_of(right)
        if len(right) < 3:
            return False
        mean, spread = right.mean(0), right.std(0)
        fitted = (right - mean) / np.where(spread, spread, 1) * own.std(0) + own.mean(0)
        if largest_difference(fitted, own) > max(e.rounding, 1e-4 * np.abs(own).max(initial=0)):
            return False
    return True


def columns_of(array):
    """A tensor (rows, features, ...) as (all but features, features), in float64."""
    return np.moveaxis(array, 1, -1).reshape(-1, array.shape[1]).astype(np.float64)


def wrong_ranks(e):
    """Those whose blocks are wrong, as "rank 1 is", where others are right."""
    if not e.splits or not all(e.splits):
        return None
    wrong = [rank for rank, own, right in e.blocks() if largest_difference(own, right) > e.rounding]
    if len(wrong) == len(e.layout.members):
        return None
    return f"rank {wrong[0]} is" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))} are"


CAUSES = (  # (whether the evidence fits, and details of it; words with these details), in the order they are tried
    (
        lambda e: changes(e) and e.fact("micro_batches", 1) > 1,
        "it differs from run to run: micro-batches read parameters while they change "
        f"({PAGE}micro-batches-train-ready-made-layers-wrongly)",
    ),
    (changes, "it differs from run to run: random numbers without a seed, or ranks that do not wait for each other"),
    (diverging_parameter, "it comes after an update of {}, which is local, and different on each rank by now"),
    (
        lambda e: e.key.kind in ("gradient", "gradient of an output") and e.fact("indexed"),
        f"in {{}}, x[i] with tensors in i has a wrong gradient where x or i is split, or it is in P ({ROWS})",
    ),
    (
        lambda e: "BatchNorm" in e.fact("module", "") and copies_apart(e),
        f"{APART}: each rank takes the statistics of its own rows ({BATCH_NORM})",
    ),
    (
        lambda e: e.key.kind == "source" and copies_apart(e),
        f"{APART}: each rank has drawn its own "
        f"({PAGE}tensors-in-b-from-randperm-and-bernoulli-differ-from-rank-to-rank)",
    ),
    (
        copies_apart,
        f"{APART}: a line changes what only its own rank holds, as clipping by the norm of a rank's own part does",
    ),
    (
        lambda e: e.key.kind == "parameter" and "P" in e.layout.axes,
        f"a parameter in P is not one that optimizers can update ({PAGE}a-parameter-in-p-is-never-updated)",
    ),
    (
        has_nan_on_n_ranks,
        "it has NaN on {} ranks and not on one: amax, max or logsumexp of a tensor in P has "
        f"({PAGE}the-gradient-of-amax-maxdim-or-logsumexp-of-a-tensor-in-p-is-nan)",
    ),
    (
        is_less_by_fractions,
        "a cast to integers drops the fraction of each rank's part of a tensor in P "
        f"({PAGE}a-tensor-in-p-loses-its-fractions-when-it-is-cast-to-integers)",
    ),
    (
        is_sum_of_norms,
        "it is the sum of the norms of the shards, and not the norm "
        f"({PAGE}the-norm-from-tnorm-linalgnorm-or-vector_norm-is-too-large)",
    ),
    (
        lambda e: times(e, too_large=True),
        "{} times too large: a sum over the ranks adds the whole value n times, or it is divided by what one rank "
        "holds; global tensors need no factor of the number of ranks",
    ),
    (
        lambda e: times(e, too_large=False),
        "{} times too small: it is divided by the number of ranks once too often; the mean of a global tensor is that "
        "of all ranks already",
    ),
    (
        lambda e: e.is_gradient and is_in_another_order(e),
        "the numbers are right but in the wrong places: stack of a split tensor has such a gradient "
        f"({PAGE}the-gradient-of-stack-of-split-tensors-is-wrong)",
    ),
    (is_in_another_order, "the numbers are right but in the wrong places"),
    (
        is_off_by_a_bias,
        "every row is off by the same numbers, as by a bias that each rank adds to its addend: add it once, "
        "after the all-reduce",
    ),
    (is_normalized_by_shard, f"each rank has normalized its own rows, by their mean and variance ({BATCH_NORM})"),
    (
        lambda e: e.key.kind == "graph output" and e.fact("micro_batches", 1) > 1,
        "micro-batch i is the i-th part of each rank's rows, so padding counts differently than on one rank "
        "(docs/check-your-model.md#padded-targets)",
    ),
    (
        lambda e: e.fact("took_block"),
        "it comes after to_local() in {}, which gives a rank its own block alone; is the rest needed too?",
    ),
    (wrong_ranks, "only the part of {} wrong: look for code that depends on the rank, or on what a rank holds"),
    (  # else: in which part of a step the difference begins
        lambda e: e.key.kind == "parameter" and "gradient" in e.agreeing,
        "the gradients are right and the update is not: the learning rate, clipping, the optimizer's state or its "
        f"groups ({BEGIN})",
    ),
    (
        lambda e: e.key.kind == "gradient at the update",
        f"backward is right, and a line between it and the update is not, as one that clips ({BEGIN})",
    ),
    (
        lambda e: e.key.kind == "norm" and "gradient" in e.agreeing,
        f"the gradients are right and their norm is not: clipping by groups, or another type of norm ({BEGIN})",
    ),
    (
        lambda e: e.is_gradient and "loss" in e.agreeing,
        f"forward and the loss are right and backward is not ({BEGIN})",
    ),
)
