"""Folders of checkpoints: one job at a time, nothing but whole checkpoints of this run, and nothing lost."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from oneflow_cookbook.start.recipe import load, path_of
from tests.cases.ladder import MAIN
from tests.jobs import LAUNCH, Run, steps_in

RECIPES = ["checkpoint", "training_run", "elastic_training", pytest.param("gpt", marks=pytest.mark.slow)]
CHECKPOINT = str(path_of("checkpoint"))
FIXED = {"format": "mine 1", "size": 4}
SMALL = {"gpt": ["--hidden-size", "16", "--batch-size", "8", "--num-layers", "2"]}


def saved(path, folders, steps, keep=0, must_match=FIXED):
    """On a rank: save these steps in the rank's own folder; the newest step then, or the error.

    Each checkpoint holds a tensor in which every number is the step.
    """
    import oneflow as flow

    module, ranks = load(path), flow.placement.all("cpu")
    try:
        checkpoints = module.Checkpoints(folders[flow.env.get_rank()], keep, must_match)
        for step in steps:
            w = flow.full((4, 2), step, dtype=flow.float32, placement=ranks, sbp=flow.sbp.split(0))
            checkpoints.save({"w": w}, step)
        return checkpoints.newest()
    except module.CheckpointError as error:
        return str(error)


def save(pools, folder, *steps, **more):
    """The answer of two ranks, the second of which sees another folder, as on a host without the shared disk."""
    folder.parent.mkdir(exist_ok=True)
    answers = pools(2).call(
        f"{__file__}:saved", path=CHECKPOINT, folders=[str(folder), "/dev/null"], steps=steps, **more
    )
    assert answers[0] == answers[1]
    return answers[0]


def test_newest_checkpoint_is_the_last_step_and_not_the_last_name(pools, tmp_path):
    assert save(pools, tmp_path) == 0
    assert save(pools, tmp_path, 9, 20, 100) == 100 and steps_in(tmp_path) == [9, 20, 100]


def test_keep_removes_the_oldest(pools, tmp_path):
    save(pools, tmp_path, 9, 20, 100, keep=2)
    assert steps_in(tmp_path) == [20, 100]


def test_older_checkpoints_stay_if_the_new_one_cannot_be_saved(pools, tmp_path):
    save(pools, tmp_path, 1, 2)
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "of somebody else").touch()
    with pytest.raises(Exception, match="OSError.*Directory not empty"):
        save(pools, tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [1, 2, 3] and os.listdir(tmp_path / "3") == ["of somebody else"]


def test_job_leaves_alone_what_another_is_saving(pools, tmp_path):
    """What a job without the lock may do; whoever has the lock removes what dead jobs have left."""
    (tmp_path / "unfinished-dead-1").mkdir()
    assert save(pools, tmp_path, 1) == 1 and sorted(os.listdir(tmp_path)) == ["1", "lock"]
    names = os.listdir(tmp_path / "1")
    [(mine, error)] = pools(1).call(f"{__file__}:saved_beside_another", path=CHECKPOINT, folder=str(tmp_path))
    assert sorted(mine) == ["1", "2", "lock", "unfinished-other-1"] and "BlockingIOError" in error[0]
    assert os.listdir(tmp_path / "unfinished-other-1") == ["half"] and len(os.listdir(tmp_path / "2")) == len(names)


def saved_beside_another(path, folder):
    import oneflow as flow

    checkpoints = load(path).Checkpoints(folder, 0, FIXED)
    os.mkdir(f"{folder}/unfinished-other-1")
    open(f"{folder}/unfinished-other-1/half", "w").close()
    w = flow.ones(4, 2, placement=flow.placement.all("cpu"), sbp=flow.sbp.broadcast)
    checkpoints.save({"w": w}, 2)
    take = f"import fcntl; fcntl.lockf(open('{folder}/lock', 'a+'), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", take], stderr=subprocess.PIPE, text=True, timeout=60)
    return os.listdir(folder), other.stderr.splitlines()[-1:]


def test_what_is_not_a_checkpoint_is_neither_removed_nor_read(pools, tmp_path):
    for name in ("0", "008", "unfinished-drafts", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of the user").touch()
    (tmp_path / "7").symlink_to(tmp_path / "elsewhere")
    assert save(pools, tmp_path, 1, 2, keep=1) == 2
    names = ["0", "008", "2", "7", "elsewhere", "lock", "unfinished-drafts"]
    assert sorted(os.listdir(tmp_path)) == names and (tmp_path / "unfinished-drafts" / "of the user").exists()


def test_renamed_checkpoint_is_refused(pools, tmp_path):
    save(pools, tmp_path, 2)
    (tmp_path / "2").rename(tmp_path / "40")
    assert save(pools, tmp_path).startswith(f"{tmp_path}/40 is that of step 2: no older one can be used")


def test_settings_are_compared_as_they_are_read_again(pools, tmp_path):
    settings = {"must_match": {"sizes": (4, 4), "by step": {1: 2}}}
    assert save(pools, tmp_path, 1, **settings) == save(pools, tmp_path, **settings) == 1


def saved_after_removal(path, folder):
    """On a rank: the error of a save whose folder another job has removed and made again."""
    import oneflow as flow

    module = load(path)
    checkpoints = module.Checkpoints(folder, 0, FIXED)
    if flow.env.get_rank() == 0:
        shutil.rmtree(folder)
        os.mkdir(folder)
        open(f"{folder}/lock", "w").close()
    try:
        checkpoints.save({"step": 1}, 1)
    except module.CheckpointError as error:
        return str(error)


def test_job_whose_folder_was_removed_saves_nothing_in_the_new_one(pools, tmp_path):
    folder = tmp_path / "removed"
    answers = pools(2).call(f"{__file__}:saved_after_removal", path=CHECKPOINT, folder=str(folder))
    assert answers == [f"{folder} was removed or moved while this job ran: it saves nothing there"] * 2
    assert os.listdir(folder) == ["lock"]


@pytest.mark.parametrize("name", RECIPES)
def test_folder_that_another_job_uses_is_refused_before_training(tmp_path, name):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        lock.write("process 7 on host-a")
        lock.flush()
        run = Run(LAUNCH, "-n", 2, name, "--checkpoint-dir", tmp_path).wait()
    assert (run.code, os.listdir(tmp_path)) == (2, ["lock"]), run.err
    advice = "end that job, or use a different folder"
    assert run.err == f"{path_of(name).name}: error: {tmp_path} is in use by process 7 on host-a: {advice}\n"


def test_lock_names_the_process_and_goes_with_it(pools, tmp_path):
    save(pools, tmp_path)
    text = (tmp_path / "lock").read_text()
    assert text.split()[0] == "process" and text.endswith(f" on {os.uname().nodename}")
    with open(tmp_path / "lock", "a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def other_numbers(folder):
    """As many as before."""
    path = next(folder.glob("*/out"))
    path.write_bytes(b"\x41" * path.stat().st_size)


DAMAGES = {  # name -> what is done to a checkpoint, and what the line says of it
    "cut": (lambda folder: os.truncate(next(folder.glob("*/out")), 3), r"is damaged, as \w+/out is not what was saved"),
    "of another job": (other_numbers, r"is damaged, as \w+/out is not what was saved"),
    "removed": (lambda folder: next(folder.glob("*/meta")).unlink(), r"is damaged \(.*No such file.*/meta'\)"),
    "state cut": (lambda folder: os.truncate(folder / "pickled_data", 3), "is damaged, as pickled_data is not what"),
    "list cut": (lambda folder: os.truncate(folder / "checkpoint.json", 9), r"is damaged \("),
    "list of others": (lambda folder: (folder / "checkpoint.json").write_text("[]"), r"is damaged \("),
    "without list": (lambda folder: (folder / "checkpoint.json").unlink(), "has no checkpoint.json, so an earlier "),
    "empty": (lambda folder: [shutil.rmtree(folder), folder.mkdir()], "has no checkpoint.json"),
    "a file": (lambda folder: [shutil.rmtree(folder), folder.touch()], "has no checkpoint.json"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_with_the_older_one_that_is_good(pools, tmp_path, damage):
    change, words = DAMAGES[damage]
    save(pools, tmp_path, 1, 2, 3)
    for step in "23":
        change(tmp_path / step)
    error = save(pools, tmp_path)
    advice = f": {tmp_path}/1 is good; to resume from it, move the newer ones out of {tmp_path}"
    assert error.startswith(f"{tmp_path}/3 ") and error.endswith(advice)
    assert re.search(words, error), error
    change(tmp_path / "1")
    assert save(pools, tmp_path).endswith(": no older one can be used; to start anew, use a different folder")


def test_checkpoint_of_another_run_is_refused_by_what_differs(pools, tmp_path):
    save(pools, tmp_path, 1)
    error = save(pools, tmp_path, must_match={"format": "mine 2", "size": 8})
    assert error.startswith(f"{tmp_path}/1 has format mine 1, this job mine 2, has size 4, this job 8: no older one")
    assert save(pools, tmp_path, must_match={"format": "mine 1"}).startswith(f"{tmp_path}/1 has size 4, this job None:")


def job(pools, name, folder, *options):
    """(exit code, output, errors) of each rank of a recipe that trains in this folder."""
    arguments = [*SMALL.get(name, []), "--checkpoint-dir", str(folder), *map(str, options)]
    return pools(2).call(MAIN, path=str(path_of(name)), arguments=arguments)


def facts_of(folder):
    return json.loads((folder / "checkpoint.json").read_text())["must_match"]


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("checkpoint", ["--graph"], "has mode eager, this job graph: "),
        ("elastic_training", ["--graph"], "has mode eager, this job graph: "),
        pytest.param("gpt", ["--num-heads", 8], "has --num-heads 4, this job 8: ", marks=pytest.mark.slow),
    ],
)
def test_option_that_must_stay_is_named(pools, tmp_path, name, options, words):
    assert [code for code, *_ in job(pools, name, tmp_path, "--steps", 2)] == [0, 0]
    assert facts_of(tmp_path / "2")["format"] == f"{name} 1"
    for code, _, err in job(pools, name, tmp_path, "--steps", 4, *options):
        assert code == 2 and f": error: {tmp_path}/2 {words}" in err


@pytest.mark.parametrize(
    "name, options, line",
    [
        ("training_run", ["--micro-batches", 4], "changed since then: micro_batches 2 -> 4"),
        pytest.param("gpt", ["--clip-grad", 1], "changed since then: --clip-grad 0.0 -> 1.0", marks=pytest.mark.slow),
    ],
)
def test_option_that_may_change_is_said(pools, tmp_path, name, options, line):
    job(pools, name, tmp_path, "--steps", 4)
    (code, out, _), (_, other, _) = job(pools, name, tmp_path, "--steps", 8, *options)
    begin = f"resumes after step 4, from {tmp_path}/4"
    assert code == 0 and out[out.index(begin) :].startswith(f"{begin}\n{line}\nstep ") and begin not in other


@pytest.mark.parametrize("name", RECIPES)
def test_keep_is_an_option_of_each_recipe(pools, tmp_path, name):
    for code, *_ in job(pools, name, tmp_path, "--steps", 6, "--save-every", 1, "--keep", 1):
        assert code == 0
    assert steps_in(tmp_path) == [6]
    for code, _, err in job(pools, name, tmp_path, "--keep", -1):
        assert code == 2 and err.endswith("error: --keep -1: 0 or more\n")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "folder, words",
    [
        ("/proc/checkpoints", "error: [Errno 2] No such file or directory: '/proc/checkpoints'\n"),
        ("", "error: --checkpoint-dir is empty\n"),
    ],
)
def test_folder_that_cannot_be_made_is_refused(pools, name, folder, words):
    for code, _, err in job(pools, name, folder):
        assert code == 2 and err.endswith(words)
