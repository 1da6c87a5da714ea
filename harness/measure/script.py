"""Run a script on this rank and record what it did, for `launch.sh show`, `bytes` and the pictures of the docs."""

import argparse
import runpy
import sys
from pathlib import Path

import oneflow as flow

from harness.measure.graph import boxings_of
from harness.measure.calls import replaced
from harness.measure.entry import call_entry
from harness.measure.sent import sent_by
from harness.measure.tensors import describe
from harness.measure.trace import Trace
from harness.start import recipe
from harness.start.errors import UsageError


def measure_script(path, keywords=None, argv=()):
    """Call `train` or `run` of the script at `path` with these keywords; without any, run all of it as `python path *argv`.

    Collective. Returns {"tensors": those that `run` returned by name, else those that were seen, each with its name,
    "returned": which of the two, "names": {id: name}, "steps": see trace.py, "outside": bytes that this rank sent
    besides}, or {"refusal": why} if a rank would hold nothing of a tensor or the script does not know its arguments.
    """
    trace = Trace(path)

    def run():
        return run_as_main(path, argv) if keywords is None else call_entry(recipe.load(path), keywords)

    try:
        with replaced({(sys, "path"): [str(Path(path).parent), *sys.path]}), trace.recording():
            result, sent = sent_by(run)
    except UsageError as refusal:
        return {"refusal": str(refusal)}
    for step in trace.steps:
        if "graph" in step:
            step["boxings"] = boxings_of(step.pop("graph"))
    by_name = isinstance(result, dict) and all(isinstance(tensor, flow.Tensor) for tensor in result.values())
    returned = result if by_name else {}
    names, tensors = named_tensors(trace, returned)
    return {
        "tensors": tensors,
        "returned": bool(returned),
        "names": names,
        "steps": trace.steps,
        "outside": max(0, sent - sum(step["sent"] * step["times"] for step in trace.steps)),
    }


def run_as_main(path, argv):
    """Run a script as `python path *argv` does. Raises UsageError if it does not know these arguments."""

    def refuse(parser, message):
        raise UsageError(f"{Path(path).name}: {message}")

    with replaced({(sys, "argv"): [path, *argv], (argparse.ArgumentParser, "error"): refuse}):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"the script called sys.exit({stop.code!r})") from None


def named_tensors(trace, returned):
    """({id: name}, the tensors to draw, each with its name and "after": the number of steps before it)."""
    names, described, end = trace.names.all(), trace.names.described, len(trace.steps)
    if not returned:
        shown = {one["id"] for step in trace.steps for one in step["inputs"] + step["outputs"]} | trace.names.shown
        seen = [one for number, one in described.items() if number in shown and one["sbp"] != "local"]
        return names, [{**one, "name": names.get(one["id"], "·")} for one in seen]
    tensors, own = [], {}
    for name, tensor in returned.items():
        number, trained = id(tensor), name.startswith("new ")  # the trained tensor is the one from before the training
        after = described[number]["after"] if number in described and not trained else end
        if number in own:  # one tensor with two names: moved to where it was already
            after = max([after, *(k for k, step in enumerate(trace.steps, 1) if is_output(number, step))])
        if not (trained and number in names):  # before the training, its path is its name
            own.setdefault(number, name)
        tensors.append({**describe(tensor), "name": name, "after": after})
    return {**names, **own}, tensors


def is_output(number, step):
    return number in [one["id"] for one in step["outputs"]]
