"""Read statements: from a terminal with history and completion, or from a pipe."""

import code
import contextlib
import os
import select
import signal
import traceback

from oneflow_cookbook.shell import SHELL

HISTORY = "~/.oneflow_cookbook_history"
HISTORY_LENGTH = 2000
PROMPTS = {False: ">>> ", True: "... "}


class Typed:
    """Lines typed at a terminal."""

    echo = False

    def __init__(self, complete):
        self.readline = None
        with contextlib.suppress(ImportError):
            import readline

            self.readline = readline
            self._set_up(complete)

    def _set_up(self, complete):
        words = []

        def nth(text, state):
            if state == 0:  # readline asks for word 0, 1, ... until None
                words[:] = complete(text) if text.strip() else ["    "]  # at the start of a line, Tab indents
            return words[state] if state < len(words) else None

        self.readline.set_completer(nth)
        self.readline.set_completer_delims(" \t\n`~!@#$%^&*()-=+[{]}\\|;:'\",<>/?")
        libedit = "EditLine" in getattr(self.readline, "_READLINE_LIBRARY_VERSION", "")
        self.readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        self.readline.set_history_length(HISTORY_LENGTH)
        with contextlib.suppress(OSError):
            self.readline.read_history_file(os.path.expanduser(HISTORY))

    def line(self, more):
        """The next line. more: whether it continues a statement. Raises EOFError, KeyboardInterrupt."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return input(PROMPTS[more])
        finally:
            signal.signal(signal.SIGINT, before)

    def more_comes(self):
        """Whether more lines are waiting, as after a paste."""
        return bool(select.select([0], [], [], 0)[0])

    def close(self):
        if self.readline:
            with contextlib.suppress(OSError):  # the home folder cannot be written
                self.readline.write_history_file(os.path.expanduser(HISTORY))


class Piped:
    """Lines from a pipe or a file, by its descriptor. echo: whether to show them with prompts, as in a terminal."""

    def __init__(self, descriptor, echo):
        self.descriptor, self.echo = descriptor, echo
        self.data, self.ended = b"", False

    def line(self, more):
        while b"\n" not in self.data and not self.ended:
            self._read()
        if not self.data:
            raise EOFError
        line, _, self.data = self.data.partition(b"\n")
        return line.decode("utf-8", "replace").rstrip("\r")

    def more_comes(self):
        if not self.data and not self.ended and select.select([self.descriptor], [], [], 0)[0]:
            self._read()
        return bool(self.data)

    def _read(self):
        read = os.read(self.descriptor, 65536)
        self.data, self.ended = self.data + read, not read

    def close(self):
        pass


class Console(code.InteractiveConsole):
    """Python's console; a Session runs its statements. Unlike in Python, a pasted block may have empty lines."""

    def __init__(self, session, lines):
        super().__init__(filename=SHELL)
        self.session, self.lines, self.screen = session, lines, session.screen

    def loop(self):
        """Run all statements; returns the exit code."""
        more = False
        while self.session.exit_code is None:
            try:
                line = self.lines.line(more)
            except EOFError:
                self.flush()
                if isinstance(self.lines, Typed):
                    self.screen.line("")
                break
            except KeyboardInterrupt:
                self.screen.line("\nKeyboardInterrupt")
                self.resetbuffer()
                more = False
                continue
            more = self.take(line)
        return self.session.exit_code or 0

    def take(self, line):
        """Add a line; returns whether the statement needs more of them."""
        if self.buffer and line.strip() and not line[0].isspace() and self.begins_anew(line):
            self.flush()
        self.session.lines.append(line)
        if self.lines.echo:
            self.screen.line((PROMPTS[bool(self.buffer)] + line).rstrip())
        if self.buffer and not line.strip() and self.lines.more_comes():
            self.buffer.append("")
            return True
        return self.push(line)

    def begins_anew(self, line):
        """Whether a line that is not indented ends the block above it and begins a new statement."""
        return self.state([*self.buffer, ""]) == "complete" and self.state([*self.buffer, line]) == "wrong"

    def state(self, lines):
        """Whether these lines are a "complete" statement, "open", or "wrong"."""
        try:
            return "complete" if self.compile("\n".join(lines), self.filename, "single") else "open"
        except (SyntaxError, ValueError, OverflowError):
            return "wrong"

    def flush(self):
        """Run the block that was typed, without an empty line at its end."""
        if self.buffer:
            self.runsource("\n".join([*self.buffer, ""]))
            self.resetbuffer()

    def runsource(self, source, filename=SHELL, symbol="single"):
        try:
            if self.compile(source, filename, symbol) is None:
                return True
        except (SyntaxError, ValueError, OverflowError) as error:
            self.screen.line("".join(traceback.format_exception_only(type(error), error)).rstrip("\n"))
            return False
        if any(line.strip() and not line.lstrip().startswith("#") for line in source.split("\n")):
            self.session.run(source, len(self.session.lines) - len(self.buffer) + 1)
        return False
