"""Call a function on a rank, and note which lines of a file it runs."""

import sys

from oneflow_cookbook.pool.worker import function_of


def call_and_lines(name, arguments, file):
    """Returns what a function returns, and the set of the lines of `file` that it ran. name: as pools take it."""
    lines, before = set(), sys.gettrace()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != file:
            return None
        lines.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        answer = function_of(name)(**arguments)
    finally:
        sys.settrace(before)
    return answer, lines
