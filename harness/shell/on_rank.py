"""What runs on each rank of the shell: statements, in a namespace that stays."""

import __future__

import ast
import builtins
import contextlib
import importlib
import io
import json
import keyword
import re
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import oneflow as flow

from harness.measure.calls import watching
from harness.measure.steps import Tensor
from harness.measure.tensors import layout_of
from harness.report.terminal import held_in_words, shape_in_words
from harness.shell import SHELL, remember
from harness.shell.statement import Statement
from harness.start import recipe
from harness.start.errors import UsageError
from harness.start.isolation import Isolation

HARNESS = f"{recipe.HARNESS}/"
OF_ONEFLOW = re.compile(r'  File "/home/ci-user/.*\n.*\n')  # frames of its C++ code, in its messages
SMALL = 64  # elements of a shard whose values are shown
CHARACTERS, LINES = 100_000, 1_000  # that are shown of what one statement prints


class Output(io.TextIOBase):
    """Standard output and error: it writes what is printed to a file for the terminal, a JSON string for each print."""

    def __init__(self):
        self.file, self.part, self.characters, self.lines = None, "", 0, 0

    def begin(self, path):
        """Write to this file from now on."""
        if self.file:
            self.file.close()
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115
        self.part, self.characters, self.lines = "", CHARACTERS, LINES

    def write(self, text):
        self.part += text
        if text.endswith("\n") or len(self.part) > CHARACTERS:
            self.flush()
        return len(text)

    def flush(self):
        self.show(self.part)
        self.part = ""

    def show(self, text):
        """Show a text as one part: parts that are equal on all ranks are shown once."""
        if not text or not self.lines:
            return
        self.characters -= len(text)
        self.lines -= text.count("\n")
        if self.characters < 0 or self.lines <= 0:
            self.lines = 0
            text = f"{text[:CHARACTERS].rstrip()}\n(the rest of this statement's output is not shown)\n"
        self.file.write(json.dumps(text).encode() + b"\n")

    def writable(self):
        return True


class Namespace:
    """The module in which statements run, and what the shell knows of it."""

    def __init__(self):
        self.module = types.ModuleType("__main__")
        self.script = ""
        self.lines = []  # all that was typed, for tracebacks
        self.flags = 0  # of the __future__ imports that were typed
        self.statement = None  # the one that runs now, or ran last
        self.output = Output()
        self.watching = contextlib.ExitStack()
        self.isolation = None  # inside it, statements run


HERE = Namespace()


def ready():
    """Nothing: a call of it only starts the ranks."""


def begin(folder, script, arguments, module=None):
    """Make the rank ready, and run the script if there is one; returns what `run` returns.

    module: the script's name, if it is to be imported as `python -m` does.
    """
    sys.stdout = sys.stderr = HERE.output
    sys.displayhook = display
    HERE.watching.enter_context(watching(lambda call: HERE.statement.see(call)))  # as long as the rank lives
    HERE.isolation = Isolation([str(Path(script).parent) if script and not module else "", *sys.path[1:]])
    HERE.script = script or ""
    sys.argv = [script or "", *arguments]
    sys.dont_write_bytecode = True
    sys.modules["__main__"] = HERE.module
    HERE.output.begin(f"{folder}/{flow.env.get_rank()}")
    return guarded(lambda: script and load(script, module))


def load(script, module):
    """Run a script, whose __name__ is not "__main__" then, so that its main does not start; keep its names."""
    name = module or recipe.PREFIX + Path(script).stem
    try:
        importlib.import_module(module) if module else recipe.load(script)
    finally:
        loaded = sys.modules.get(name, HERE.module)
        loaded.__name__ = "__main__"
        HERE.module = sys.modules["__main__"] = loaded


def run(folder, source, first):
    """Run a statement, whose first line is line number `first` of what was typed.

    Returns {"error": None, or what it raised and where; "exit": the code if it called exit(); "sent": bytes}. What it
    prints goes to the file of this rank in the folder.
    """
    HERE.output.begin(f"{folder}/{flow.env.get_rank()}")
    HERE.lines[first - 1 :] = [""] * (first - 1 - len(HERE.lines)) + source.split("\n")
    remember(HERE.lines)
    return guarded(lambda: exec(compiled(source, first), vars(HERE.module)))


def compiled(source, first):
    tree = compile(source, SHELL, "single", HERE.flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    ast.increment_lineno(tree, first - 1)
    code = compile(tree, SHELL, "single", HERE.flags, dont_inherit=True)
    for name in __future__.all_feature_names:
        HERE.flags |= code.co_flags & getattr(__future__, name).compiler_flag
    return code


def guarded(function):
    """Call a function of the user's, and say how it ended."""
    HERE.statement, error, code = Statement(HERE.script), None, None
    try:
        with HERE.isolation:
            function()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if code and not isinstance(stop.code, int):
            HERE.output.write(f"{stop.code}\n")
    except UsageError as refusal:
        error = str(refusal)
        HERE.output.write(f"{error}\n")
    except BaseException as raised:
        sys.last_value = raised  # keeps its frames, and the graphs in them, alive
        lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(raised.__traceback__)]
        error = type(raised).__name__, tuple(line for line in lines if not line[0].startswith(HARNESS))
        HERE.output.show(traceback_of(raised))
    HERE.output.flush()
    with HERE.statement.pause():
        return {"error": error, "exit": code, "sent": HERE.statement.sent()}


def traceback_of(error):
    """The traceback as Python prints it, without our own frames."""
    told = traceback.TracebackException.from_exception(error)
    inside = told
    while inside:
        frames = [frame for frame in inside.stack if not frame.filename.startswith(HARNESS)]
        inside.stack = traceback.StackSummary.from_list(frames)
        inside = inside.__cause__ or inside.__context__
    return OF_ONEFLOW.sub("", "".join(told.format()))


def moved():
    """The bytes that left this rank in the last statement, and its steps. Collective."""
    with HERE.statement.pause():
        return {"sent": HERE.statement.settled(), **HERE.statement.facts(vars(HERE.module))}


def complete(text):
    """What the last name in a text may become, without running anything that could be collective."""
    head, dot, start = text.rpartition(".")
    names = vars(HERE.module)
    if dot:
        first, *rest = head.split(".")
        value = names.get(first, getattr(builtins, first, None))
        for name in rest:  # to ask a tensor for its attributes may move it
            value = None if isinstance(value, flow.Tensor) else getattr(value, name, None)
        words = [] if value is None else dir(value)
    else:
        words = [*names, *dir(builtins), *keyword.kwlist]
    hidden = not start.startswith("_")
    return sorted({head + dot + word for word in words if word.startswith(start) and not (hidden and word[0] == "_")})


def display(value):
    """Show the value of an expression, and keep it as `_`: of a global tensor what this rank holds of it."""
    if value is None:
        return
    builtins._ = value
    if not isinstance(value, flow.Tensor) or not value.is_global:
        HERE.output.write(f"{value!r}\n")
        return
    with HERE.statement.pause():
        HERE.output.flush()
        HERE.output.show(described(value))
        HERE.output.show(held(value))


def described(tensor):
    """The tensor's line that is the same on all ranks."""
    sbp, ranks = layout_of(tensor)
    sbp = f"({sbp})" if "," in sbp else sbp  # of a mesh
    dtype = str(tensor.dtype).split(".")[-1]
    needs = ", requires_grad" if tensor.requires_grad else ""
    return f"{shape_in_words(tuple(tensor.shape))} {dtype}, {sbp} on ranks {ranks}{needs}\n"


def held(tensor):
    """What this rank holds of it: where its block lies, and the block itself if it is small."""
    where, shape, rank = layout_of(tensor), tuple(tensor.shape), flow.env.get_rank()
    block = where.block(shape, rank)
    if block is None:
        return "nothing\n"
    words = held_in_words(Tensor("", shape, *where, {rank: block}), rank)
    shard = tensor.detach().to_local()
    if shard.numel() > SMALL:
        return f"{words}, {shard.numel():,} values: see to_local()\n"
    values = np.array2string(shard.numpy(), precision=4, suppress_small=True, separator=", ")
    return f"{words}\n{values}\n" if "\n" in values else f"{words}  {values}\n"
