"""What `launch.sh verify` says."""

from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from oneflow_cookbook.verify.compare import MARGIN, diverging
from oneflow_cookbook.verify.values import at

NAMES = {  # kind of a value -> what it is called
    "entry": "the tensor that {} makes",
    "initial": "{} before training",
    "input": "the input of {}",
    "output": "the output of {}",
    "matmul": "the result of {}",
    "to_global": "the result of {}",
    "before": "the tensor before {}",
    "loss": "the loss",
    "gradient of an output": "the gradient of the output of {}",
    "gradient": "the gradient of {}",
    "gradient from grad": "the gradient of {} from autograd.grad",
    "norm": "the norm of the gradients, from {}",
    "gradient at the update": "the gradient of {} at the update",
    "parameter": "{} after the update",
    "buffer": "the buffer {} after the update",
    "graph output": "the output of {}",
    "read": "the tensor whose value {} reads",
}
PLURALS = {
    "initial": "initial parameters",
    "input": "inputs",
    "output": "outputs of modules",
    "matmul": "matmuls",
    "to_global": "results of to_global",
    "loss": "losses",
    "gradient of an output": "gradients of outputs",
    "gradient": "gradients of parameters",
    "norm": "norms of gradients",
    "gradient at the update": "gradients at the update",
    "parameter": "parameters after an update",
    "buffer": "buffers",
    "graph output": "outputs of graphs",
    "read": "values read",
}
COPIES = "docs/silently-wrong.md#every-rank-reads-every-sample"
NEW_PARAMETERS = "docs/your-model.md#the-rules-and-why"
DROPPED = "docs/silently-wrong.md#from-local-to-b-the-values-of-the-other-ranks-are-lost"
PART = "docs/silently-wrong.md#a-loss-from-to_local-is-only-this-ranks-part"


@dataclass
class Findings:
    """What was found. told_size: how many ranks the script was told that there are when it ran on one."""

    options: object  # the command line
    told_size: int
    comparison: object
    cause: Optional[str] = None
    wrong_entries: list = field(default_factory=list)  # lines
    suspicious: list = field(default_factory=list)  # lines on what is right in value
    not_seen: list = field(default_factory=list)  # lines on what this verify could not compare or use

    @property
    def differs(self):
        return bool(self.comparison.first or self.wrong_entries)

    def as_dict(self):
        first = self.comparison.first
        return {
            "agrees": not self.differs,
            "ranks": self.options.nproc_per_node,
            "told_on_one_rank": self.told_size,
            "steps": self.comparison.steps,
            "agreeing": len(self.comparison.agreeing),
            "differing": len(self.comparison.differing),
            "not_compared": len(self.comparison.skipped),
            "few_elements_differ": self.comparison.kinks,
            "wrong_entries": self.wrong_entries,
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
        lines += self.wrong_entries
        if compared.first:
            lines += self.lines_of_first(compared.first)
        else:
            all_values = "all other values" if compared.skipped else "all values"
            lines.append(f"{all_values} agree" if not self.wrong_entries else f"apart from that, {all_values} agree")
        if compared.skipped:
            words = "values that one rank computes in a different number or shape"
            count, first = len(compared.skipped), compared.skipped[0]
            lines.append(f"not compared: {count} {words}; the first is {name_of(first)}, {at(first.place)}")
        if compared.kinks:
            words = "only a few elements differ, as when rounding moves an input of ReLU across 0"
            lines.append(f"in {compared.kinks} values {words}: after that, less than 1 % is no difference")
        if self.told_size > 1:
            words = f"on one rank the script was told that there are {self.told_size}"
            lines.append(f"not noticed: a factor of {self.told_size} too many or too few, as {words}")
        return "\n".join([*lines, *self.not_seen, *dict.fromkeys(self.suspicious)])

    def lines_of_first(self, first):
        value, agreeing = first.value, self.comparison.agreeing
        shape = f" {value.shape}" if value.shape else ""
        what = f"{name_of(first.key)}{shape}, {at(first.key.place)}"
        lines = [f"first difference: step {value.step}, {what}"]
        lines.append(
            f"  {how_large(first, self.options.nproc_per_node)}; {value.layout.sbp} on ranks {value.layout.ranks}"
        )
        if self.cause:
            lines.append(f"  likely: {self.cause}")
        counts = {kind: sum(key.kind == kind for key in agreeing) for kind in PLURALS}
        words = ", ".join(f"{PLURALS[kind]} {count}" for kind, count in counts.items() if count)
        lines.append(f"before it {len(agreeing)} values agree" + (f": {words}" if words else ""))
        return lines


def name_of(key):
    return NAMES[key.kind].format(key.name)


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
            largest = np.abs(first.alone[np.isfinite(first.alone)]).max(initial=0) if first.alone.size else 0
            words = f"it differs by {first.error:.3g}, where the largest number is {float(largest):.3g}"
    if not first.rounding:
        return words
    times = first.error / first.rounding * MARGIN
    return f"{words}, {'over 1,000' if times > 1000 else f'{times:.0f}'} times what rounding does"


def ratio_of(first):
    """The number by which the value is that of one rank, None if there is none."""
    alone, parallel = first.alone.astype(np.float64), first.parallel.astype(np.float64)
    square = float((alone * alone).sum())
    if not np.isfinite(square) or square == 0 or not np.isfinite(parallel).all():
        return None
    ratio = float((alone * parallel).sum()) / square
    return ratio if np.abs(parallel - ratio * alone).max(initial=0) <= first.rounding * max(1, abs(ratio)) else None


def missing_gradients(parallel, alone, other):
    """A line for parameters that get a gradient in one of two runs only. other: what runs on one rank."""
    lines, n_ranks = [], f"on {parallel.world_size} ranks"
    for run, reference, here, there in ((parallel, alone, n_ranks, other), (alone, parallel, other, n_ranks)):
        with_gradient = names_of_kind(run, "gradient")
        if with_gradient:  # a graph with micro-batches gives none
            names = names_of_kind(reference, "gradient") - with_gradient
            names = [name for name in names_of_kind(run, "initial", "parameter") if name in names]
            if names:
                lines.append(f"wrong: no gradient {here}, but one {there}: {shortened(names)}")
    return lines


def names_of_kind(run, *kinds):
    """The names of a run's values of these kinds, in order, as the keys of a dict."""
    return dict.fromkeys(key.name for key in run.keys if key.kind in kinds).keys()


def local_parameters(parallel):
    """A line for parameters that are local, and so diverge."""
    names = diverging(parallel)
    words = "is local, not global, so its gradient is not reduced, and the copies of the ranks differ after an update"
    return [f"wrong: {shortened(names)} {words} ({DROPPED})"] if names else []


def no_updates(parallel):
    """A line if the script computes gradients, and verify sees no update by them."""
    kinds = {key.kind for key in parallel.keys}
    if not kinds & {"loss", "gradient", "gradient from grad"} or "parameter" in kinds:
        return []
    words = "no parameter of a module or variable has changed between backward and the next forward"
    return [f"no training step was seen, so no updates are compared and --steps ends nothing: {words}"]


def unused_runs(others, again_raised=None):
    """A line if a run that measures rounding, or the second one on n ranks, ended with an exception."""
    raised = [facts["raised"] for run in others for facts in run.facts if facts["raised"]]
    lines = []
    if raised:
        words = f"{len(raised)} of {len(others)} runs with changed last bits raised an exception"
        lines.append(f"rounding: {words} ({raised[0]}); of these only the values before it are used")
    if again_raised:
        lines.append(f"not checked: whether it differs from run to run, as a second run failed: {again_raised}")
    return lines


def wrong_entries(parallel, alone):
    """A line for each place where every rank passes the same to S, so that the tensor has it n times.

    Wrong is what changes from step to step, as a batch does, and what the script does not repeat on one rank.
    """
    lines, others, short = [], places_in(alone, "other_blocks"), places_in(alone, "short")
    for place, words, changes in passed_to_all(parallel):
        if place in others:
            lines.append(f"wrong: {words}; on one rank the script makes other numbers")
        elif place in short:
            lines.append(f"wrong: {words}; on one rank the script makes fewer rows than the rest of the batch has")
        elif changes:
            lines.append(f"wrong: {words}")
    return lines


def places_in(run, fact):
    """The places that all ranks of a run name under a fact."""
    return {place for facts in run.facts for place in facts[fact]}


def never_updated(parallel):
    """A line if the optimizer has other parameters than the model: the script trains nothing, on one rank too."""
    count = max(facts["never_updated"] for facts in parallel.facts)
    words = (
        f"no optimizer updates any of the model's {count} parameters: create it after to_global, which makes new ones"
    )
    return [f"wrong: {words} ({NEW_PARAMETERS})"] if count else []


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
            yield at(place), f"{at(place)}: {words} {len(layout.members)} times ({COPIES})", len(hashes) > 1


def is_same_on_all(passed):
    """Whether all ranks pass the same values, and not all one number. passed: what `digest` says, by rank."""
    return len({value_hash for _, value_hash, _ in passed}) == 1 and not any(constant for *_, constant in passed)


def other_parameters(alone):
    """A line for parameters that only one of two scripts has; of the same script there are none."""
    lines = []
    for key, words in (
        ("unknown", "only the script for one device has"),
        ("missing", "the script for one device lacks"),
    ):
        names = alone.facts[0].get(key, [])
        if names:
            lines.append(f"wrong: {words} parameters of these names and shapes: {shortened(names)}")
    return lines


def shortened(names):
    """The first names of a list."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def has_nan(array):
    return array is not None and array.dtype.kind == "f" and bool(np.isnan(array).any())


def suspicious(parallel, alone):
    """Lines on what is right in value, and may not be intended."""
    others, wrong = places_in(alone, "other_blocks"), places_in(alone, "other_blocks") | places_in(alone, "short")
    copies = list(passed_to_all(parallel))
    lines = {place: f"look at {words}" for place, words, changes in copies if not changes and place not in wrong}
    for place in others - {place for place, *_ in copies}:
        words = (
            "this local tensor has other numbers when the script runs on one rank; do they depend on other rows, or on "
            "the process, as the order of a set does?"
        )
        lines[place] = f"look at {place}: {words}"
    not_numbers = [
        key for key in parallel.keys if key.kind in ("loss", "graph output") and has_nan(parallel.whole(key))
    ]
    for key in not_numbers[:1]:
        lines["NaN"] = (
            f"look at {at(key.place)}: {name_of(key)} is NaN in step {parallel[key].step}, and NaN equals NaN here"
        )
    for key, passed in passed_by_ranks(parallel):
        if set(parallel[key].layout.axes) == {"B"} and len({digest for _, digest, _ in passed}) > 1:
            lines[key.place] = (
                f"look at {at(key.place)}: the ranks pass different values, and B takes those of rank 0 ({DROPPED})"
            )
    for place in places_in(parallel, "parts"):
        lines[place] = f"look at {place}: to_local() of a tensor in P is only this rank's part of the sum ({PART})"
    return list(lines.values())


def passed_by_ranks(parallel):
    """(key, [what digest says of the local tensor of each rank]) of each local tensor that becomes global."""
    for key in parallel.keys:
        values = [values[key] for values in parallel.by_rank if key in values]
        if (
            key.kind == "entry"
            and len(values) == parallel.world_size
            and all("local" in value.facts for value in values)
        ):
            members = parallel[key].layout.members
            yield key, [value.facts["local"] for rank, value in enumerate(values) if rank in members]
