"""`launch.sh shell [-n N] [--timeout S] [--echo] [SCRIPT [ARG ...]]`."""

import errno
import signal
import sys

from rich.console import Console as RichConsole

from oneflow_cookbook.pool import PoolError
from oneflow_cookbook.shell.console import Console, Piped, Typed
from oneflow_cookbook.shell.screen import Screen
from oneflow_cookbook.shell.session import Session
from oneflow_cookbook.start.ending import BAD_INPUT
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.options import Parser, add_script, file_of, fill_in_ranks, find_script
from oneflow_cookbook.start.output import say
from oneflow_cookbook.start.signals import exit_at


def options_of(arguments):
    """The command line, checked. Raises UsageError."""
    parser = Parser(prog="launch.sh shell", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", type=int, dest="nproc_per_node")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--echo", action="store_true")
    add_script(parser)
    options = parser.parse_args(arguments)
    options.nnodes, sizes = 1, None
    if not options.timeout >= 0:
        raise UsageError(f"--timeout must be a number of seconds, or 0 for no limit, got {options.timeout:g}")
    if options.script is not None or options.module is not None:
        sizes = find_script(options)
    fill_in_ranks(options, sizes)
    return options


def main(arguments):
    """Run the shell with these arguments; returns the exit code. Raises OSError if nobody reads the output."""
    exit_at(signal.SIGTERM, signal.SIGHUP)
    try:
        options = options_of(arguments)
        return shell(options)
    except UsageError as error:
        say(str(error))
        return BAD_INPUT
    except PoolError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # nobody reads the output
            raise
        say(str(error))
        return 1


class Stdout(RichConsole):
    """Standard output; raises where rich would exit."""

    def on_broken_pipe(self):
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output")


def shell(options):
    """Read and run statements until the end; returns the exit code."""
    typed = sys.stdin.isatty()
    screen = Screen(Stdout(highlight=False, soft_wrap=True), options.nproc_per_node)
    script = file_of(options) if options.script else None
    session = Session(options.nproc_per_node, options.timeout, screen, script, options.arguments, options.module)
    with session:
        if not session.start():
            session.renew()
        signal.signal(signal.SIGINT, lambda number, frame: None)  # no effect, but at the prompt and in a statement
        if typed:
            welcome(screen, options)
        lines = Typed(session.complete) if typed else Piped(sys.stdin.fileno(), options.echo)
        try:
            return Console(session, lines).loop()
        finally:
            lines.close()


def welcome(screen, options):
    ranks = "1 rank runs" if options.nproc_per_node == 1 else f"{options.nproc_per_node} ranks run"
    screen.line(f"{ranks} each statement that you type. Begin with: import oneflow as flow")
    screen.line("Ctrl-C ends a statement, Ctrl-D the shell. docs/shell.md is a tutorial.")
