"""Compare the values of a run on n ranks with those on one rank, and say which differ by more than rounding."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from oneflow_cookbook.verify.values import Key, Value, largest_difference

NAMELESS = ("loss", "norm")  # kinds of which two scripts have the same, whatever its name
BY_NAME = (
    *("initial", "input", "output", "gradient of an output", "loss", "gradient", "norm"),
    *("gradient at the update", "parameter", "buffer", "graph output"),
)
GRAPH_AND_EAGER = 2e-5  # relative: Adam's bias correction is float32 in a graph and float64 in eager mode
MARGIN = 30  # times what the nudged runs differ: in five recipes, right runs differed by 4 times at most
MANY = 10_000  # elements: in a tensor with as many, a few may differ because rounding moved a number across 0 in ReLU
FEW = 1e-4  # of the elements
AFTER_A_KINK = 1e-2  # what such an element changes in others, relative to the norm of the tensor
ONE_BY_ONE = 0.25  # some losses of OneFlow add row after row: in units in the last place, for each row
TIMES_EPSILON = 16  # the least that counts as a rounding difference, in units in the last place of the largest number


@dataclass
class Difference:
    """A value that differs.

    error: the largest difference. rounding: the largest that rounding explains. apart: [(rank, rank, difference)] of
    copies of it that should be equal; then the value that differs is that of the second rank.
    """

    key: Key
    value: Value
    error: float
    rounding: float
    actual: np.ndarray  # the whole value on n ranks
    expected: np.ndarray  # and on one
    apart: list = field(default_factory=list)


@dataclass
class Comparison:
    """agreeing: keys of equal values before the first difference; differing: Differences; skipped: keys of others.

    steps: of training that were compared. kinks: number of values of which only a few elements differ.
    """

    agreeing: list
    differing: list
    skipped: list
    steps: int
    kinks: int

    @property
    def first(self):
        return self.differing[0] if self.differing else None


def pairs_of(parallel, alone):
    """([(key in `parallel`, key in `alone`)] of values that are the same one, the other keys of `parallel`)."""
    times = [Counter(key[:3] for key in run.keys) for run in (parallel, alone)]
    pairs = [(key, key) for key in parallel.keys if times[0][key[:3]] == times[1][key[:3]] and key in alone]
    paired = {key for key, _ in pairs}
    return pairs, [key for key in parallel.keys if key not in paired]


def pairs_by_name(parallel, alone):
    """The same for two different scripts: values of the same kind, module or parameter, in the same order."""
    of_many, of_one = numbered_by_name(parallel), numbered_by_name(alone)
    pairs = [(key, of_one[name]) for name, key in of_many.items() if name in of_one]
    return pairs, [key for name, key in of_many.items() if name not in of_one]


def numbered_by_name(run):
    """{(kind, name, how often it came before): key} of a run's values that two different scripts can share."""
    times, keys = Counter(), {}
    for key in run.keys:
        if key.kind in BY_NAME:
            kind = "loss" if key.kind == "graph output" and run[key].shape == () else key.kind
            name = "" if kind in NAMELESS else key.name
            times[kind, name] += 1
            keys[kind, name, times[kind, name]] = key
    return keys


def compare(parallel, alone, nudged, pairs, skipped):
    """The Comparison of two Runs. nudged: Runs like `alone`, whose sources were changed in their last bit.

    pairs, skipped: of pairs_of or pairs_by_name.
    """
    tolerances = Tolerances(relative_rounding(parallel, alone, nudged, [pair[1] for pair in pairs]))
    agreeing, differing, skipped = [], [], list(skipped)
    for key, key_of_one in pairs:
        value, actual, expected = parallel[key], comparable(parallel, key), comparable(alone, key_of_one)
        if actual is None or expected is None or actual.shape != expected.shape:
            if value.layout.sbp != "local":  # else `diverging` tells
                skipped.append(key)
            continue
        tolerance = tolerances.of(key, key_of_one, actual, expected)
        actual = actual if tolerance.undetermined is None else np.where(tolerance.undetermined, expected, actual)
        apart = [copies for copies in parallel.apart(key) if copies[2] > tolerance.rounding]
        error = 0.0  # of a value that the script computes, such as the addends of a mean that is divided later
        if not value.facts.get("computed"):
            error = largest_difference(actual, expected) if apart else tolerances.error(tolerance, actual, expected)
        error = max([error, *(copies[2] for copies in apart)])
        if error > tolerance.rounding:
            differing.append(Difference(key, value, error, tolerance.rounding, actual, expected, apart))
        elif not differing:
            agreeing.append(key)
    steps = max((parallel[key].step for key in parallel.keys if key.kind == "parameter"), default=0)
    return Comparison(agreeing, differing, skipped, steps, tolerances.kinks)


@dataclass
class Tolerance:
    """By how much a value may differ from that on one rank."""

    rounding: float  # an element, by this
    undetermined: np.ndarray  # a mask of elements that may have any value, or None
    few: float  # this share of the elements of a large tensor may have any value
    norm: float  # the whole, by this, relative in the 2-norm


class Tolerances:
    """Makes the Tolerance of each value, in the order of the script. relative: of relative_rounding."""

    def __init__(self, relative):
        self.relative = relative
        self.undetermined = {}  # name of a parameter -> where its gradient was as small as rounding
        self.kinks = 0  # values of which only a few elements differed

    def of(self, key, key_of_one, actual, expected):
        rounding = self.relative[key_of_one[:3]] * largest(expected)
        if key.kind == "gradient":  # Adam may move the parameter either way where this is rounding
            unsure = (np.abs(expected) <= rounding) & ((expected != 0) | (actual != 0))
            self.undetermined[key.name] = unsure | self.undetermined.get(key.name, False)
        undetermined = self.undetermined.get(key.name) if key.kind == "parameter" else None
        return Tolerance(rounding, undetermined, few_of(expected), AFTER_A_KINK if self.kinks else 0.0)

    def error(self, tolerance, actual, expected):
        """The largest difference of two values, 0 if all that is above rounding is allowed."""
        error = largest_difference(actual, expected)
        if error <= tolerance.rounding:
            return error
        can_be_few = tolerance.few and np.isfinite(actual).all()
        if can_be_few and float((np.abs(actual - expected) > tolerance.rounding).mean()) <= tolerance.few:
            self.kinks += 1  # as behind a ReLU whose input is 0 but for rounding
            return 0.0
        return 0.0 if relative_norm(actual, expected) <= tolerance.norm else error


def few_of(value):
    """The share of its elements that may have any value."""
    return FEW if value.size >= MANY and value.dtype.kind == "f" else 0.0


def diverging(run):
    """The names of local parameters that begin with the same value on all ranks, and then differ."""
    local = [key for key in run.keys if run[key].layout.sbp == "local"]
    equal = {key.name for key in local if key.kind == "initial" and run.whole(key) is not None}
    updated = [key for key in local if key.kind == "parameter" and key.name in equal]
    return list(dict.fromkeys(key.name for key in updated if run.whole(key) is None))


def relative_norm(actual, expected):
    """|a - b| / |b| in the 2-norm."""
    apart, norm = (np.linalg.norm(array.astype(np.float64)) for array in (actual - expected, expected))
    return apart / norm if norm else np.inf


def comparable(run, key):
    """The whole value; of a graph with micro-batches the sum over them, as on n ranks they have other rows."""
    whole = run.whole(key)
    if whole is not None and whole.ndim and run[key].facts.get("micro_batches", 1) > 1:
        return whole.sum(0) if key.kind in ("graph output", "read") else whole
    return whole


def relative_rounding(parallel, alone, nudged, keys):
    """{kind, name and place of a value: the largest difference that rounding explains, relative to its largest number}.

    The nudged runs are few, and a value may be equal by luck: all its occurrences are taken together.
    """
    relative, rows = {}, rows_of_outputs(alone)
    has_graph = [any(key.kind == "graph output" for key in run.keys) for run in (parallel, alone)]
    for key in keys:
        value = comparable(alone, key)
        if value is None:
            continue
        times = max(TIMES_EPSILON, rows * ONE_BY_ONE) if value.ndim == 0 else TIMES_EPSILON
        least = times * np.finfo(value.dtype).eps if value.dtype.kind == "f" else 0.0
        if key.kind == "parameter" and has_graph[0] != has_graph[1]:
            least = max(least, GRAPH_AND_EAGER)
        others = [comparable(run, key) for run in nudged if key in run]
        moved = [moved_by(value, other) for other in others if other is not None and other.shape == value.shape]
        moved = max(filter(np.isfinite, moved), default=0.0) / (largest(value) or 1)
        relative[key[:3]] = max(relative.get(key[:3], 0.0), least, MARGIN * moved)
    return relative


def rows_of_outputs(run):
    """The largest number of rows, such as tokens, in the output of a module or matmul."""
    shapes = [run[key].shape for key in run.keys if key.kind in ("output", "matmul")]
    return max((int(np.prod(shape[:-1] if len(shape) > 1 else shape)) for shape in shapes), default=1)


def moved_by(value, other):
    """The largest difference; of a large tensor without that of the few elements that may differ."""
    few = few_of(value)
    if not few:
        return largest_difference(value, other)
    number = value.size - 1 - int(few * value.size)
    return float(np.partition(np.abs(value - other).ravel(), number)[number])


def largest(value):
    """The largest finite absolute value."""
    finite = np.abs(value[np.isfinite(value)]) if value.dtype.kind == "f" else np.abs(value)
    return float(finite.max(initial=0))
