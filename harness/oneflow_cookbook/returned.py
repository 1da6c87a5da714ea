"""Run a test of oneflow_cookbook.testing.on_ranks on this rank."""

import importlib
import pickle
import sys
import unittest

import numpy as np
import oneflow as flow
import pytest

from oneflow_cookbook.measure.sbp import label
from oneflow_cookbook.measure.tensors import snapshot


def returned(folder, module, name, arguments):
    """Call the test `name` of a module on this rank; returns how it ended and its reason, or, if it returned,
    ("returned", {name: `snapshot` of the tensor, "expected_sbp" as `label` writes it, "expected": array}).

    folder: from which the module is imported. name: with its class, if it has one. arguments: {name: pickled value}.
    """
    if folder not in sys.path:  # pytest --import-mode=importlib
        sys.path.insert(0, folder)
    owner = importlib.import_module(module)
    *classes, function = name.split(".")
    for name_of_class in classes:
        owner = getattr(owner, name_of_class)
    test = getattr(owner, function).on_rank
    values = {key: pickle.loads(value) for key, value in arguments.items()}
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
    for key, value in (tensors or {}).items():
        problem = problem_with(value)
        if problem:
            return "fail", f"{key}: {problem}"
    return "returned", {
        key: {**snapshot(tensor), "expected_sbp": label(sbp), "expected": np.asarray(expected)}
        for key, (tensor, sbp, expected) in (tensors or {}).items()
    }


def problem_with(value):
    """What is wrong with a value of the dict that a test returned; None if nothing is."""
    if not isinstance(value, tuple) or len(value) != 3:
        return f"expected (tensor, SBP, array), not {value!r:.80}"
    tensor, sbp, _ = value
    if not isinstance(tensor, flow.Tensor):
        return f"expected a tensor, not {tensor!r:.80}"
    if not all(isinstance(axis, flow.sbp.sbp) for axis in (sbp if isinstance(sbp, (tuple, list)) else [sbp])):
        return f"expected an SBP, such as flow.sbp.split(0), or a tuple of them, not {sbp!r:.80}"
    return None
