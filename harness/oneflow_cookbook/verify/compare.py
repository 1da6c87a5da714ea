"""Compare the values of a run on n ranks with those on one rank, and say which differ by more than rounding."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from oneflow_cookbook.verify.values import Key, Value, difference

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
class Outcome:
    """A value that differs.

    error: the largest difference. rounding: the largest that rounding explains. apart: [(rank, rank, difference)] of
    copies of it that should be equal; then the value that differs is that of the second rank.
    """

    key: Key
    value: Value
    error: float
    rounding: float
    parallel: np.ndarray = None  # the whole value on n ranks
    alone: np.ndarray = None  # and on one
    apart: list = field(default_factory=list)


@dataclass
class Comparison:
    """agreeing: keys of equal values before the first difference; differing: Outcomes; skipped: keys of other values.

    steps: of training that were compared. kinks: number of values in which only a few elements differ, see is_kink.
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
    numbered = []
    for run in (parallel, alone):
        seen, keys = Counter(), {}
        for key in run.keys:
            if key.kind in BY_NAME:
                kind = "loss" if key.kind == "graph output" and run[key].shape == () else key.kind
                name = "" if kind in NAMELESS else key.name
                seen[kind, name] += 1
                keys[kind, name, seen[kind, name]] = key
        numbered.append(keys)
    pairs = [(key, numbered[1][name]) for name, key in numbered[0].items() if name in numbered[1]]
    return pairs, [key for name, key in numbered[0].items() if name not in numbered[1]]


def compare(parallel, alone, nudged, pairs, skipped):
    """The Comparison of two Runs. nudged: Runs like `alone`, whose entries were changed in their last bit.

    pairs, skipped: of pairs_of or pairs_by_name.
    """
    comparer = Comparer(parallel, alone, tolerances(parallel, alone, nudged, pairs))
    for pair in pairs:
        comparer.add(*pair)
    steps = max((parallel[key].step for key in parallel.keys if key.kind == "parameter"), default=0)
    return Comparison(comparer.agreeing, comparer.differing, skipped + comparer.skipped, steps, comparer.kinks)


def tolerances(parallel, alone, nudged, pairs):
    """relative_rounding of the values of `alone` in these pairs; more where one run trains in a graph."""
    relative = relative_rounding(alone, nudged, [pair[1] for pair in pairs])
    has_graph = [any(key.kind == "graph output" for key in run.keys) for run in (parallel, alone)]
    if has_graph[0] != has_graph[1]:
        for key in relative:
            if key[0] == "parameter":
                relative[key] = max(relative[key], GRAPH_AND_EAGER)
    return relative


class Comparer:
    """Compares the values of two runs, one after another, in the order of the script."""

    def __init__(self, parallel, alone, relative):
        """relative: that of relative_rounding."""
        self.parallel, self.alone, self.relative = parallel, alone, relative
        self.agreeing, self.differing, self.skipped, self.kinks = [], [], [], 0
        self.undetermined = {}  # name of a parameter -> where its gradient may have any sign

    def add(self, key, key_of_one):
        """Compare a value of `parallel` with one of `alone`."""
        of_many, of_one = comparable(self.parallel, key), comparable(self.alone, key_of_one)
        value = self.parallel[key]
        if of_many is None or of_one is None or of_many.shape != of_one.shape:
            if value.layout.sbp != "local":  # else `diverging` tells
                self.skipped.append(key)
            return
        rounding = self.relative[key_of_one[:3]] * largest(of_one)
        apart = [pair for pair in self.parallel.apart(key) if pair[2] > rounding]
        outcome = Outcome(key, value, 0.0, rounding, of_many, of_one, apart)
        if key.kind == "gradient":
            self.note_signs(outcome)
        outcome.error = max([self.error_of_whole(outcome), *(pair[2] for pair in apart)])
        if outcome.error > rounding:
            self.differing.append(outcome)
        elif not self.differing:
            self.agreeing.append(key)

    def error_of_whole(self, outcome):
        """The largest difference of two whole values, without what rounding may have caused."""
        of_many, of_one, name = outcome.parallel, outcome.alone, outcome.key.name
        if outcome.value.facts.get("computed"):  # such as the addends of a mean that is divided later
            return 0.0
        if outcome.key.kind == "parameter" and name in self.undetermined:
            outcome.parallel = of_many = np.where(self.undetermined[name], of_one, of_many)
        error = difference(of_many, of_one)
        if error <= outcome.rounding or outcome.apart:
            return error
        if is_kink(of_many, of_one, outcome.rounding):
            self.kinks += 1
            return 0.0
        return 0.0 if self.kinks and relative_norm(of_many, of_one) <= AFTER_A_KINK else error

    def note_signs(self, outcome):
        """Note where the gradient of a parameter is as small as rounding: Adam may move it either way there."""
        of_many, of_one, name = outcome.parallel, outcome.alone, outcome.key.name
        unsure = (np.abs(of_one) <= outcome.rounding) & ((of_one != 0) | (of_many != 0))
        self.undetermined[name] = unsure | self.undetermined.get(name, False)


def diverging(run):
    """The names of local parameters that begin with the same value on all ranks, and then differ."""
    local = [key for key in run.keys if run[key].layout.sbp == "local"]
    equal = {key.name for key in local if key.kind == "initial" and run.whole(key) is not None}
    updated = [key for key in local if key.kind == "parameter" and key.name in equal]
    return list(dict.fromkeys(key.name for key in updated if run.whole(key) is None))


def is_kink(of_many, of_one, rounding):
    """Whether only a few elements of a large tensor differ, as behind a ReLU whose input is 0 but for rounding."""
    if of_one.size < MANY or of_one.dtype.kind != "f" or not np.isfinite(of_many).all():
        return False
    return float((np.abs(of_many - of_one) > rounding).mean()) <= FEW


def relative_norm(of_many, of_one):
    """|a - b| / |b| in the 2-norm."""
    apart, norm = (np.linalg.norm(array.astype(np.float64)) for array in (of_many - of_one, of_one))
    return apart / norm if norm else np.inf


def comparable(run, key):
    """The whole value; of a graph with micro-batches the sum over them, as on n ranks they have other rows."""
    whole = run.whole(key)
    if whole is not None and whole.ndim and run[key].facts.get("micro_batches", 1) > 1:
        return whole.sum(0) if key.kind in ("graph output", "read") else whole
    return whole


def relative_rounding(alone, nudged, keys):
    """{kind, name and place of a value: the largest difference that rounding explains, relative to its largest number}.

    The nudged runs are few, and a value may be equal by luck: all its occurrences are taken together.
    """
    relative, rows = {}, rows_of_outputs(alone)
    for key in keys:
        value = comparable(alone, key)
        if value is None:
            continue
        times = max(TIMES_EPSILON, rows * ONE_BY_ONE) if value.ndim == 0 else TIMES_EPSILON
        least = times * np.finfo(value.dtype).eps if value.dtype.kind == "f" else 0.0
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
    """The largest difference; of a large tensor without that of the few elements that is_kink allows."""
    if value.size < MANY or value.dtype.kind != "f":
        return difference(value, other)
    apart = np.abs(value - other).ravel()
    number = value.size - 1 - int(FEW * value.size)
    return float(np.partition(apart, number)[number])


def largest(value):
    """The largest finite absolute value."""
    finite = np.abs(value[np.isfinite(value)]) if value.dtype.kind == "f" else np.abs(value)
    return float(finite.max(initial=0))
