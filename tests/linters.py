"""Linters, pinned, in an environment of their own."""

from tests.environments import programs


def linter(name):
    """The path of a linter. Installs all of them at first."""
    return str(programs("linters") / name)
