"""`launch.sh show` and `launch.sh bytes`: run a script on all ranks, and show its tensors and moves, or its bytes.

Steps that send nothing are only counted, equal blocks of a model are one row, and the last line is the verdict.

If each parameter of its function `train` or `run` has a default or is a recipe's placement, only that is called; else
the whole script runs. Its output is not shown.
"""

import os
import re
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oneflow_cookbook.measure.steps import IMPLICIT, Move, steps_in, tensors_and_moves
from oneflow_cookbook.pool import Pool, PoolError
from oneflow_cookbook.report import drawing
from oneflow_cookbook.report.drawing import times_in_words
from oneflow_cookbook.report.shorten import left_out_in_words, shortened
from oneflow_cookbook.report.verdict import verdict
from oneflow_cookbook.start import recipe
from oneflow_cookbook.start.ending import BAD_INPUT, TIME_LIMIT_REACHED
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.options import Parser, checked, file_of
from oneflow_cookbook.start.output import say
from oneflow_cookbook.start.signals import exit_at

MEASURE_SCRIPT = "oneflow_cookbook.measure.script:measure_script"
MEMORY = "oneflow_cookbook.measure.rank_memory:memory"
MEMORY_IN_WORDS = (
    "Peak: how much the resident memory of the process grew while the script ran, numpy's arrays and OneFlow's own "
    "buffers (tens of MB) included, the memory of a GPU not. Weights, gradients and optimizer state: counted from the "
    "rank's shards. Rest: activations, gathered weights, buffers and temporary tensors. In a graph the gradients are "
    "those that the optimizer reads; they need not all be there at once."
)
TIMEOUT = 600.0  # seconds, by default: as the output is not shown, nobody notices a script that hangs


def keywords_of(script, arguments):
    """{name: value} for a script's `train` or `run`, from the command line; None if the whole script must run.

    Raises UsageError.
    """
    try:
        defaults = recipe.entry(script)
    except ValueError:  # it has no such function, or the function needs more than options
        return None
    parser = Parser(prog=str(script), add_help=False, allow_abbrev=False)
    options = {name: f"--{name.replace('_', '-')}" for name in defaults}
    for name, default in defaults.items():
        if isinstance(default, bool):
            parser.add_argument(options[name], action="store_true", default=default)
            continue
        if isinstance(default, tuple):
            parser.add_argument(options[name], type=type(default[0]) if default else int, nargs="+", default=default)
        else:
            parser.add_argument(options[name], type=int if default is None else type(default), default=default)
    try:
        keywords = vars(parser.parse_args(arguments))
    except UsageError as error:
        known = " ".join(options.values()) or "none"
        raise UsageError(f"{script}: {str(error).split(';')[0]}; the parameters of its run are {known}") from None
    if recipe.RECIPES in Path(script).resolve().parents:
        check_sizes(script, defaults, keywords)
    return keywords


def check_sizes(script, defaults, keywords):
    """Raises UsageError if a whole number for a recipe is negative, or 0 where its default is not 0."""
    for name, value in keywords.items():
        least = 0 if defaults[name] == 0 else 1
        if type(value) is int and value < least:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{script}: {option} must be {least} or more, got {value}")


def measured(options):
    """(the results of measure_script for the script, those of memory if it was asked for), by rank.

    Raises UsageError, PoolError.
    """
    keywords = keywords_of(options.script, options.arguments)
    timeout = TIMEOUT if options.timeout is None else options.timeout or 1e9
    script = {"path": file_of(options), "module": options.module, "argv": options.arguments, "keywords": keywords}
    with Pool(options.nproc_per_node, timeout) as pool:
        results = pool.call(MEASURE_SCRIPT, **script)
    if "refusal" in results[0]:
        raise UsageError(results[0]["refusal"])
    memory = []
    if options.memory:  # of new ranks, as a record keeps tensors alive
        with Pool(options.nproc_per_node, timeout) as pool:
            memory = pool.call(MEMORY, **script)
    return results, memory


def main(command, arguments):
    """Run `launch.sh show` or `launch.sh bytes` with these arguments; returns the exit code."""
    exit_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        options = checked(arguments, ["--memory"])
        if options.memory and command != "show":
            raise UsageError(f"{command} has no --memory, but show has")
        results, memory = measured(options)
    except UsageError as error:
        say(str(error))
        return BAD_INPUT
    except PoolError as error:
        say(re.sub(rf"({MEASURE_SCRIPT}|{MEMORY}): ", "", str(error), count=1))
        if error.hung:
            return TIME_LIMIT_REACHED
        return 128 + error.signal if error.signal else 1
    title = f"{options.script} {' '.join(options.arguments)}".strip() + f" on {options.nproc_per_node} ranks"
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 160))  # wide enough for any table
    console = Console(highlight=False, width=width)
    with console.capture() as captured:
        if command == "show":
            show(console, title, results, memory, options)
        else:
            list_bytes(console, title, results, options)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return 0


def show(console, title, results, memory, options):
    """Write tensors and moves to a console of rich. results, memory: of measured."""
    console.print(Text(title, "bold"))
    items, left_out = shortened(tensors_and_moves(results))
    drawing.draw(console, items)
    if not items:
        console.print("\nIt makes no global tensor.")
    if memory:
        write_memory(console, memory)
    if not items:
        return
    hint(console, items, 'not shown, or marked with "about"')
    explain_implicit(console, items, options)
    conclude(console, items, left_out, results)


def list_bytes(console, title, results, options):
    """Write the bytes of each move as a table."""
    items, left_out = shortened(tensors_and_moves(results))
    moves = [item for item in items if isinstance(item, Move)]
    table = Table(title=f"bytes that leave each rank: {title}", title_justify="left", expand=False)
    for name in ("line", "step", "collective"):
        table.add_column(name, overflow="fold")
    for name in (*(f"rank {rank}" for rank in range(len(results))), "all ranks", "formula", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for move in moves:
        table.add_row(*map(Text, row(move, len(results))))  # in a plain str, [...] would be markup
    table.add_section()
    outside = [result["outside"] for result in results]
    sent = [f"{number:,}" for number in (*outside, sum(outside))]
    table.add_row(
        "", "between the steps: making tensors, building graphs, operators outside of layers", "", *sent, "", ""
    )
    console.print(table)
    hint(console, moves, "marked with ~")
    explain_implicit(console, moves, options)
    conclude(console, moves, left_out, results)


def write_memory(console, memory):
    """Write the peak of each rank's memory, and what it is made of. memory: of rank_memory.memory, by rank."""
    table = Table(title="\npeak of each rank's memory", title_justify="left")
    for name in ("rank", "peak", "weights", "gradients", "optimizer state", "rest"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, held in enumerate(memory):
        kinds = [held["weights"], held["gradients"], held["state"]]
        rest = max(0, held["peak"] - sum(kinds))
        table.add_row(str(rank), *map(drawing.bytes_in_words, [held["peak"], *kinds, rest]))
    console.print(table)
    console.print(Text(MEMORY_IN_WORDS, "dim"))


def conclude(console, items, left_out, results):
    """Write what is not listed, and the verdict."""
    words = verdict([item for item in items if isinstance(item, Move)], steps_in(results[0]))
    text = "\n".join(filter(None, [left_out_in_words(left_out), words]))
    console.print(Text(f"\n{text}"), soft_wrap=not console.is_terminal)


def row(move, world_size):
    """The cells of a move in the table."""
    line = str(move.line) if move.line else ""
    what = move.what + (f" ({move.change})" if move.change and move.change != move.collective else "")
    formula = "" if move.formula is None else f"{move.formula:,.0f}"
    if move.sent is None:  # a boxing in a graph, of which only the whole call is measured
        return [line, f"  {what}", move.collective, *[""] * world_size, "", formula, ""]
    total, about = sum(move.sent), "" if move.is_exact else "~"
    sent = [f"{about}{number:,}" for number in (*move.sent, total)]
    ratio = f"{total / move.formula:.3f}" if move.formula and move.is_exact else ""
    return [line, what + times_in_words(move, ", {}"), move.collective, *sent, formula, ratio]


def explain_implicit(console, items, options):
    """If OneFlow moved operands by itself, write how to see which."""
    if any(isinstance(item, Move) and item.collective == IMPLICIT for item in items):
        words = "OneFlow moved operands inside these layers; in eager mode it does not tell which ones."
        has_graph = keywords_of(options.script, []) is not None and "graph" in recipe.entry(options.script)
        more = "Add --graph" if has_graph else "Run the model in an nn.Graph"
        console.print(Text(f"\n{words} {more}: there each move is listed.", "dim"))


def hint(console, items, how):
    """If a measured number of bytes is not exact, write why. how: what becomes of it."""
    if all(item.is_exact for item in items if isinstance(item, Move) and item.sent is not None):
        return
    words = f"Tensors under 1 MB: what was measured is {how}, because OneFlow's own messages outweigh their bytes."
    console.print(Text(f"\n{words} Give larger sizes to compare with the formulas.", "dim"))
