"""`on_ranks`, for tests of users: failures, marks, names. The example of docs/testing.md runs in test_pages.py."""

import re

import pytest

from oneflow_cookbook.testing import on_ranks
from tests.cases import ROOT
from tests.jobs import LAUNCH, Run

FAILS = """
import oneflow as flow
from beside import layer
from oneflow_cookbook.testing import on_ranks

@on_ranks(2)
def test_shapes():
    ranks = flow.placement.all("cpu")
    x = flow.ones(4, 5, placement=ranks, sbp=flow.sbp.split(0))
    return {"out": (layer(x, flow.ones(6, 8, placement=ranks, sbp=flow.sbp.broadcast)), flow.sbp.split(0), 0)}
"""


@pytest.mark.slow
def test_failure_begins_with_the_lines_of_the_user(job):
    shown = job.out[job.out.index("test_shapes[2]") :].splitlines()[1:7]
    assert re.fullmatch(r"rank [01] of 2 failed:", shown[0]) and shown[1].startswith("Traceback")
    assert "test_fails.py" in shown[2] and "layer(x" in shown[3] and "beside.py" in shown[4], shown
    assert "Deprecat" not in job.out and "worker.py" not in job.out


PARAMETERS = """
import oneflow as flow
import pytest
from oneflow_cookbook.testing import on_ranks

S, B = flow.sbp.split(0), flow.sbp.broadcast

class Double(flow.nn.Module):
    def forward(self, x):
        return 2 * x

def tensor(sbp):
    return flow.ones(4, 4, placement=flow.placement.all("cpu"), sbp=sbp)

@pytest.mark.parametrize("layer, factor", [(Double, 2), pytest.param(flow.nn.ReLU, 1, id="relu")])
@on_ranks(1, 4)
@pytest.mark.parametrize("sbp", [S, B], ids=["split", "broadcast"])
def test_parameters(layer, factor, sbp, tmp_path, world_size):
    assert flow.env.get_world_size() == world_size and tmp_path.is_dir()
    return {"out": (layer()(tensor(sbp)), sbp, tensor(B).numpy() * factor)}

class TestOfClass:
    @on_ranks(2)
    @pytest.mark.parametrize("sbp", [S, B])
    def test_method(self, sbp):
        return {"out": (tensor(sbp), *self.expected(sbp))}

    def expected(self, sbp):
        return sbp, tensor(B).numpy()

@on_ranks(2)
@pytest.mark.skip(reason="of its mark")
def test_skipped():
    raise ValueError

@pytest.mark.xfail(strict=True)
@on_ranks(2)
def test_fails():
    return {"out": (tensor(S), B, 1)}

@on_ranks(2)
def test_value():
    return {"out": (tensor(B), B, tensor(B).numpy() + 1)}

@pytest.mark.parametrize("function", [lambda: 1])
@on_ranks(2)
def test_refused(function):
    return {}
"""


OUTCOMES = """
import unittest
import oneflow as flow
import pytest
from oneflow_cookbook.testing import on_ranks

first = flow.env.get_rank() == 0

@on_ranks(1, 2)
def test_skips_by_ranks(world_size):
    if world_size == 2:
        pytest.skip("an odd number of heads")

@on_ranks(2)
def test_needs_a_package():
    pytest.importorskip("a_package_that_is_not_here")

@on_ranks(2)
def test_skips_as_unittest():
    raise unittest.SkipTest("by unittest")

@on_ranks(2)
def test_expects_to_fail():
    pytest.xfail("known to be wrong")

@on_ranks(2)
def test_fails_by_name():
    pytest.fail("the loss is wrong")

@on_ranks(2)
def test_raises_not():
    with pytest.raises(ValueError):
        pass

@on_ranks(2)
def test_skips_on_one_rank():
    if first:
        pytest.skip("no rows")

@on_ranks(2)
def test_returns_other_names():
    x = flow.ones(2, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    return {"a" if first else "b": (x, flow.sbp.split(0), [1, 1])}

@on_ranks(2)
def test_returns_a_number():
    return 1

@on_ranks(2)
@pytest.mark.parametrize("of_x", ["no gradient", "a word", "two items"])
def test_returns_what_is_no_tensor_or_sbp(of_x):
    x = flow.ones(2, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    values = {"no gradient": (x.grad, flow.sbp.split(0), x), "a word": (x, "S(0)", x), "two items": (x, x)}
    return {"x": values[of_x]}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The programs above in one command."""
    folder, programs = tmp_path_factory.mktemp("mine"), {"marks": PARAMETERS, "fails": FAILS, "outcomes": OUTCOMES}
    for name, program in programs.items():
        (folder / f"test_{name}.py").write_text(program)
    (folder / "beside.py").write_text("import oneflow as flow\n\ndef layer(x, w):\n    return flow.matmul(x, w)\n")
    return Run(LAUNCH, "test", *(f"test_{name}.py" for name in programs), "-rsxf", cwd=folder).wait()


@pytest.mark.slow
def test_parameters_and_marks_of_pytest(job):
    assert "11 failed, 11 passed, 4 skipped, 2 xfailed" in job.out, job.out
    assert "test_value[2] - Failed: Not equal to tolerance" in job.out, job.out
    assert "on_ranks: function cannot be copied to the ranks: Can't pickle <function <lambda>" in job.out, job.out


def test_numbers_of_ranks_are_needed():
    for sizes in ([], [lambda: None]):
        with pytest.raises(TypeError, match="on_ranks needs numbers of ranks: @on_ranks"):
            on_ranks(*sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "test_outcomes.py:9: an odd number of heads",
        "test_outcomes.py:14: could not import 'a_package_that_is_not_here'",
        "test_outcomes.py:18: by unittest",
        "::test_expects_to_fail[2] - reason: known to be wrong",
        "AssertionError: the loss is wrong",
        "AssertionError: DID NOT RAISE <class 'ValueError'>",
        "rank 0 of 2: skip no rows; rank 1 of 2: returned nothing: all ranks must end a test in the same way",
        "rank 0 of 2: returned a; rank 1 of 2: returned b: all ranks must end a test in the same way",
        "it returned int, expected {name: (tensor, SBP, array)} or nothing",
        "x: expected a tensor, not None",
        "x: expected an SBP, such as flow.sbp.split(0), or a tuple of them, not 'S(0)'",
        "x: expected (tensor, SBP, array), not (tensor(",
    ],
)
def test_outcome_of_pytest_on_the_ranks_is_that_of_the_test(job, line):
    assert line in job.out, job.out


NAMED_LIKE_OURS = """
import oneflow as flow
from harness.model import double
from oneflow_cookbook.testing import on_ranks
from tests.shapes import SHAPE
from .shapes import SHAPE as again

def test_in_pytest_itself():
    from harness import model
    assert SHAPE is again and model.double is double

@on_ranks(2)
def test_on_ranks():
    from harness import model
    assert SHAPE is again and model.double is double
    x = flow.ones(*SHAPE, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
    return {"out": (double(x), flow.sbp.split(0), 2 * x.numpy())}
"""


@pytest.mark.slow
def test_packages_that_are_named_like_ours(tmp_path):
    for package in ("harness", "tests", "recipes", "benchmarks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "harness" / "model.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "shapes.py").write_text("SHAPE = (4, 2)\n")
    (tmp_path / "tests" / "test_mine.py").write_text(NAMED_LIKE_OURS)
    job = Run(LAUNCH, "test", "tests/test_mine.py", cwd=tmp_path).wait()
    assert job.code == 0 and "2 passed" in job.out, job.out


@pytest.mark.parametrize(
    "arguments, tests",
    [(".", 2), pytest.param(". -k inner", 1, marks=pytest.mark.slow)],
)
def test_tests_of_a_folder(tmp_path, arguments, tests):
    """A folder's name behind -k is a word in the names of tests, and no folder."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "test_out.py").write_text("def test_out(): pass\n")
    (tmp_path / "inner" / "test_in.py").write_text("def test_inner(): pass\n")
    job = Run(LAUNCH, "test", *arguments.split(), cwd=tmp_path).wait()
    assert job.code == 0 and f"{tests} passed" in job.out, job.out


@pytest.mark.slow
def test_name_of_a_recipe_selects_its_tests():
    tests = {
        "ring_all_reduce": "tests/slow/test_byhand.py::test_bytes_of_the_ring",
        "pytorch_weights": "tests/test_your_model.py::test_saved_file_is_the_trained_model",  # by a constant
    }
    files = [test.partition("::")[0] for test in tests.values()]
    job = Run(LAUNCH, "test", *files, "-k", " or ".join(tests), "--collect-only", "-q", cwd=ROOT).wait()
    assert all(test in job.out for test in tests.values()), job.out
