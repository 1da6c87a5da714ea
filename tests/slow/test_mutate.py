"""The command that breaks recipes on purpose finds the places to break, and tells red from green."""

from benchmarks import mutate
from harness.start.recipe import path_of
from tests.cases import CASES, WITHOUT_CASE
from tests.cases.ladder import OBSERVE

# What a lesson says -> how many mutants each place has, at least, that begin with it.
PLACES = {
    **dict.fromkeys(("flow.sbp.broadcast", "flow.sbp.split(", "flow.sbp.partial_sum"), 3),
    "flow.placement(": 4,
    "flow._C.identity(": 1,
    "os.replace(": 1,
    "os.fsync(": 1,
    "os._exit(": 1,
}
# The same of what stands behind a name, such as update.zero_grad(set_to_none=True).
METHODS = {".set_stage(": 5, ".set_epoch(": 1, ".zero_grad(": 1, ".kill()": 1, "set_to_none": 1, "grad_sbp": 1}


def test_every_recipe_is_broken_in_every_layout_and_every_cure_that_it_states():
    for name in (*CASES, *WITHOUT_CASE):
        source = path_of(name).read_text()
        changes = [change.split(" -> ")[0] for _, change, _ in mutate.mutants(source)]
        lesson = mutate.lesson(source)[source.index("\nimport") :]  # without the docstring
        lesson = "".join(line.split("#")[0] for line in lesson.splitlines(keepends=True))
        for words, times in PLACES.items():
            assert sum(change.startswith(words) for change in changes) >= times * lesson.count(words), (name, words)
        for words, times in METHODS.items():
            assert sum(words in change for change in changes) >= times * lesson.count(words), (name, words)
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


def test_pipeline_without_identity_is_red_whatever_its_weights_are(pools, tmp_path):
    """They come out wrong in a few of 100 trainings; what the graph reads is the same in all."""
    source, path = path_of("train_pipeline").read_text(), tmp_path / "train_pipeline.py"
    [changed] = [new for _, change, new in mutate.mutants(source) if change.startswith("flow._C.identity")]
    path.write_text(changed)
    assert mutate.first_red(pools, path, "train_pipeline")
    for micro_batches, wrong in ((1, []), (2, ["model.0.w", "model.1.w"])):
        seen = pools(2).call(OBSERVE, path=str(path), graph=True, micro_batches=micro_batches)
        assert [one["without_identity"] for one in seen] == [wrong] * 2


def test_changed_recipe_is_seen_by_tests_of_its_own(tmp_path, monkeypatch):
    path = tmp_path / "single_device.py"
    path.write_text(path_of("single_device").read_text().replace("flow.matmul(x, self.w)", "flow.matmul(x, -self.w)"))
    monkeypatch.setitem(mutate.TESTS, "single_device", ["tests/test_recipes.py", "-k", "single_device-1-eager-even"])
    assert "test_proof_ladder" in mutate.red_test(path, "single_device")
    monkeypatch.setitem(mutate.TESTS, "single_device", ["tests/test_cures.py", "-k", "no_such_test"])
    assert mutate.red_test(path, "single_device") == "pytest ended with 5"
