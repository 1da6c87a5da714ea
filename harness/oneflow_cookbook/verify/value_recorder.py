"""Record the values of tensors on this rank."""

import functools
import hashlib
import os
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.recorder import Recorder
from oneflow_cookbook.measure.tensors import layout_of
from oneflow_cookbook.verify.values import Key, Value

HARNESS = str(Path(__file__).resolve().parent.parent)
LIBRARIES = tuple({*map(os.path.realpath, [*sysconfig.get_paths().values(), sys.prefix, os.path.dirname(os.__file__)])})


class ValueRecorder(Recorder):
    """A Recorder that writes the values of global tensors, and of parameters that are local beside global ones."""

    def __init__(self, writer):
        super().__init__()
        self.writer = writer
        self.times = Counter()  # (kind, name, place) -> how often
        self.updates = Counter()  # id of an optimizer or graph, or "by hand" -> its steps
        self.local = set()  # names of parameters that are local beside global ones
        self.backward_facts = {}  # facts of the gradients that arrive now

    def records(self, tensor):
        """Whether the values of such a tensor are recorded."""
        return tensor.is_global

    def observe(self, kind, name, tensor, place=None, step=None, **facts):
        """Record a tensor, unless it has no value; returns its Key.

        place, step: by default those of the code that runs.
        """
        if tensor is None or tensor.is_lazy or not (self.records(tensor) or name in self.local):
            return None
        place = place_now() if place is None else place
        self.times[kind, name, place] += 1
        key = Key(kind, name, place, self.times[kind, name, place])
        self.write(key, tensor, step, **facts)
        return key

    def write(self, key, tensor, step=None, **facts):
        """Write this rank's block of a tensor; of a key that was written before, this is now the value."""
        with self.pause():
            block = block_of(tensor)
        layout, dtype = layout_of(tensor), str(np.dtype("f4") if block is None else block.dtype)
        step = step or 1 + max(self.updates.values(), default=0)
        facts.update(self.facts_of(key.kind))
        self.writer.add(Value(key, step, layout, tuple(tensor.shape), dtype, facts=facts), block)

    def facts_of(self, kind):
        """What else is known of a value that is written now."""
        return self.backward_facts if kind.startswith("gradient") else {}


def block_of(tensor):
    """This rank's block as an array, None outside the placement."""
    if tensor.is_global and flow.env.get_rank() not in tensor.placement.ranks:
        return None
    local = tensor.detach().to_local() if tensor.is_global else tensor.detach()
    is_in_numpy = local.dtype not in (flow.bfloat16, flow.float16)
    return (local if is_in_numpy else local.float()).numpy()


def digest(local):
    """What tells whether ranks passed the same values: (shape, hash of the values, whether they are all equal).

    None outside the placement.
    """
    array = block_of(local)
    if array is None:
        return None
    return (
        array.shape,
        hashlib.sha256(array.tobytes()).hexdigest(),
        bool(array.size == 0 or (array == array.flat[0]).all()),
    )


@functools.lru_cache(maxsize=None)
def is_users(file):
    """Whether a file of Python code is the user's, and not OneFlow's, Python's or ours."""
    path = os.path.realpath(file)
    return not (file.startswith("<") or path.startswith((*LIBRARIES, HARNESS)))


def frames_now():
    """The frames of the user's code that runs, innermost first."""
    frames, frame = [], sys._getframe()
    while frame:
        if is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


def place_now():
    """((file, line), ...) of the user's code that runs, innermost first."""
    return tuple((frame.f_code.co_filename, frame.f_lineno) for frame in frames_now())
