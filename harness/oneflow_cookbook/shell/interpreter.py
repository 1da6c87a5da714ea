"""Runs the statements of the shell on each rank, in a namespace that stays. A Session calls these functions."""

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

from oneflow_cookbook.measure.calls import watching
from oneflow_cookbook.measure.steps import Tensor
from oneflow_cookbook.measure.tensors import layout_of
from oneflow_cookbook.report.drawing import held_in_words, shape_in_words
from oneflow_cookbook.shell import SHELL, remember
from oneflow_cookbook.shell.statement import Statement
from oneflow_cookbook.start import recipe
from oneflow_cookbook.start.errors import UsageError

HARNESS = f"{recipe.HARNESS}/"
CPP_FRAMES = re.compile(r'  File "/home/ci-user/.*\n.*\n')  # of OneFlow's C++ code, in its messages
SMALL = 64  # elements: of shards up to this size, the values are shown
CHARACTERS, LINES = 100_000, 1_000  # shown of the output of a statement, at most


class Printed(io.TextIOBase):
    """Standard output and error: writes each print as a JSON string to a file, which the shell's process reads."""

    def __init__(self):
        self.file = None
        self.part = ""  # printed, but not yet in the file
        self.characters = self.lines = 0  # that may still be shown

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
        """Write a text as one part; the screen shows a part that is equal on all ranks once."""
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
    """The module in which statements run, and the state of the shell on this rank."""

    def __init__(self):
        self.module = types.ModuleType("__main__")
        self.script = ""
        self.lines = []  # all that was typed, for tracebacks
        self.flags = 0  # compiler flags of the __future__ imports that were typed
        self.statement = None  # the Statement that runs now, or ran last
        self.output = Printed()
        self.watching = contextlib.ExitStack()
        self.path = []  # sys.path of the statements


HERE = Namespace()


def ready():
    """Does nothing; the first call on a pool starts the ranks."""


def begin(folder, script, arguments, module=None):
    """Prepare the rank, and run the script if there is one; returns the same as `run`.

    folder: as in `run`. script: its path, or None. module: its name, if it is to be imported as `python -m` does.
    """
    sys.stdout = sys.stderr = HERE.output
    sys.displayhook = display
    HERE.watching.enter_context(watching(lambda call: HERE.statement.see(call)))  # as long as the rank lives
    HERE.path = [str(Path(script).parent) if script and not module else "", *sys.path]
    HERE.script = script or ""
    sys.argv = [script or "", *arguments]
    sys.dont_write_bytecode = True
    sys.modules["__main__"] = HERE.module
    HERE.output.begin(f"{folder}/{flow.env.get_rank()}")
    return guarded(lambda: script and load(script, module))


def load(script, module):
    """Import a script, so that its __name__ is not "__main__" and its main does not start; keep its names."""
    name = module or Path(script).stem
    try:
        importlib.import_module(module) if module else recipe.load(script)
    finally:
        loaded = sys.modules.get(name, HERE.module)
        loaded.__name__ = "__main__"
        HERE.module = sys.modules["__main__"] = loaded


def run(folder, source, first):
    """Run a statement, whose first line is line number `first` of all that was typed.

    Returns {"error": None, or what it raised and where; "exit": the code if it called exit(), else None; "sent": bytes
    from this rank}. Its output goes to the file of this rank in the folder.
    """
    HERE.output.begin(f"{folder}/{flow.env.get_rank()}")
    HERE.lines[first - 1 :] = [""] * (first - 1 - len(HERE.lines)) + source.split("\n")
    remember(HERE.lines)
    return guarded(lambda: exec(compiled(source, first), vars(HERE.module)))


def compiled(source, first):
    """The code of a statement, with the line numbers of all that was typed and the __future__ imports so far."""
    tree = compile(source, SHELL, "single", HERE.flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    ast.increment_lineno(tree, first - 1)
    code = compile(tree, SHELL, "single", HERE.flags, dont_inherit=True)
    for name in __future__.all_feature_names:
        HERE.flags |= code.co_flags & getattr(__future__, name).compiler_flag
    return code


def guarded(function):
    """Call a function that runs the user's code; returns the same as `run`."""
    HERE.statement = Statement(HERE.script)
    error = code = None
    try:
        sys.path[:] = HERE.path
        function()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            code = stop.code or 0
        else:  # as in exit("message")
            code = 1
            HERE.output.write(f"{stop.code}\n")
    except UsageError as refusal:
        error = str(refusal)
        HERE.output.write(f"{error}\n")
    except BaseException as raised:
        sys.last_value = raised  # keeps its frames, and the graphs in them, alive
        frames = [frame for frame in traceback.extract_tb(raised.__traceback__) if not is_ours(frame)]
        error = type(raised).__name__, tuple((frame.filename, frame.lineno) for frame in frames)
        HERE.output.show(traceback_of(raised))
    HERE.path = list(sys.path)  # a statement may have added to it
    HERE.output.flush()
    with HERE.statement.pause():
        return {"error": error, "exit": code, "sent": HERE.statement.sent()}


def is_ours(frame):
    """Whether a frame of a traceback is one of the harness."""
    return frame.filename.startswith(HARNESS)


def traceback_of(error):
    """The traceback as Python prints it, without frames of the harness."""
    report = traceback.TracebackException.from_exception(error)
    part = report
    while part:
        part.stack = traceback.StackSummary.from_list(frame for frame in part.stack if not is_ours(frame))
        part = part.__cause__ or part.__context__
    return CPP_FRAMES.sub("", "".join(report.format()))


def moved():
    """{"sent": bytes that left this rank in the last statement, and Statement.facts}. Collective."""
    with HERE.statement.pause():
        return {"sent": HERE.statement.settled(), **HERE.statement.facts(vars(HERE.module))}


def complete(text):
    """The completions of the last name in a text, without running anything that could be collective."""
    head, dot, start = text.rpartition(".")
    names = vars(HERE.module)
    if dot:
        first, *rest = head.split(".")
        value = names.get(first, getattr(builtins, first, None))
        for name in rest:  # asking a tensor for an attribute may move data
            value = None if isinstance(value, flow.Tensor) else getattr(value, name, None)
        words = [] if value is None else dir(value)
    else:
        words = [*names, *dir(builtins), *keyword.kwlist]
    hidden = not start.startswith("_")
    return sorted({head + dot + word for word in words if word.startswith(start) and not (hidden and word[0] == "_")})


def display(value):
    """Show the value of an expression, of a global tensor this rank's shard, and keep it as `_`."""
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
    """A global tensor as a line that is the same on all ranks: shape, dtype, SBP, ranks."""
    sbp, ranks = layout_of(tensor)
    sbp = f"({sbp})" if "," in sbp else sbp  # of a mesh
    dtype = str(tensor.dtype).split(".")[-1]
    needs = ", requires_grad" if tensor.requires_grad else ""
    return f"{shape_in_words(tuple(tensor.shape))} {dtype}, {sbp} on ranks {ranks}{needs}\n"


def held(tensor):
    """This rank's block of a global tensor: its place, and its values if it is small."""
    layout, shape, rank = layout_of(tensor), tuple(tensor.shape), flow.env.get_rank()
    block = layout.block(shape, rank)
    if block is None:
        return "nothing\n"
    words = held_in_words(Tensor("", shape, *layout, {rank: block}), rank)
    shard = tensor.detach().to_local()
    if shard.numel() > SMALL:
        return f"{words}, {shard.numel():,} values: see to_local()\n"
    values = np.array2string(shard.numpy(), precision=4, suppress_small=True, separator=", ")
    return f"{words}\n{values}\n" if "\n" in values else f"{words}  {values}\n"
