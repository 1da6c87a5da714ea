"""Run a test of harness.testing.on_ranks on this rank."""

import functools
import importlib
import pickle
from importlib.machinery import PathFinder

import numpy as np

import harness.testing
from harness.measure.sbp import label
from harness.measure.tensors import snapshot
from harness.start.isolation import Isolation

KIT = {"harness.testing": harness.testing}  # the module of ours that the user's code imports


@functools.lru_cache(maxsize=None)
def isolation(path):
    """The Isolation for a user's sys.path; the same for all tests, so that their modules stay loaded."""
    package = {} if PathFinder.find_spec("harness", path) else {"harness": harness}
    return Isolation(list(path), {**package, **KIT})


def returned(path, module, name, arguments):
    """Call the test `name` of a module on this rank; returns how it ended and its reason, or, if it returned,
    ("returned", {name: `snapshot` of the tensor, "expected_sbp" as `label` writes it, "expected": array}).

    path: sys.path of pytest. name: with its class, if it has one. arguments: {name: pickled value}.
    """
    with isolation(tuple(path)):
        owner = importlib.import_module(module)
        *classes, function = name.split(".")
        for name_of_class in classes:
            owner = getattr(owner, name_of_class)
        test = getattr(owner, function).on_rank
        values = {key: pickle.loads(value) for key, value in arguments.items()}
        pytest, unittest = map(importlib.import_module, ("pytest", "unittest"))  # those that the test sees
        try:
            tensors = test(owner(), **values) if classes else test(**values)
        except (pytest.skip.Exception, unittest.SkipTest) as skipped:
            return "skip", str(skipped)
        except pytest.xfail.Exception as expected:
            return "xfail", str(expected)
        except pytest.exit.Exception as end:
            return "exit", (end.msg, end.returncode)
        except pytest.fail.Exception as failed:  # not an Exception: it would end the rank
            raise AssertionError(str(failed)).with_traceback(failed.__traceback__) from None
    if not isinstance(tensors, (dict, type(None))):
        return "fail", f"it returned {type(tensors).__name__}, expected {{name: (tensor, SBP, array)}} or nothing"
    return "returned", {
        key: {**snapshot(tensor), "expected_sbp": label(sbp), "expected": np.asarray(expected)}
        for key, (tensor, sbp, expected) in (tensors or {}).items()
    }
