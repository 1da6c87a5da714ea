"""Call a function on a rank, and note which lines of a file it runs."""

import sys
from functools import lru_cache

from oneflow_cookbook.start import recipe

load = lru_cache(maxsize=None)(recipe.load)


def call_and_lines(name, arguments, file):
    """Returns what the function "path/to/file.py:name" returns, and the set of the lines of `file` that it ran."""
    path, _, attribute = name.rpartition(":")
    lines, before = set(), sys.gettrace()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != file:
            return None
        lines.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        answer = getattr(load(path), attribute)(**arguments)
    finally:
        sys.settrace(before)
    return answer, lines
