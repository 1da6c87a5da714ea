"""A shell inside the process of the tests: what is typed comes from a pipe, and what it shows is returned."""

import contextlib
import io
import os

from rich.console import Console as RichConsole

from harness.shell.console import Console, Piped
from harness.shell.screen import Screen
from harness.shell.session import Session


class Shell:
    """A shell on this many ranks; a context manager."""

    def __init__(self, world_size, timeout=60, script=None):
        self.console = RichConsole(file=io.StringIO(), highlight=False)
        self.session = Session(world_size, timeout, Screen(self.console, world_size), script)

    def __enter__(self):
        self.session.start()
        return self

    def __exit__(self, *_):
        self.session.ranks.close()
        self.session.folder.cleanup()

    def type(self, text, echo=False):
        """Type these lines; returns what is shown."""
        self.console.file.seek(0)
        self.console.file.truncate()
        reading, writing = os.pipe()
        with contextlib.closing(os.fdopen(reading)):
            os.write(writing, text.encode())
            os.close(writing)
            self.code = Console(self.session, Piped(reading, echo)).loop()
        return self.console.file.getvalue()
