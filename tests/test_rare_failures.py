"""Fixes of failures that are too rare to wait for, or show only after a crash: the tests look for the fix itself."""

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

import pytest

from oneflow_cookbook.start.recipe import load, path_of


@contextlib.contextmanager
def recorded():
    """Record calls of rmtree, fsync and rename, in order: (operation, {path: size}), with the sizes at that time.

    The size of a folder is how many files are in it.
    """
    from oneflow_cookbook.measure.calls import replaced

    fsync, replace, rmtree, operations = os.fsync, os.replace, shutil.rmtree, []

    def sizes(path):
        paths = [inner for inner in [path, *path.rglob("*")] if inner.exists()]
        return {str(p): len(list(p.iterdir())) if p.is_dir() else p.stat().st_size for p in paths}

    def recording_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        operations.append(("on disk", {str(path): sizes(path)[str(path)]}))
        fsync(descriptor)

    def recording_replace(source, target):
        operations.append(("named", sizes(Path(source))))
        replace(source, target)

    def recording_rmtree(folder, **options):
        operations.append(("removed", {str(folder): 0}))
        rmtree(folder, **options)

    recording = {(os, "fsync"): recording_fsync, (os, "replace"): recording_replace}
    with replaced({**recording, (shutil, "rmtree"): recording_rmtree}):
        yield operations


def check_order(operations, folder, names):
    """Every file is fsynced before it is renamed, and the rename before the next step; `names` times."""
    on_disk, named = {}, 0
    for operation, sizes in [*operations, ("ended", {})]:
        if operation == "named":
            assert sizes.items() <= on_disk.items() and f"{folder}/unfinished/left" not in sizes
            on_disk, named = {}, named + 1
        elif operation == "on disk":
            on_disk.update(sizes)
        elif named:  # removed, met, or ended
            assert str(folder) in on_disk, "the folder with the new name"
    assert named == names


def train_and_save(path, **arguments):
    """On a rank: the operations on files of a training. After a save each rank sees the new checkpoint."""
    import oneflow as flow

    from oneflow_cookbook.measure.entry import call_entry

    module = load(path)
    save = module.Checkpoints.save

    def save_and_meet(*positional):
        save(*positional)
        flow.comm.barrier()

    module.Checkpoints.save = save_and_meet
    with recorded() as operations:
        call_entry(module, arguments)
    return operations


def test_checkpoint_is_fsynced_before_its_rename_and_old_ones_are_removed_after(pools, tmp_path):
    """Else a host that loses power may come back with the name and without the data, or with no checkpoint at all."""
    (tmp_path / "unfinished").mkdir()  # as a crash may leave it
    (tmp_path / "unfinished" / "left").touch()
    arguments = {"path": str(path_of("checkpoint")), "checkpoint_dir": str(tmp_path), "keep": 1}
    operations, of_rank_1 = pools(2).call(f"{__file__}:train_and_save", **arguments)
    check_order(operations, tmp_path, names=2)
    assert of_rank_1 == []  # rank 0 alone removes, writes and names


def save_safetensors(path, target):
    """On a rank: the operations on files of saving a model, and when it meets the others."""
    import oneflow as flow

    from oneflow_cookbook.measure.calls import replaced

    module, barrier = load(path), flow.comm.barrier
    model = module.lay_out(module.Classifier(), flow.placement.all("cpu"))

    def recording_barrier():
        operations.append(("met", os.path.getsize(target) if flow.env.get_rank() == 0 else 0))
        barrier()

    with recorded() as operations, replaced({(flow.comm, "barrier"): recording_barrier}):
        module.save_safetensors(model, Path(target))
    return operations


def test_file_of_pytorch_weights_is_on_disk_before_it_gets_its_name_and_named_before_the_ranks_go_on(pools, tmp_path):
    target = tmp_path / "model.safetensors"
    arguments = {"path": str(path_of("pytorch_weights")), "target": str(target)}
    operations, of_rank_1 = pools(2).call(f"{__file__}:save_safetensors", **arguments)
    check_order(operations, tmp_path, names=1)
    assert operations[-1] == ("met", target.stat().st_size) and of_rank_1 == [("met", 0)]


def resumed(path, checkpoint_dir, graph):
    """On a rank: (weight, losses) of a training up to step 4 in one run, in two, and again from its last checkpoint."""
    import oneflow as flow

    results, ranks, module = [], flow.placement.all("cpu"), load(path)
    module.train(ranks, graph, steps=3, checkpoint_dir=checkpoint_dir)
    for folder in (None, checkpoint_dir, checkpoint_dir):
        model, losses = module.train(ranks, graph, steps=4, checkpoint_dir=folder)
        results.append((model.w.numpy(), losses))
    return results


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_elastic_training_that_resumes_has_the_bits_of_one_in_one_run(pools, tmp_path, graph):
    arguments = {"path": str(path_of("elastic_training")), "checkpoint_dir": str(tmp_path), "graph": graph}
    for results in pools(2).call(f"{__file__}:resumed", **arguments):
        (weight, losses), *others = results
        assert len(losses) == 4 and all((w == weight).all() and own == losses for w, own in others)


def last_step(path, folders):
    """On a rank: the step that elastic_training.py prints, where each rank sees a folder of its own."""
    import oneflow as flow

    return load(path).last_step(folders[flow.env.get_rank()])


def test_last_step_is_that_of_rank_0(pools, tmp_path):
    """As on a host without the shared file system: else some ranks would die again, and others not."""
    for folder in ("seen", "seen/4", "seen/unfinished", "empty"):
        (tmp_path / folder).mkdir()
    arguments = {"path": str(path_of("elastic_training")), "folders": [str(tmp_path / "seen"), str(tmp_path / "empty")]}
    assert pools(2).call(f"{__file__}:last_step", **arguments) == [4, 4]


def addresses_by_file(path, target):
    """On a rank: where rendezvous.py finds rank 0 as rank 0 and as rank 1, and what is in the file when it is named."""
    from oneflow_cookbook.measure.calls import replaced

    replace, environment, addresses, written = os.replace, dict(os.environ), [], []

    def recording_replace(source, name):
        written.append((Path(source).read_text(), str(name)))
        replace(source, name)

    module = load(path)
    with replaced({(os, "replace"): recording_replace}):
        for rank in "01":
            os.environ["RANK"] = rank
            module.init_by_file(target)
            addresses.append("{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ))
    os.environ.clear()
    os.environ.update(environment)
    return addresses, written


def test_rendezvous_file_gets_its_name_when_it_is_complete(pools, tmp_path):
    """Else a rank may read half of an address. And rank 0 alone writes it."""
    target, path = str(tmp_path / "job"), str(path_of("rendezvous"))
    [[[address, of_rank_1], written]] = pools(1).call(f"{__file__}:addresses_by_file", path=path, target=target)
    assert address == of_rank_1 and written == [(address, target)] and os.listdir(tmp_path) == ["job"]


def checked_shard(path, shift):
    """On a rank: what hello_ranks.py prints of its shard, and its exit codes, if its rank were higher by `shift`."""
    from oneflow_cookbook.measure.calls import replaced

    module, rank, printed, codes = load(path), int(os.environ["RANK"]), io.StringIO(), []
    replacements = {(module.flow.env, "get_rank"): lambda: rank + shift, (os, "_exit"): codes.append}
    with replaced({**replacements, (sys, "stderr"): printed}):
        module.check_shard("cpu")
    return printed.getvalue(), codes


@pytest.mark.parametrize("shift", [0, 1])
def test_hello_ranks_ends_the_job_if_a_rank_has_the_shard_of_another(pools, shift):
    """As where two ranks of a host have the same LOCAL_RANK."""
    results = pools(2).call(f"{__file__}:checked_shard", path=str(path_of("hello_ranks")), shift=shift)
    for rank, result in enumerate(results):
        message = f"rank {rank + 1} holds [{rank}] in place of [{rank + 1}]: unset LOCAL_RANK\n"
        assert result == ((message, [1]) if shift else ("", []))
