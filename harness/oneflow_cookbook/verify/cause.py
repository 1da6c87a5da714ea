"""The likely cause of a difference, from what it looks like. Each function returns None unless the numbers fit."""

import numpy as np

from oneflow_cookbook.measure.sbp import Split, parse
from oneflow_cookbook.verify.compare import comparable, diverging
from oneflow_cookbook.verify.values import difference

PAGE = "docs/silently-wrong.md#"
RACE = PAGE + "micro-batches-train-ready-made-layers-wrongly"
BATCH_NORM = PAGE + "batchnorm-normalizes-each-shard-by-itself"
RANDPERM = PAGE + "tensors-in-b-from-randperm-and-bernoulli-differ-from-rank-to-rank"
ROWS = PAGE + "the-gradient-of-weightids-x-j-xi-j-or-xmask-is-wrong"
CAST = PAGE + "a-tensor-in-p-loses-its-fractions-when-it-is-cast-to-integers"
NORM = PAGE + "the-norm-from-tnorm-linalgnorm-or-vector_norm-is-too-large"
TRAITS = "docs/your-model.md#does-your-model-have-one-of-these"
STACK = PAGE + "the-gradient-of-stack-of-split-tensors-is-wrong"
LARGEST = PAGE + "the-gradient-of-amax-maxdim-or-logsumexp-of-a-tensor-in-p-is-nan"
PARAMETER = PAGE + "a-parameter-in-p-is-never-updated"
BEGIN = PAGE + "where-does-the-difference-begin"
TOO_LARGE = (
    "a sum over the ranks adds the whole value n times, or it is divided by what one rank holds; "
    "global tensors need no factor of the number of ranks"
)
TOO_SMALL = (
    "it is divided by the number of ranks once too often; the mean of a global tensor is that of all ranks already"
)


def cause_of(comparison, parallel, again):
    """The likely cause of the first difference, in one line, or None.

    parallel, again: the Run on n ranks, and a second one.
    """
    first = comparison.first
    for look in CAUSES:
        words = look(first, comparison, parallel, again)
        if words:
            return words
    return after_to_local(first) or wrong_on_some_ranks(first) or where_it_is(first, comparison)


def from_run_to_run(first, comparison, parallel, again):
    if first.key not in again or first.parallel is None:
        return None
    before, now = (comparable(run, first.key) for run in (parallel, again))
    if before is None or now is None or difference(before, now) <= first.rounding:
        return None
    if first.value.facts.get("micro_batches", 1) > 1:
        return f"it differs from run to run: micro-batches read parameters while they change ({RACE})"
    return "it differs from run to run: random numbers without a seed, or ranks that do not wait for each other"


def diverging_parameter(first, comparison, parallel, again):
    names = diverging(parallel)
    if not names or first.value.step < 2:
        return None
    return f"it comes after an update of {names[0]}, which is local, and different on each rank by now"


def gradient_of_an_index(first, comparison, parallel, again):
    """The gradient of x[i], with a tensor as i, has arrived before."""
    place = first.value.facts.get("indexed")
    if place is None or first.key.kind not in ("gradient", "gradient of an output"):
        return None
    return f"in {place}, x[i] with tensors in i has a wrong gradient where x or i is split, or it is in P ({ROWS})"


def copies_apart(first, comparison, parallel, again):
    if not first.apart:
        return None
    a, b, _ = first.apart[0]
    words = f"the copies on ranks {a} and {b} differ, although B says that they are equal"
    module = first.value.facts.get("module", "")
    if "BatchNorm" in module:
        return f"{words}: each rank takes the statistics of its own rows ({BATCH_NORM})"
    if first.key.kind == "entry":
        return f"{words}: each rank has drawn its own ({RANDPERM})"
    return f"{words}: a line changes what only its own rank holds, as clipping by the norm of a rank's own part does"


def parameter_in_p(first, comparison, parallel, again):
    if first.key.kind != "parameter" or "P" not in first.value.layout.axes:
        return None
    return f"a parameter in P is not one that optimizers can update ({PARAMETER})"


def fraction_lost(first, comparison, parallel, again):
    """A tensor in P of whole numbers, which is less than it must be by less than 1 for each rank."""
    if first.value.layout.sbp != "P" or first.parallel.dtype.kind != "i":
        return None
    if first.error >= len(first.value.layout.members):
        return None
    return f"a cast to integers drops the fraction of each rank's part of a tensor in P ({CAST})"


def norm_of_shards(first, comparison, parallel, again):
    """A tensor in P whose parts are the norms of the shards: the norm is the root of the sum of their squares."""
    if first.value.layout.sbp != "P" or first.parallel.dtype.kind != "f":
        return None
    squares = sum(block.astype(np.float64) ** 2 for block in parallel.blocks(first.key).values())
    if difference(np.sqrt(squares), first.alone) > max(first.rounding, 1e-5 * abs(first.alone).max(initial=0)):
        return None
    return f"it is the sum of the norms of the shards, and not the norm ({NORM})"


def unequal_micro_batches(first, comparison, parallel, again):
    if first.key.kind != "graph output" or first.value.facts.get("micro_batches", 1) < 2:
        return None
    words = "micro-batch i is the i-th part of each rank's rows, so padding counts differently than on one rank"
    return f"{words} ({TRAITS})"


def not_a_number(first, comparison, parallel, again):
    if first.parallel.dtype.kind != "f" or not np.isnan(first.parallel).any() or np.isnan(first.alone).any():
        return None
    alone = f"it has NaN on {parallel.world_size} ranks and not on one"
    return f"{alone}: amax, max or logsumexp of a tensor in P has ({LARGEST})"


def factor(first, comparison, parallel, again):
    """The value is that of one rank times a number of ranks, or divided by it."""
    sizes = {parallel.world_size, *first.value.layout.grid.shape} - {1}
    alone, n_ranks = first.alone.astype(np.float64), first.parallel.astype(np.float64)
    for size in sorted(sizes, reverse=True):
        if difference(n_ranks, alone * size) <= first.rounding * size:
            return f"{size} times too large: {TOO_LARGE}"
        if difference(n_ranks * size, alone) <= first.rounding * size:
            return f"{size} times too small: {TOO_SMALL}"
    return None


def another_order(first, comparison, parallel, again):
    """The numbers are right, up to their signs, but in the wrong places."""
    if first.alone.size < 2 or first.alone.dtype.kind == "b":
        return None
    in_order = [np.sort(np.abs(array), axis=None) for array in (first.parallel, first.alone)]
    if difference(*in_order) > first.rounding:
        return None
    words = "the numbers are right but in the wrong places"
    return f"{words}: stack of a split tensor has such a gradient ({STACK})" if "gradient" in first.key.kind else words


def added_by_each_rank(first, comparison, parallel, again):
    """Every row is off by the same numbers, one for each feature: a bias that several ranks have added, or none."""
    if first.alone.ndim < 2 or first.key.kind not in ("output", "graph output") or len(first.alone) < 2:
        return None
    off = first.parallel.astype(np.float64) - first.alone
    by_feature = [np.moveaxis(off, dim, -1).reshape(-1, off.shape[dim]) for dim in (-1, 1)]  # of Linear, of Conv2d
    if min(np.abs(rows - rows[:1]).max(initial=0) for rows in by_feature) > first.rounding:
        return None
    words = "every row is off by the same numbers, as by a bias that each rank adds to its part of a sum"
    return f"{words}: add it once, after the all-reduce"


def statistics_of_a_shard(first, comparison, parallel, again):
    """On each rank the block is off by a factor and a constant for each feature: it was normalized by itself."""
    value = first.value
    if value.layout.sbp == "local" or not any(isinstance(sbp, Split) for sbp in parse(value.layout.sbp)):
        return None
    if first.alone.ndim < 2 or first.key.kind not in ("output", "graph output"):
        return None
    for rank in value.layout.members:
        part = tuple(slice(*bounds) for bounds in value.layout.block(value.shape, rank))
        right, seen = (columns_of(array[part]) for array in (first.alone, first.parallel))
        if len(right) < 3:
            return None
        mean, spread = right.mean(0), right.std(0)
        fitted = (right - mean) / np.where(spread, spread, 1) * seen.std(0) + seen.mean(0)
        if difference(fitted, seen) > max(first.rounding, 1e-4 * np.abs(seen).max(initial=0)):
            return None
    return f"each rank has normalized its own rows, by their mean and variance ({BATCH_NORM})"


def columns_of(array):
    """A tensor (rows, features, ...) as (all but features, features), in float64."""
    return np.moveaxis(array, 1, -1).reshape(-1, array.shape[1]).astype(np.float64)


def wrong_on_some_ranks(first):
    """The blocks of some ranks are right."""
    layout = first.value.layout
    if layout.sbp == "local" or not all(isinstance(sbp, Split) for sbp in parse(layout.sbp)):
        return None
    wrong = []
    for rank in layout.members:
        part = tuple(slice(*bounds) for bounds in layout.block(first.value.shape, rank))
        if difference(first.parallel[part], first.alone[part]) > first.rounding:
            wrong.append(rank)
    if len(wrong) == len(layout.members):
        return None
    whose = f"rank {wrong[0]} is" if len(wrong) == 1 else f"ranks {in_words(wrong)} are"
    return f"only the part of {whose} wrong: look for code that depends on the rank, or on what a rank holds"


def after_to_local(first):
    """The value may depend on a rank's own block."""
    taken = first.value.facts.get("took_block")
    if taken:
        return f"it comes after to_local() in {taken}, which gives a rank its own block alone; is the rest needed too?"
    return None


def where_it_is(first, comparison):
    """In which part of a step the difference begins."""
    kinds = {key.kind for key in comparison.agreeing}
    if first.key.kind == "parameter" and "gradient" in kinds:
        causes = "the learning rate, clipping, the optimizer's state or its groups"
        return f"the gradients are right and the update is not: {causes} ({BEGIN})"
    if first.key.kind == "gradient at the update":
        return f"backward is right, and a line between it and the update is not, as one that clips ({BEGIN})"
    if first.key.kind == "norm" and "gradient" in kinds:
        return f"the gradients are right and their norm is not: clipping by groups, or another type of norm ({BEGIN})"
    if first.key.kind.startswith("gradient") and "loss" in kinds:
        return f"forward and the loss are right and backward is not ({BEGIN})"
    return None


CAUSES = (
    from_run_to_run,
    diverging_parameter,
    gradient_of_an_index,
    copies_apart,
    parameter_in_p,
    not_a_number,
    fraction_lost,
    norm_of_shards,
    factor,
    another_order,
    added_by_each_rank,
    statistics_of_a_shard,
    unequal_micro_batches,
)


def in_words(ranks):
    return ", ".join(map(str, ranks))
