"""Cures of traps whose harm is too rare to wait for, or shows only after a crash: the cure itself is looked for."""

import io
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from harness.start.recipe import load, path_of


def saving(path, **arguments):
    """On a rank: train, and return what is cleared, put on disk, and named with which files, in this order."""
    from harness.measure.calls import replaced
    from harness.measure.entry import call_entry

    fsync, replace, rmtree, done = os.fsync, os.replace, shutil.rmtree, []

    def sizes(place):
        """The bytes of each file that is there, by name; of a folder how many files are in it."""
        inside = [one for one in [place, *place.rglob("*")] if one.exists()]
        return {str(one): len(list(one.iterdir())) if one.is_dir() else one.stat().st_size for one in inside}

    def recording_fsync(descriptor):
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("on disk", {str(place): sizes(place)[str(place)]}))
        fsync(descriptor)

    def recording_replace(source, target):
        done.append(("named", sizes(Path(source))))
        replace(source, target)

    def recording_rmtree(folder, **options):
        done.append(("cleared", {str(folder): 0}))
        rmtree(folder, **options)

    recording = {(os, "fsync"): recording_fsync, (os, "replace"): recording_replace}
    with replaced({**recording, (shutil, "rmtree"): recording_rmtree}):
        call_entry(load(path), arguments)
    return done


TINY = {"batch_size": 2, "seq_len": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 2}
SAVING_TWICE = {
    "checkpoint": {},
    "elastic_training": {},
    "gpt": {"steps": 2, "save_every": 1, **TINY},
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", SAVING_TWICE)
def test_checkpoint_is_on_disk_before_it_gets_its_name_and_so_is_the_name_before_another_goes(
    pools, tmp_path, name, graph
):
    """Else a host that loses power may come back with the name and without the data, or with no checkpoint at all."""
    (tmp_path / "unfinished").mkdir()  # a crash may leave one
    (tmp_path / "unfinished" / "left").touch()
    arguments = {"path": str(path_of(name)), "checkpoint_dir": str(tmp_path), "graph": graph, **SAVING_TWICE[name]}
    done, other = pools(2).call(f"{__file__}:saving", **arguments)
    on_disk, times = {}, 0
    for what, sizes in [*done, ("ended", {})]:
        if what == "named":
            assert sizes.items() <= on_disk.items() and f"{tmp_path}/unfinished/left" not in sizes
            on_disk, times = {}, times + 1
        elif what == "on disk":
            on_disk.update(sizes)
        elif times:  # cleared, or ended
            assert str(tmp_path) in on_disk, "the folder with the new name"
    assert times == 2 and other == []  # rank 0 alone clears, writes and names


def resumed(path, checkpoint_dir, graph):
    """On a rank: (weight, losses) of a training up to step 4 in one run, in two, and again from its last checkpoint."""
    import oneflow as flow

    found, ranks, module = [], flow.placement.all("cpu"), load(path)
    module.train(ranks, graph, steps=3, checkpoint_dir=checkpoint_dir)
    for where in (None, checkpoint_dir, checkpoint_dir):
        model, losses = module.train(ranks, graph, steps=4, checkpoint_dir=where)
        found.append((model.w.numpy(), losses))
    return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_training_that_resumes_has_the_bits_of_one_in_one_run(pools, tmp_path, graph):
    arguments = {"path": str(path_of("elastic_training")), "checkpoint_dir": str(tmp_path), "graph": graph}
    for results in pools(2).call(f"{__file__}:resumed", **arguments):
        (weight, losses), *others = results
        assert len(losses) == 4 and all((w == weight).all() and own == losses for w, own in others)
    assert os.listdir(tmp_path) == ["4"]  # the last one, alone


STEP_OF = {"elastic_training": "last_step", "gpt": "newest_checkpoint"}


def step_found(path, name, folders):
    """On a rank: the step of the newest checkpoint, where each rank sees a folder of its own."""
    import oneflow as flow

    return getattr(load(path), name)(folders[flow.env.get_rank()])


@pytest.mark.parametrize("name", STEP_OF)
def test_ranks_that_do_not_see_the_checkpoints_resume_where_rank_0_does(pools, tmp_path, name):
    """As on a host without the shared file system: else each rank would start from a different step."""
    for folder in ("seen", "seen/4", "empty"):
        (tmp_path / folder).mkdir()
    arguments = {"path": str(path_of(name)), "name": STEP_OF[name]}
    folders = [str(tmp_path / "seen"), str(tmp_path / "empty")]
    assert pools(2).call(f"{__file__}:step_found", folders=folders, **arguments) == [4, 4]


def addresses_by_file(path, where):
    """On a rank: where rendezvous.py finds rank 0 as rank 0 and as rank 1, and what is in the file when it is named."""
    from harness.measure.calls import replaced

    replace, before, found, written = os.replace, dict(os.environ), [], []

    def recording_replace(source, target):
        written.append((Path(source).read_text(), str(target)))
        replace(source, target)

    module = load(path)
    with replaced({(os, "replace"): recording_replace}):
        for rank in "01":
            os.environ["RANK"] = rank
            module.init_by_file(where)
            found.append("{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ))
    os.environ.clear()
    os.environ.update(before)
    return found, written


def test_file_by_which_ranks_meet_gets_its_name_when_it_is_whole(pools, tmp_path):
    """Else a rank may read half of an address. And rank 0 alone writes it."""
    where, path = str(tmp_path / "job"), str(path_of("rendezvous"))
    [[[address, of_rank_1], written]] = pools(1).call(f"{__file__}:addresses_by_file", path=path, where=where)
    assert address == of_rank_1 and written == [(address, where)] and os.listdir(tmp_path) == ["job"]


def checked_shard(path, others):
    """On a rank: what hello_ranks.py prints of its shard, and its exit code, if it is the rank `others` further on."""
    from harness.measure.calls import replaced

    module, rank, said, codes = load(path), int(os.environ["RANK"]), io.StringIO(), []
    places = {(module.flow.env, "get_rank"): lambda: rank + others, (os, "_exit"): codes.append, (sys, "stderr"): said}
    with replaced(places):
        module.check_shard("cpu")
    return said.getvalue(), codes


@pytest.mark.parametrize("others", [0, 1])
def test_shard_of_another_rank_ends_the_job(pools, others):
    """As where two ranks of a host have the same LOCAL_RANK."""
    seen = pools(2).call(f"{__file__}:checked_shard", path=str(path_of("hello_ranks")), others=others)
    for rank, found in enumerate(seen):
        message = f"rank {rank + 1} holds [{rank}] in place of [{rank + 1}]: unset LOCAL_RANK\n"
        assert found == ((message, [1]) if others else ("", []))


def end_of_rank_0(path):
    """On the one rank: what a spawn.py raises whose rank 1 raises while rank 0 works on, and rank 0's exit code.

    And whether the environment is then as it was.
    """
    from harness.measure.calls import replaced

    module, kind, started = load(path), multiprocessing.get_context("spawn").Process, []
    start, own_rank = kind.start, os.environ.pop("RANK")
    before = dict(os.environ)

    def recording_start(process):
        started.append(process)
        start(process)

    with replaced({(kind, "start"): recording_start}):
        try:
            module.run(ranks=2)
        except RuntimeError as error:
            says = str(error)
    started[0].join()
    left_as_it_was = os.environ == before
    os.environ["RANK"] = own_rank
    return says, started[0].exitcode, left_as_it_was


def test_program_whose_spawned_rank_raises_kills_the_others(pools, tmp_path):
    """OneFlow itself would end them only some 10 s later."""
    text, path = path_of("spawn").read_text(), tmp_path / "mine.py"
    line = "    out = model(x)\n"
    assert text.count(line) == 1
    path.write_text(text.replace(line, "    1 / (1 - flow.env.get_rank())\n    time.sleep(1000)\n"))
    wanted = ("rank 1 of 2 died: exit code 1", -signal.SIGKILL, True)
    assert pools(1).call(f"{__file__}:end_of_rank_0", path=str(path)) == [wanted]
