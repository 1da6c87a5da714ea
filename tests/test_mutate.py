"""The command that breaks recipes on purpose finds the places to break, and tells red from green."""

from harness.recipe import path_of
from tests import mutate
from tests.cases import CASES


def test_every_recipe_is_broken_in_every_layout_it_states():
    for name in CASES:
        source = path_of(name).read_text()
        changes = [(line, change) for line, change, _ in mutate.mutants(source)]
        lesson = source[source.index("import argparse") : source.index(mutate.END)]
        stated = sum(lesson.count(word) for word in ("flow.sbp.broadcast", "flow.sbp.split(", "flow.sbp.partial_sum"))
        assert sum(change.startswith("flow.sbp.") for _, change in changes) == 3 * stated
        assert sum(change.startswith("flow.placement(") for _, change in changes) >= 4 * lesson.count("flow.placement(")
        assert sum("set_stage" in change.split(" -> ")[0] for _, change in changes) == 5 * lesson.count("set_stage")
        assert all(source != changed for _, _, changed in mutate.mutants(source))


def test_red_is_told_from_green(pools, tmp_path):
    source, path = path_of("single_device").read_text(), tmp_path / "single_device.py"
    path.write_text(source)
    assert mutate.first_red(pools, path, "single_device") is None
    path.write_text(source.replace("flow.matmul(x, self.w)", "flow.matmul(x, -self.w)"))
    assert mutate.first_red(pools, path, "single_device").startswith("1 ranks, eager: rank 0: out: shard differs")
    source, path = path_of("data_parallel").read_text(), tmp_path / "data_parallel.py"
    path.write_text(source.replace("sbp=flow.sbp.split(0)", "sbp=flow.sbp.broadcast"))
    assert mutate.first_red(pools, path, "data_parallel") == "2 ranks, eager: rank 0: x: SBP is B and must be S(0)"
