"""Run a script on this rank and record what it did, for `launch.sh show` and `bytes`."""

import argparse
import importlib
import os
import runpy
import sys
from pathlib import Path

from oneflow_cookbook.measure.calls import replaced
from oneflow_cookbook.measure.entry import call_entry
from oneflow_cookbook.measure.events import UNNAMED
from oneflow_cookbook.measure.graph import boxings_of
from oneflow_cookbook.measure.sent import growth, quiet
from oneflow_cookbook.measure.trace import Trace
from oneflow_cookbook.start import recipe
from oneflow_cookbook.start.errors import UsageError


def measure_script(path, keywords=None, argv=(), module=None):
    """Record a script, which run_script runs with these arguments. Collective.

    Returns {"tensors": [the global tensors, with names], "names": {id: name}, "events", "updates": those of a Trace,
    "outside": bytes that this rank sent outside of events}, or {"refusal": why} if a rank would hold nothing of a
    tensor or the script does not know its arguments.
    """
    trace, before = Trace(path=str(path)), quiet()
    try:
        with trace.recording():
            run_script(path, keywords, argv, module)
    except UsageError as refusal:
        return {"refusal": str(refusal)}
    sent = growth(before, quiet())
    compiled = {}
    for event in trace.of_kind("graph"):
        graph = event.facts.pop("graph")
        if graph not in compiled:
            compiled[graph] = boxings_of(graph)
        event.facts["boxings"] = compiled[graph]
    names = trace.names.all()
    return {
        "tensors": shown_tensors(trace, names),
        "names": names,
        "events": trace.events,
        "updates": trace.updates,
        "outside": max(0, sent - sum(event.sent * event.times for event in trace.events)),
    }


def run_script(path, keywords=None, argv=(), module=None):
    """Call `train` or `run` of the script at `path` with these keywords; None: run `python path *argv`. Collective.

    module: the script's name, if it is to be run as `python -m` does.
    """
    sys.path.insert(0, os.getcwd() if module else str(Path(path).parent))
    if keywords is None:
        run_as_main(path, argv, module)
    else:
        try:
            call_entry(importlib.import_module(module) if module else recipe.load(path), keywords)
        except ValueError as error:
            if module or recipe.RECIPES not in Path(path).resolve().parents:
                raise
            raise UsageError(f"{Path(path).name}: {error}") from None  # a recipe refuses sizes in this way


def run_as_main(path, argv, module=None):
    """Run a script as `python path *argv` does, or `python -m module *argv`.

    Raises UsageError if its argparse does not know these arguments, RuntimeError if it exits with an error.
    """

    def refuse(parser, message):
        raise UsageError(f"{Path(path).name}: {message}")

    with replaced({(sys, "argv"): [path, *argv], (argparse.ArgumentParser, "error"): refuse}):
        try:
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"the script called sys.exit({stop.code!r})") from None


def shown_tensors(trace, names):
    """The global tensors of steps, modules and variables as tensors.describe gives them, with "name" and "after".

    "after" is the number of events before the tensor appeared.
    """
    in_steps = {
        tensor["id"]
        for event in trace.events
        for tensor in event.inputs + event.outputs
        if not event.layer or tensor["id"] in names  # leaves out what a layer makes of its weights
    }
    shown = in_steps | trace.names.shown
    tensors = [tensor for number, tensor in trace.names.described.items() if number in shown]
    return [{**tensor, "name": names.get(tensor["id"], UNNAMED)} for tensor in tensors if tensor["sbp"] != "local"]
