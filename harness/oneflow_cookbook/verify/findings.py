"""What `launch.sh verify` says."""

from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from oneflow_cookbook.verify.compare import MARGIN, diverging
from oneflow_cookbook.verify.values import line_of

KINDS = {  # kind of a value -> what one is called, and what several that agree are called, if they are counted
    "source": ("the tensor that {} makes", None),
    "initial": ("{} before training", "initial parameters"),
    "input": ("the input of {}", "inputs"),
    "output": ("the output of {}", "outputs of modules"),
    "matmul": ("the result of {}", "matmuls"),
    "to_global": ("the result of {}", "results of to_global"),
    "before": ("the tensor before {}", None),
    "loss": ("the loss", "losses"),
    "gradient of an output": ("the gradient of the output of {}", "gradients of outputs"),
    "gradient": ("the gradient of {}", "gradients of parameters"),
    "gradient from grad": ("the gradient of {} from autograd.grad", None),
    "norm": ("the norm of the gradients, from {}", "norms of gradients"),
    "gradient at the update": ("the gradient of {} at the update", "gradients at the update"),
    "parameter": ("{} after the update", "parameters after an update"),
    "buffer": ("the buffer {} after the update", "buffers"),
    "graph output": ("the output of {}", "outputs of graphs"),
    "read": ("the tensor whose value {} reads", "values read"),
}
COPIES = "docs/silently-wrong.md#every-rank-reads-every-sample"
NEW_PARAMETERS = "docs/your-model.md#the-rules-and-why"
DROPPED = "docs/silently-wrong.md#from-local-to-b-the-values-of-the-other-ranks-are-lost"
PART = "docs/silently-wrong.md#a-loss-from-to_local-is-only-this-ranks-part"


@dataclass
class Findings:
    """What was found. stated_size: how many ranks the script was told that there are when it ran on one."""

    options: object  # the command line
    stated_size: int
    comparison: object
    cause: Optional[str] = None
    wrong: list = field(default_factory=list)  # lines on mistakes beside the values that differ
    suspicious: list = field(default_factory=list)  # lines on what is right in value
    not_seen: list = field(default_factory=list)  # lines on what this verify could not compare or use

    @property
    def differs(self):
        return bool(self.comparison.first or self.wrong)

    def as_dict(self):
        first = self.comparison.first
        return {
            "agrees": not self.differs,
            "ranks": self.options.nproc_per_node,
            "told_on_one_rank": self.stated_size,
            "steps": self.comparison.steps,
            "agreeing": len(self.comparison.agreeing),
            "differing": len(self.comparison.differing),
            "not_compared": len(self.comparison.skipped),
            "few_elements_differ": self.comparison.kinks,
            "wrong_entries": self.wrong,
            "first_difference": first and self.first_as_dict(first),
            "likely_cause": self.cause,
            "suspicious": self.suspicious,
            "not_seen": self.not_seen,
        }

    def first_as_dict(self, first):
        return {
            "what": name_of(first.key),
            "step": first.value.step,
            "places": [f"{file}:{line}" for file, line in first.key.place],
            "shape": first.value.shape,
            "sbp": first.value.layout.sbp,
            "ranks": first.value.layout.ranks,
            "error": first.error if np.isfinite(first.error) else None,  # JSON has no infinity
            "explained_by_rounding": first.rounding,
        }

    def as_text(self):
        compared = self.comparison
        count = len(compared.agreeing) + len(compared.differing)
        steps = f"{compared.steps} step{'s' * (compared.steps > 1)}, " if compared.steps else ""
        other = self.options.against or "the same script"
        lines = [f"{self.options.nproc_per_node} ranks against {other} on 1 rank: {steps}{count} values"]
        lines += self.wrong
        if compared.first:
            lines += self.lines_of_first(compared.first)
        else:
            all_values = "all other values" if compared.skipped else "all values"
            lines.append(f"{all_values} agree" if not self.wrong else f"apart from that, {all_values} agree")
        if compared.skipped:
            words = "values that one rank computes in a different number or shape"
            count, first = len(compared.skipped), compared.skipped[0]
            lines.append(f"not compared: {count} {words}; the first is {name_of(first)}, {line_of(first.place)}")
        if compared.kinks:
            words = "only a few elements differ, as when rounding moves an input of ReLU across 0"
            lines.append(f"in {compared.kinks} values {words}: after that, less than 1 % is no difference")
        if self.stated_size > 1:
            words = f"on one rank the script was told that there are {self.stated_size}"
            lines.append(f"not noticed: a factor of {self.stated_size} too many or too few, as {words}")
        return "\n".join([*lines, *self.not_seen, *dict.fromkeys(self.suspicious)])

    def lines_of_first(self, first):
        value, agreeing = first.value, self.comparison.agreeing
        shape = f" {value.shape}" if value.shape else ""
        what = f"{name_of(first.key)}{shape}, {line_of(first.key.place)}"
        lines = [f"first difference: step {value.step}, {what}"]
        lines.append(
            f"  {how_large(first, self.options.nproc_per_node)}; {value.layout.sbp} on ranks {value.layout.ranks}"
        )
        if self.cause:
            lines.append(f"  likely: {self.cause}")
        counts = {words: sum(key.kind == kind for key in agreeing) for kind, (_, words) in KINDS.items() if words}
        words = ", ".join(f"{words} {count}" for words, count in counts.items() if count)
        lines.append(f"before it {len(agreeing)} values agree" + (f": {words}" if words else ""))
        return lines


def name_of(key):
    return KINDS[key.kind][0].format(key.name)


def how_large(first, ranks):
    """How large a difference is, beside what rounding explains."""
    if first.apart:
        a, b, apart = first.apart[0]
        words = f"the copies of ranks {a} and {b} differ by {apart:.3g}"
    elif not np.isfinite(first.error):
        return f"on {ranks} ranks it has NaN or infinite numbers"
    else:
        ratio = ratio_of(first)
        if ratio is not None and abs(ratio - 1) > 0.01:
            words = f"on {ranks} ranks it is {ratio:.3f} times that of one rank"
        else:
            largest = np.abs(first.expected[np.isfinite(first.expected)]).max(initial=0) if first.expected.size else 0
            words = f"it differs by {first.error:.3g}, where the largest number is {float(largest):.3g}"
    if not first.rounding:
        return words
    times = first.error / first.rounding * MARGIN
    return f"{words}, {'over 1,000' if times > 1000 else f'{times:.0f}'} times what rounding does"


def ratio_of(first):
    """The number by which the value is that of one rank, None if there is none."""
    expected, actual = first.expected.astype(np.float64), first.actual.astype(np.float64)
    square = float((expected * expected).sum())
    if not np.isfinite(square) or square == 0 or not np.isfinite(actual).all():
        return None
    ratio = float((expected * actual).sum()) / square
    return ratio if np.abs(actual - ratio * expected).max(initial=0) <= first.rounding * max(1, abs(ratio)) else None


def wrong_lines(parallel, alone, other):
    """Lines on mistakes beside the values that differ. other: what runs on one rank, in words."""
    return [
        *missing_gradients(parallel, alone, other),
        *never_updated(parallel),
        *local_parameters(parallel),
        *wrong_sources(parallel, alone),
        *other_parameters(alone),
    ]


def missing_gradients(parallel, alone, other):
    """A line for parameters that get a gradient in one of two runs only."""
    here, there = (parallel, f"on {parallel.world_size} ranks"), (alone, other)
    for (run, place), (reference, other_place) in ((here, there), (there, here)):
        with_gradient = names_of_kind(run, "gradient")
        names = names_of_kind(reference, "gradient") - with_gradient
        names = [name for name in names_of_kind(run, "initial", "parameter") if name in names]
        if with_gradient and names:  # a graph with micro-batches gives no gradients
            yield f"wrong: no gradient {place}, but one {other_place}: {shortened(names)}"


def names_of_kind(run, *kinds):
    """The names of a run's values of these kinds, in order, as the keys of a dict."""
    return dict.fromkeys(key.name for key in run.keys if key.kind in kinds).keys()


def never_updated(parallel):
    """A line if the optimizer has other parameters than the model: the script trains nothing, on one rank too."""
    count = max(facts["never_updated"] for facts in parallel.facts)
    if count:
        words = f"no optimizer updates any of the model's {count} parameters: create it after to_global"
        yield f"wrong: {words}, which makes new ones ({NEW_PARAMETERS})"


def local_parameters(parallel):
    """A line for parameters that are local, and so diverge."""
    names = diverging(parallel)
    if names:
        words = "is local, not global, so its gradient is not reduced, and the copies of the ranks differ"
        yield f"wrong: {shortened(names)} {words} after an update ({DROPPED})"


def wrong_sources(parallel, alone):
    """A line for each place where every rank passes the same to S, so that the tensor has it n times.

    Wrong is what changes from step to step, as a batch does, and what the script does not repeat on one rank.
    """
    others, short = places_in(alone, "other_blocks"), places_in(alone, "short")
    for place, words, changes in passed_to_all(parallel):
        if place in others:
            yield f"wrong: {words}; on one rank the script makes other numbers"
        elif place in short:
            yield f"wrong: {words}; on one rank the script makes fewer rows than the rest of the batch has"
        elif changes:
            yield f"wrong: {words}"


def other_parameters(alone):
    """A line for parameters that only one of two scripts has; of the same script there are none."""
    for fact, words in (
        ("unknown", "only the script for one device has"),
        ("missing", "the script for one device lacks"),
    ):
        if alone.facts[0][fact]:
            yield f"wrong: {words} parameters of these names and shapes: {shortened(alone.facts[0][fact])}"


def unused_lines(parallel, others, again_raised=None):
    """Lines on what could not be compared: updates, and runs that measure rounding or whether values change."""
    kinds = {key.kind for key in parallel.keys}
    if kinds & {"loss", "gradient", "gradient from grad"} and "parameter" not in kinds:
        words = "no parameter of a module or variable has changed between backward and the next forward"
        yield f"no training step was seen, so no updates are compared and --steps ends nothing: {words}"
    raised = [facts["raised"] for run in others for facts in run.facts if facts["raised"]]
    if raised:
        words = f"{len(raised)} of {len(others)} runs with changed last bits raised an exception"
        yield f"rounding: {words} ({raised[0]}); of these only the values before it are used"
    if again_raised:
        yield f"not checked: whether it differs from run to run, as a second run failed: {again_raised}"


def suspicious_lines(parallel, alone):
    """Lines on what is right in value, and may not be intended, at most one for a place."""
    others = places_in(alone, "other_blocks")
    lines, copies = {}, list(passed_to_all(parallel))
    for place, words, changes in copies:
        if not changes and place not in others | places_in(alone, "short"):
            lines[place] = words
    for place in others - {place for place, *_ in copies}:
        lines[place] = (
            f"{place}: this local tensor has other numbers when the script runs on one rank; do they depend on other "
            "rows, or on the process, as the order of a set does?"
        )
    for key in [key for key in parallel.keys if key.kind in ("loss", "graph output")]:
        if "NaN" not in lines and has_nan(parallel.whole(key)):
            words = f"{name_of(key)} is NaN in step {parallel[key].step}, and NaN equals NaN here"
            lines["NaN"] = f"{line_of(key.place)}: {words}"
    for key, passed in passed_by_ranks(parallel):
        if set(parallel[key].layout.axes) == {"B"} and len({digest for _, digest, _ in passed}) > 1:
            words = f"the ranks pass different values, and B takes those of rank 0 ({DROPPED})"
            lines[key.place] = f"{line_of(key.place)}: {words}"
    for place in places_in(parallel, "parts"):
        lines[place] = f"{place}: to_local() of a tensor in P is only this rank's addend ({PART})"
    return [f"look at {words}" for words in lines.values()]


def places_in(run, fact):
    """The places that all ranks of a run name under a fact."""
    return {place for facts in run.facts for place in facts[fact]}


def passed_to_all(parallel):
    """Yield (place, words, whether the values change from call to call) where all ranks pass the same to S.

    Values that do not change may be intended, such as the positions or the mask of each row.
    """
    calls_at = {}  # place -> [(key, what `digest` says of each rank's tensor)]
    for key, passed in passed_by_ranks(parallel):
        layout = parallel[key].layout
        if "S" in layout.sbp and len(layout.axes) == 1 and len(layout.members) > 1:
            calls_at.setdefault(key.place, []).append((key, passed))
    for place, calls in calls_at.items():
        if all(is_same_on_all(passed) for _, passed in calls):
            key, passed = calls[-1]
            layout, shape = parallel[key].layout, passed[0][0]
            words = f"each rank passes the same {shape} to {layout.sbp}, so the tensor {parallel[key].shape} has it"
            hashes = {value_hash for _, passed in calls for _, value_hash, _ in passed}
            line = line_of(place)
            yield line, f"{line}: {words} {len(layout.members)} times ({COPIES})", len(hashes) > 1


def is_same_on_all(passed):
    """Whether all ranks pass the same values, and not all one number. passed: what `digest` says, by rank."""
    return len({value_hash for _, value_hash, _ in passed}) == 1 and not any(constant for *_, constant in passed)


def passed_by_ranks(parallel):
    """(key, [what digest says of the local tensor of each rank]) of each local tensor that becomes global."""
    for key in [key for key in parallel.keys if key.kind == "source"]:
        values = [values[key] for values in parallel.by_rank if key in values]
        if len(values) == parallel.world_size and all("local" in value.facts for value in values):
            members = parallel[key].layout.members
            yield key, [value.facts["local"] for rank, value in enumerate(values) if rank in members]


def shortened(names):
    """The first names of a list."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def has_nan(array):
    return array is not None and array.dtype.kind == "f" and bool(np.isnan(array).any())
