"""Keep the names that a user's code imports apart from ours, in a process that runs both."""

import sys

OURS = ("harness", "tests", "benchmarks", "recipes")  # packages of ours; a user may have others of these names


class Isolation:
    """A context manager for the user's code: inside it, sys.path is `path`, and no module of ours can be imported.

    It may be entered again: modules of the user's that have names of ours are then still there. Import what our code
    needs before, and pickle objects of our classes behind it.
    """

    def __init__(self, path, modules=None):
        """path: the user's sys.path. modules: name -> module, those of ours that can be imported nevertheless."""
        self.path, self.modules = path, modules or {}

    def __enter__(self):
        self.swap()

    def __exit__(self, *_):
        self.swap()

    def swap(self):
        """Exchange sys.path and the modules with names of ours for those on the other side."""
        modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in OURS}
        sys.modules.update(self.modules)
        self.modules = modules
        self.path, sys.path = sys.path, self.path
