"""Run a user's code in a process that also runs ours, without mixing modules that have the same name."""

import sys

OURS = ("harness", "tests", "benchmarks", "recipes")  # our packages; the user may have packages of these names too


class Isolation:
    """A context manager for the user's code: inside it, sys.path is `path`, and none of our modules can be imported.

    It can be entered again; the user's modules that have our names are then still loaded. Import what our own code
    needs before entering it, and pickle objects of our classes after leaving it.
    """

    def __init__(self, path, modules=None):
        """path: the user's sys.path. modules: {name: module}, those of ours that the user's code may import."""
        self.other_path, self.other_modules = path, modules or {}

    def __enter__(self):
        self.swap()

    def __exit__(self, *_):
        self.swap()

    def swap(self):
        """Exchange our sys.path and modules for the user's, or back: other_* hold those that are not in use now."""
        modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in OURS}
        sys.modules.update(self.other_modules)
        self.other_modules = modules
        self.other_path, sys.path = sys.path, self.other_path
