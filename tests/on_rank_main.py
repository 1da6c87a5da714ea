"""The main of a recipe, on the ranks of a pool: what it prints and hands on, what it notices, and what it refuses."""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import os
import sys
import tempfile
import traceback

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.calls import replaced
from oneflow_cookbook.measure.entry import entry_of
from oneflow_cookbook.start import recipe

OFF = 2e-4  # of each number: just above what float32 needs, and below a tolerance that is 1,000 times too wide
NUMBERS = ("losses", "loaded")  # that a main may print


@dataclasses.dataclass
class Rehearsal:
    """One run of main. results: of an earlier run, which the recipe's function returns again; empty: it computes."""

    module: object
    arguments: list
    results: list = dataclasses.field(default_factory=list)
    changed: tuple = None  # (number of a call, number of the part of its result that is off, "scaled" or "zeros")

    def __post_init__(self):
        self.is_replay, self.calls, self.options = bool(self.results), [], None
        self.noticed = {}  # the line of each comparison of main -> whether it failed

    def run(self):
        """Run main; its exit code is 1 if it raised. Then `out` and `err` are what it printed."""
        module, out, err = self.module, io.StringIO(), io.StringIO()
        entry = entry_of(module)
        stand_ins = {
            (argparse.ArgumentParser, "parse_args"): self.parsing(argparse.ArgumentParser.parse_args),
            (module, entry.__name__): self.recording(entry, self.compute_or_replay),
            (sys, "argv"): [module.__file__, *self.arguments],
            (os, "kill"): lambda process, number: sys.exit(128 + number),  # ends main, and not the rank
        }
        for function in ("assert_allclose", "assert_array_equal"):
            stand_ins[np.testing, function] = self.comparing(getattr(np.testing, function))
        if hasattr(module, "placements"):
            stand_ins[module, "placements"] = self.recording(module.placements, lambda call: call())
        if hasattr(module, "HELD_OUT"):
            stand_ins[module, "HELD_OUT"] = 8  # sums that gpt.py answers, in place of 100
        self.code, self.error, self.stop = 0, None, None
        with replaced(stand_ins), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                module.main()
            except SystemExit as stop:
                self.code, self.stop = stop.code, stop
            except Exception as error:  # a replay may return what does not fit the options
                self.code, self.error = 1, error
        self.out, self.err = out.getvalue(), err.getvalue()
        return self

    def parsing(self, parse_args):
        def parsed(parser, *arguments):
            self.parser, self.options = parser, parse_args(parser, *arguments)
            return self.options

        return parsed

    def comparing(self, compare):
        """A comparison that does not end a replay: all ranks go on to the next one."""

        def compared(*arguments, **keywords):
            frame = sys._getframe(1)
            try:
                compare(*arguments, **keywords)
                failed = False
            except AssertionError:
                failed = True
                if not self.is_replay:
                    raise
            if frame.f_code.co_filename == self.module.__file__:
                self.noticed[frame.f_lineno] = self.noticed.get(frame.f_lineno, False) or failed

        return compared

    def recording(self, function, proceed):
        def call(*arguments, **keywords):
            bound = inspect.signature(function).bind(*arguments, **keywords)
            bound.apply_defaults()
            self.calls.append((function.__name__, {**bound.arguments}))
            return proceed(lambda: function(*arguments, **keywords))

        return call

    def compute_or_replay(self, call):
        number = sum(name in ("train", "run") for name, _ in self.calls) - 1
        if not self.is_replay:
            self.results.append(call())
            return self.results[-1]
        result = self.results[min(number, len(self.results) - 1)]
        if not self.changed or self.changed[0] != number:
            return result
        _, place, change = self.changed
        if not isinstance(result, tuple):
            return off(result, change)
        return tuple(off(part, change) if i == place else part for i, part in enumerate(result))


def off(value, change):
    """A part of a result whose numbers are off: those of the second half, so that they also differ from the first.

    scaled: by the factor 1 + OFF, integers by 1. zeros: what is zero is not, and the other way round.
    """
    if isinstance(value, dict):
        later = list(value)[len(value) // 2 :]
        return {key: off(item, change) if key in later else item for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not all(isinstance(item, (float, np.generic)) for item in value):
        return type(value)(off(item, change) for item in value)
    if isinstance(value, flow.nn.Module):
        return OffModule(value)
    is_tensor = isinstance(value, flow.Tensor)
    if not is_tensor and not isinstance(value, (int, float, list, tuple, np.ndarray, np.generic)):
        return value
    array = np.array(value.numpy() if is_tensor else value)
    half = array[len(array) // 2 :] if array.ndim else array.reshape(1)
    if change == "zeros":
        half[...] = half == 0
    else:
        half[...] = half * (1 + OFF) if array.dtype.kind == "f" else half + 1
    if not is_tensor:
        return list(array) if isinstance(value, (list, tuple)) else array
    if not value.is_global:
        return flow.tensor(array, device=value.device)
    everywhere = flow.tensor(array, placement=value.placement, sbp=[flow.sbp.broadcast] * len(value.sbp))
    return everywhere.to_global(sbp=value.sbp)


class OffModule:
    """A module whose outputs are off."""

    def __init__(self, module):
        self.__dict__["module"] = module

    def __call__(self, *arguments):
        return self.module(*arguments) * (1 + OFF)

    def __getattr__(self, name):
        return getattr(self.module, name)

    def __len__(self):
        return len(self.module)

    def __iter__(self):
        return iter(self.module)

    def __getitem__(self, key):
        return self.module[key]


def in_words(calls):
    """(name, {argument: value}) of calls of placements and of the recipe's function; of placements their ranks."""

    def word(value):
        if isinstance(value, flow.placement):
            return {"ranks": np.array(value.ranks).tolist()}
        if isinstance(value, (list, tuple)):
            return [word(item) for item in value]
        return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)

    described = []
    for name, arguments in calls:
        flat = {}
        for key, value in arguments.items():
            flat.update(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else {key: value})
        described.append((name, {key: word(value) for key, value in flat.items()}))
    return described


def names_of_results(module):
    """The names in the last line of `train` or `run`: `return model, losses`."""
    source = inspect.getsource(module)
    [function] = [node for node in ast.parse(source).body if getattr(node, "name", "") == entry_of(module).__name__]
    returned = function.body[-1].value
    return [ast.get_source_segment(source, node) for node in getattr(returned, "elts", [returned])]


def facts_of(module, result):
    """What main may print of a result: its losses, and of each tensor (name, shape here, shape, sum here)."""
    result = dict(zip(names_of_results(module), result if isinstance(result, tuple) else (result,)))
    tensors = dict(result)
    for value in result.values():
        tensors.update(value if isinstance(value, dict) else {})
        tensors.update(value.named_parameters() if isinstance(value, flow.nn.Module) else {})
    facts = {"tensors": [], **{name: result[name] for name in NUMBERS if name in result}}
    for name, tensor in tensors.items():
        if isinstance(tensor, flow.Tensor):
            local = tensor.to_local() if tensor.is_global else tensor
            total = float(local.numpy().sum()) if local.numel() else 0.0
            facts["tensors"].append((name, tuple(local.shape), tuple(tensor.shape), total))
    return facts


def rehearse(path, arguments=(), other_lines=()):
    """Run main; then again with what it had computed: with each part of a result off, and for each other line.

    other_lines: further command lines; None: one that changes every option.

    Returns {"code", "out", "err"; "calls": of `in_words`; "facts": of each result; "noticed": {(line of a comparison,
    change): whether it failed for a part of a result}; "lines": [(line, options, exit code, calls) of the other lines];
    "defaults", "helps": of each option}.
    """
    module = recipe.load(path)
    first = Rehearsal(module, list(arguments)).run()
    report = {"code": first.code, "out": first.out, "err": first.err, "calls": in_words(first.calls)}
    if first.error:
        report["err"] += "".join(traceback.format_exception_only(type(first.error), first.error))
    if report["err"] or first.code:
        return report
    report["facts"] = [facts_of(module, result) for result in first.results]
    report["noticed"] = noticed = {(line, change): False for line in first.noticed for change in ("scaled", "zeros")}
    for number, result in enumerate(first.results):
        for place in range(len(result) if isinstance(result, tuple) else 1):
            for change in ("scaled", "zeros"):
                again = Rehearsal(module, list(arguments), first.results, (number, place, change)).run()
                for line, failed in again.noticed.items():
                    noticed[line, change] = noticed.get((line, change), False) or failed
    actions = [action for action in first.parser._actions if action.dest != "help"] if first.options else []
    report["lines"] = []
    for line in [all_changed(actions)] if other_lines is None else other_lines:
        with tempfile.TemporaryDirectory() as folder:
            words = line.replace("FOLDER", folder).split()
            again = Rehearsal(module, [*arguments, *words], first.results).run()
        report["lines"].append((line, vars(again.options) if again.options else {}, again.code, in_words(again.calls)))
    report["defaults"] = {action.dest: action.default for action in actions}
    report["helps"] = {action.dest: action.help or "" for action in actions}
    return report


def all_changed(actions):
    """A command line in which each option but --device has another value than by default."""
    words = []
    for action in actions:
        if action.const is True:
            words.append(action.option_strings[0])
        elif action.dest != "device":
            choices = [choice for choice in action.choices or () if choice != action.default]
            if action.type is int:
                choices.append((action.default or 0) + 1)
            words += [action.option_strings[0], str([*choices, 0.5 if action.type is float else "FOLDER"][0])]
    return " ".join(words)


def refused(path, arguments=None, expression=None):
    """The lines of a recipe that refuse what main gets, or what an expression of its names does; and the words.

    Main must not compute before. The lines are those of `raise` and of `parser.error`. The words must be the recipe's
    own, and not those of numpy or OneFlow; those of the operating system name the file.
    """
    module, lines, words = recipe.load(path), [], []

    def error(parser, message):
        lines.append(sys._getframe(1).f_lineno)
        words.append(message)
        sys.exit(2)

    def computed(call):
        raise AssertionError("main computes with what it must refuse")

    rehearsal = Rehearsal(module, list(arguments or []))
    rehearsal.compute_or_replay = computed
    with replaced({(argparse.ArgumentParser, "error"): error}):
        try:
            if expression:
                eval(expression, dict(vars(module)))
                raise AssertionError("it is not refused")
            if rehearsal.run().error:
                raise rehearsal.error
            stop = rehearsal.stop
        except (ValueError, RuntimeError) as refusal:
            stop = refusal
            words.append(str(refusal))
    while stop:
        last = traceback.extract_tb(stop.__traceback__)[-1]
        if isinstance(stop, ValueError) and str(stop) == words[0] and not last.line.startswith("raise "):
            raise AssertionError(f"main prints the words of another library: {stop}")
        for frame in traceback.extract_tb(stop.__traceback__):
            if frame.filename == module.__file__ and frame.line.startswith("raise "):
                lines.append(frame.lineno)
        stop = stop.__context__
    return sorted(set(lines)), words
