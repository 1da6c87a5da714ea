"""`launch.sh show` and `launch.sh bytes`: run a script on all ranks, and show its tensors and moves, or its bytes.

Steps that send nothing are only counted, equal blocks of a model are one row, and the last line is the verdict.
The way: run.py runs the script on the ranks, where measure/script.py records it; measure/steps.py makes tensors and
moves of the records; shorten.py leaves out and folds; drawing.py draws; verdict.py concludes.
"""

import os
import signal
import sys

from rich.console import Console
from rich.text import Text

from oneflow_cookbook.measure.steps import Move, steps_in, tensors_and_moves
from oneflow_cookbook.pool import PoolError
from oneflow_cookbook.report.drawing import bytes_table, draw, memory_table
from oneflow_cookbook.report.run import in_words, run
from oneflow_cookbook.report.shorten import shortened
from oneflow_cookbook.report.verdict import conclusion, notes
from oneflow_cookbook.start.ending import BAD_INPUT, TIME_LIMIT_REACHED
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.output import say
from oneflow_cookbook.start.signals import exit_at

MEMORY_IN_WORDS = (
    "Peak: how much the resident memory of the process grew while the script ran, numpy's arrays and OneFlow's own "
    "buffers (tens of MB) included, the memory of a GPU not. Weights, gradients and optimizer state: counted from the "
    "rank's shards. Rest: activations, gathered weights, buffers and temporary tensors. In a graph the gradients are "
    "those that the optimizer reads; they need not all be there at once."
)


def main(command, arguments):
    """Run `launch.sh show` or `launch.sh bytes` with these arguments; returns the exit code."""
    exit_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        options, keywords, results, memory = run(command, arguments)
    except UsageError as error:
        say(str(error))
        return BAD_INPUT
    except PoolError as error:
        say(in_words(error))
        if error.hung:
            return TIME_LIMIT_REACHED
        return 128 + error.signal if error.signal else 1
    title = f"{options.script} {' '.join(options.arguments)}".strip() + f" on {options.nproc_per_node} ranks"
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 160))  # wide enough for any table
    console = Console(highlight=False, width=width)
    items, left_out = shortened(tensors_and_moves(results))
    moves = [item for item in items if isinstance(item, Move)]
    with console.capture() as captured:
        if command == "bytes":
            console.print(bytes_table(title, moves, [result["outside"] for result in results]))
        else:
            console.print(Text(title, "bold"))
            draw(console, items)
            if not items:
                console.print("\nIt makes no global tensor.")
            if memory:
                console.print(memory_table(memory))
                console.print(Text(MEMORY_IN_WORDS, "dim"))
        if items or command == "bytes":
            mark = "marked with ~" if command == "bytes" else 'not shown, or marked with "about"'
            for note in notes(moves, mark, has_graph="graph" in (keywords or {})):
                console.print(Text(f"\n{note}", "dim"))
            words = conclusion(moves, left_out, steps_in(results[0]))
            console.print(Text(f"\n{words}"), soft_wrap=not console.is_terminal)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return 0
