"""What the main of a recipe does with what its `train` or `run` returns; it runs on the ranks of a pool."""

import argparse
import ast
import builtins
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

OFF = 2e-4  # of the largest number: just above what float32 needs, and below a tolerance that is 1,000 times too wide

FEW = 3  # steps, where a main trains for 20
NUMBERS = ("losses", "loaded", "balance_losses", "loads", "dropped")  # that a main may print


class FakePlacement:
    """In place of flow.placement: takes GPUs that are not there, and remembers which device each placement was for."""

    def __init__(self):
        self.devices = []  # (placement, its device)

    def __call__(self, device, ranks):
        return self._keep(flow.placement("cpu", ranks), device)

    def all(self, device):
        return self._keep(flow.placement.all("cpu"), device)

    def _keep(self, ranks, device):
        self.devices.append((ranks, device))
        return ranks

    def device_of(self, ranks):
        return next((device for known, device in self.devices if known is ranks), ranks.type)


class FakeFlow:
    """In place of the module oneflow in a recipe: what main makes on a GPU is made on the CPU."""

    def __init__(self):
        self.placement = FakePlacement()

    def tensor(self, *arguments, **keywords):
        return flow.tensor(*arguments, **{**keywords, **({"device": "cpu"} if "device" in keywords else {})})

    def __getattr__(self, name):
        return getattr(flow, name)


def killed(process, number):
    """In place of os.kill: ends main, and not the rank."""
    sys.exit(128 + number)


@dataclasses.dataclass
class Rehearsal:
    """One run of main. results: what each call of the entry returned, to be returned again; empty: the entry runs."""

    module: object
    arguments: list
    results: list = dataclasses.field(default_factory=list)
    replay: bool = False
    change: tuple = None  # (number of a call, path of a part of its result, what is done to it)

    def __post_init__(self):
        self.calls, self.options, self.hooked, self.printing = [], None, False, set()  # the lines of main that print
        self.lines = []  # of main, one for each call
        self.fake = FakeFlow()

    def run(self):
        """Run main; its exit code is 1 if it raised. Then `out` and `err` are what it printed."""
        module, out, err = self.module, io.StringIO(), io.StringIO()
        entry, parse_args = entry_of(module), argparse.ArgumentParser.parse_args

        def parsed(parser, *arguments):
            self.parser, self.options = parser, parse_args(parser, *arguments)
            return self.options

        def printed(*arguments, **keywords):
            frame = sys._getframe(1)
            if frame.f_code.co_filename == module.__file__:
                self.printing.add(frame.f_lineno)
            print_of_python(*arguments, **keywords)

        print_of_python = print
        changed = {
            (builtins, "print"): printed,
            (argparse.ArgumentParser, "parse_args"): parsed,
            (module, entry.__name__): self.recording(entry, self.entry_call),
            (module, "flow"): self.fake,
            (sys, "argv"): [module.__file__, *self.arguments],
            (os, "kill"): killed,
        }
        if hasattr(module, "placements"):
            changed[module, "placements"] = self.recording(module.placements, lambda call: call())
        if hasattr(module, "HELD_OUT"):
            changed[module, "HELD_OUT"] = 8  # sums that gpt.py answers, in place of 100
        self.code, self.error, self.stop = 0, None, None
        with replaced(changed), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                module.main()
            except SystemExit as stop:
                self.code, self.stop = stop.code, stop
            except Exception as error:  # a replay may return what does not fit the options
                self.code, self.error = 1, error
        self.out, self.err = out.getvalue(), err.getvalue()
        return self

    def recording(self, function, proceed):
        def call(*arguments, **keywords):
            parameters = inspect.signature(function).parameters
            if "steps" in parameters and parameters["steps"].default == 20:
                keywords.setdefault("steps", FEW)
            bound = inspect.signature(function).bind(*arguments, **keywords)
            bound.apply_defaults()
            self.calls.append((function.__name__, {**bound.arguments}))
            self.lines.append(sys._getframe(1).f_lineno)
            return proceed(lambda: function(*arguments, **keywords))

        return call

    def entry_call(self, call):
        number = sum(name in ("train", "run") for name, _ in self.calls) - 1
        if not self.replay:
            self.results.append(call())
            return self.results[-1]
        result = self.results[min(number, len(self.results) - 1)]
        if self.change and self.change[0] == number:
            return self.with_change(result, self.change[1])
        return result

    def with_change(self, value, path):
        if not path:
            return self.off(value, self.change[2])
        key, *rest = path
        if isinstance(value, dict):
            return {**value, key: self.with_change(value[key], rest)}
        return type(value)(self.with_change(item, rest) if i == key else item for i, item in enumerate(value))

    def off(self, value, where):
        """A value that is off by a little, everywhere or in its last element; a module with such outputs."""
        if isinstance(value, flow.nn.Module):
            return OffModule(value, where, self)
        array = value.numpy() if isinstance(value, flow.Tensor) else np.asarray(value)
        delta = np.zeros_like(array)
        step = OFF * np.abs(array).max() if array.dtype.kind == "f" else 1
        delta.reshape(-1)[slice(-1, None) if where == "last" else slice(None)] = step
        if where == "scaled":
            delta = OFF * array
        if where == "zeros":  # of the second half: what was zero is not, and the other way round
            delta[len(array) // 2 :] = (array == 0)[len(array) // 2 :] - array[len(array) // 2 :]
        if not isinstance(value, flow.Tensor):
            return type(value)(array + delta) if isinstance(value, float) else array + delta
        if not value.is_global:
            return flow.tensor(array + delta, device=value.device)
        whole = [flow.sbp.broadcast] * len(value.sbp)
        return value.detach() + flow.tensor(delta, placement=value.placement, sbp=whole).to_global(sbp=value.sbp)


class OffModule:
    """A module whose outputs are off."""

    def __init__(self, module, where, rehearsal):
        self.__dict__.update(module=module, where=where, rehearsal=rehearsal)

    def __call__(self, *arguments):
        self.rehearsal.hooked = True
        out = self.module(*arguments)
        return out * (1 + OFF) if self.where == "scaled" else out + OFF

    def __getattr__(self, name):
        return getattr(self.module, name)

    def __len__(self):
        return len(self.module)

    def __iter__(self):
        return iter(self.module)

    def __getitem__(self, key):
        return self.module[key]


def parts(value, path=()):
    """Yields (path, how it is changed) of the tensors, arrays, numbers and modules in a result.

    Of a list they are the first and the last, of a dict also the one in the middle.
    """
    if isinstance(value, dict):
        keys = list(value)
        for i in sorted({0, len(keys) // 2, len(keys) - 1}):
            yield from parts(value[keys[i]], (*path, keys[i]))
    elif isinstance(value, (tuple, list)):
        for i in range(len(value)) if not path else sorted({0, len(value) - 1}):
            yield from parts(value[i], (*path, i))
    elif isinstance(value, flow.nn.Module):
        yield from ((path, "scaled"), (path, "shifted"))
    elif isinstance(value, (float, int)):
        yield path, "last"
    elif isinstance(value, (flow.Tensor, np.ndarray, np.generic)):
        array = value.numpy() if isinstance(value, flow.Tensor) else np.asarray(value)
        if array.dtype.kind != "f":
            yield path, "all"  # the last one may be an address
        elif array.ndim == 0:
            yield path, "last"
        else:
            yield from ((path, "last"), (path, "scaled"))
            if 0.2 < (array == 0).mean() < 0.8:
                yield path, "zeros"


def names_of_results(module):
    """The names in the last line of `train` or `run`: `return model, losses`."""
    entry = entry_of(module)
    source = inspect.getsource(module)
    [function] = [node for node in ast.parse(source).body if getattr(node, "name", "") == entry.__name__]
    returned = function.body[-1].value
    return [ast.get_source_segment(source, node) for node in getattr(returned, "elts", [returned])]


def in_words(rehearsal):
    """The calls of placements and of the entry: (name, {argument: value}), with the ranks and devices of placements."""
    placement = rehearsal.fake.placement

    def word(value):
        if isinstance(value, flow.placement):
            return {"device": placement.device_of(value), "ranks": np.array(value.ranks).tolist()}
        if isinstance(value, (list, tuple)):
            return [word(item) for item in value]
        return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)

    calls = []
    for name, arguments in rehearsal.calls:
        flat = {}
        for key, value in arguments.items():
            flat.update(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else {key: value})
        calls.append((name, {key: word(value) for key, value in flat.items()}))
    return calls


def facts_of(module, result):
    """What main may print of a result: its losses, and of each tensor (name, shape here, shape, sum here)."""
    result = dict(zip(names_of_results(module), result if isinstance(result, tuple) else (result,)))
    tensors = dict(result)
    for value in result.values():
        tensors.update(value if isinstance(value, dict) else {})
        tensors.update(value.named_parameters() if isinstance(value, flow.nn.Module) else {})
    facts = {
        "tensors": [],
        **{name: result[name] for name in NUMBERS if name in result},
    }
    for name, tensor in tensors.items():
        if isinstance(tensor, flow.Tensor):
            local = tensor.to_local() if tensor.is_global else tensor
            total = float(local.numpy().sum()) if local.numel() else 0.0
            facts["tensors"].append((name, tuple(local.shape), tuple(tensor.shape), total))
    return facts


def report_of(rehearsal):
    """What the run printed and did."""
    error = rehearsal.err or (repr(rehearsal.error) if rehearsal.error else "")
    facts = [facts_of(rehearsal.module, result) for result in rehearsal.results]
    report = {"code": rehearsal.code, "out": rehearsal.out, "err": error, "calls": in_words(rehearsal), "facts": facts}
    return {**report, "printing": rehearsal.printing}


def rehearse(path, arguments=(), values=None, options=True):
    """Run main; then again with what the entry returned, once for each part of it that is off, and for each option.

    values: {name of an option: values for it}; others are made from its kind. options: whether to try them.
    Returns what `report_of` says of the first run, and
    changing: the lines that main prints the second time alone, with the same results;
    unnoticed: the parts whose change main does not notice, as (number of the call, name, how it is changed);
    defaults: {option: what main takes without it}; helps: {option: its help};
    options: {option: [(value, exit code, its calls)]};
    elsewhere: (an option that makes main call the entry from another line, option, value, the calls there).
    """
    module = recipe.load(path)
    first = Rehearsal(module, list(arguments)).run()
    report = report_of(first)
    if first.code:
        return report
    names, unnoticed = names_of_results(module), []
    for number, result in enumerate(first.results):
        result = result if isinstance(result, tuple) else (result,)
        for part, how in parts(result):
            again = Rehearsal(module, list(arguments), first.results, True, (number, part, how)).run()
            is_module = isinstance(at(result, part), flow.nn.Module)
            failed = isinstance(again.error, (AssertionError, IndexError))
            if not failed and (again.hooked or not is_module):
                unnoticed.append((number, ".".join(map(str, (names[part[0]], *part[1:]))), how))
    report["unnoticed"] = unnoticed
    again = Rehearsal(module, list(arguments), first.results, True).run()
    report["changing"] = sorted(set(again.out.splitlines()) - set(first.out.splitlines()))
    if options and first.options is not None:
        report.update(options_of(first, values or {}))
    return report


def at(value, path):
    for key in path:
        value = value[key]
    return value


def options_of(first, values):
    """What becomes of other values of each option of main, and of those with an option that makes it call elsewhere."""
    report = {"defaults": {}, "helps": {}, "options": {}, "elsewhere": []}
    actions, further = [action for action in first.parser._actions if action.dest != "help"], []
    for action in actions:
        report["defaults"][action.dest], report["helps"][action.dest] = action.default, action.help or ""
        report["options"][action.dest] = []
        for value, must in candidates(action, values):
            words = words_of(action, value)
            again, accepted = with_words(first, words)
            if accepted or must:
                value = getattr(again.options, action.dest, value)
                report["options"][action.dest].append((value, again.code, in_words(again)))
            if accepted and set(again.lines) - set(first.lines):
                further.append((action, words))
            if accepted and not must:
                break
    for reaching, words in further:
        for action in actions:
            for value, _ in candidates(action, values) if action is not reaching else ():
                again, accepted = with_words(first, [*words, *words_of(action, value)])
                if accepted:
                    calls = [call for call, line in zip(in_words(again), again.lines) if line not in first.lines]
                    parsed = getattr(again.options, action.dest)
                    report["elsewhere"].append((reaching.dest, action.dest, parsed, calls))
    return report


def words_of(action, value):
    """An option and its value, as they are typed."""
    return [action.option_strings[0], *([] if value is True else [str(value)])]


def with_words(first, words):
    """Run main again with more words, and with --graph if it refuses them without; and whether it takes them."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("FOLDER", folder) for word in words]
        for more in ([], ["--graph"]):  # some are for a graph alone
            again = Rehearsal(first.module, [*first.arguments, *words, *more], first.results, True).run()
            accepted = again.options is not None and again.code != 2
            if accepted:
                break
    return again, accepted


def candidates(action, values):
    """Yields (value of an option, whether main must take it); of those that it need not take, the first one counts."""
    if action.dest in values:
        yield from ((value, True) for value in values[action.dest])
    elif action.choices:
        yield from ((value, True) for value in action.choices if value != action.default)
    elif action.const is True:
        yield True, True
    elif action.type is int:
        yield from ((value, False) for value in (2 * action.default, action.default + 1, 2) if value != action.default)
    elif action.type is float:
        yield 0.5, True
    else:
        yield "FOLDER", True


def played(path, arguments=()):
    """Run main once: what `report_of` says of it."""
    return report_of(Rehearsal(recipe.load(path), list(arguments)).run())


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
    rehearsal.entry_call = computed
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
