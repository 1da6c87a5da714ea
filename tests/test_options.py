"""What launch.sh makes of its command line, before any rank starts."""

import os
import re
import shutil
import subprocess

import pytest

from harness.jobs.run import LAUNCH, Run
from harness.start.errors import UsageError
from harness.start.options import NO_SUCH_SCRIPT, checked, parser
from harness.start.recipe import find, path_of
from tests.cases import ROOT
from tests.markdown import CLUSTERS

FOR_USERS, FOR_MAINTAINERS = ("list", "show", "bytes", "test"), ("mutate", "docs", "meshes", "faults", "bench")


@pytest.fixture(scope="module")
def shown():
    """What --help shows."""
    return subprocess.run([LAUNCH, "--help"], check=True, stdout=subprocess.PIPE, text=True).stdout


def test_help_is_a_screen(shown):
    assert len(shown.splitlines()) <= 35 and max(map(len, shown.splitlines())) <= 80


def test_help_shows_the_commands_of_users_and_contributing_those_of_maintainers(shown):
    assert all(f"./launch.sh {command}" in shown for command in FOR_USERS)
    assert not [command for command in FOR_MAINTAINERS if f"./launch.sh {command}" in shown]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"| `./launch.sh {command}" in contributing for command in FOR_MAINTAINERS)


def test_every_option_is_on_the_page_of_clusters_and_no_other_is_in_the_help(shown):
    names = [set(action.option_strings) for action in parser()._actions if action.option_strings]
    section = CLUSTERS.read_text().partition("## All options\n")[2].partition("\n## ")[0]
    rows = {line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `-")}
    documented = [set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)) for row in rows]
    assert all(any(row & option for row in documented) for option in names)
    assert all(any(row <= option for option in names) for row in documented)
    options = shown.partition("\noptions\n")[2]
    assert set(re.findall(r"^  (--?[\w-]+)", options, flags=re.MULTILINE)) <= set.union(*names, {"-h"})


@pytest.mark.parametrize("name", ["two_d_sbp", "two_d_sbp.py", "recipes/layouts/two_d_sbp.py"])
def test_recipe_is_found_by_its_path_and_by_its_bare_name(name):
    assert find(name).resolve() == path_of("two_d_sbp")


def test_on_one_host_no_address_is_needed():
    assert checked(["--master_addr", "10.9.9.9", DATA]).master_addr == "127.0.0.1"


DATA, HYBRID = "recipes/data_parallel.py", "recipes/hybrid_parallel.py"
BAD_INPUT = {
    f"-n 1 {DATA}": "data_parallel.py runs on 2 to 64 ranks, not on 1: type -n 2",
    f"-n 3 {HYBRID}": "hybrid_parallel.py runs on 4 ranks, not on 3: type -n 4",
    "-n 2 recipes/single_device.py": "single_device.py runs on 1 ranks, not on 2: type -n 1",
    f"-n 0 {DATA}": "-n must be 1 or more, got 0",
    f"-n two {DATA}": "argument -n/--nproc_per_node/--nproc-per-node: invalid int value: 'two'",
    f"--nproc 2 {DATA}": "unrecognized arguments: --nproc; see ./launch.sh --help",
    "-n 2": "name a Python script, such as recipes/data_parallel.py",
    f"--timeout -1 {DATA}": "--timeout must be a number of seconds, or 0 for no limit, got -1",
    f"--silent -1 {DATA}": "--silent must be a number of seconds, or 0 for never, got -1",
    f"--master_port 80 {DATA}": "--master_port must be from 1024 to 65535, got 80",
    "recipes/data_paralel.py": f"recipes/data_paralel.py: {NO_SUCH_SCRIPT}",
    "recipes": f"recipes: {NO_SUCH_SCRIPT}",
    "launch.sh": "(launch.sh, line ",
    f"--nnodes 0 {HYBRID}": "--nnodes must be 1 or more, got 0",
    f"--nnodes 2 --node_rank 2 {HYBRID}": "--node_rank must be from 0 to 1 with --nnodes 2, got 2",
    f"--nnodes 2 {HYBRID}": "--nnodes needs node 0's address, the same on each node: --master_addr HOST --master_port",
    f"--nnodes 3 --master_addr 127.0.0.1 --master_port 29500 {HYBRID}": "on 4 ranks, not on 3 (1 on each of 3 nodes)",
}


def test_job_has_no_time_limit_by_default():
    assert checked([DATA]).timeout is None


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(line):
    with pytest.raises(UsageError) as refused:
        checked(line.split())
    assert BAD_INPUT[line] in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("WORLD_SIZES = (2, 4)", "mine.py runs on 2 or 4 ranks, not on 3: type -n 2"),
        ("WORLD_SIZES = ()", "mine.py: WORLD_SIZES must be range(first, last + 1) or a tuple of numbers of ranks"),
        ("WORLD_SIZES = range(0, 3)", "mine.py: WORLD_SIZES must be range(first, last + 1) or a tuple"),
        ("WORLD_SIZES = sizes()", "mine.py: WORLD_SIZES must be range(first, last + 1) or a tuple"),
        ("x = '\0'", "mine.py: "),
    ],
)
def test_script_whose_world_sizes_do_not_fit_is_refused(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError) as refused:
        checked(["-n", "3", str(tmp_path / "mine.py")])
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "gpus, usable", [("8.0", 1), ("9.0\\n9.0", 0), ("8.0\\n12.0", 1), ("5.2\\n5.2", 0), ("8.9\\n7.0", None), (None, 0)]
)
def test_cuda_is_refused_where_a_rank_has_no_gpu_that_works(monkeypatch, tmp_path, gpus, usable):
    """The compute capabilities that nvidia-smi tells, or no nvidia-smi, and how many of the GPUs can be used."""
    if gpus:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpus}\\n'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if gpus else str(tmp_path))
    command = ["-n", "2", DATA, "--device", "cuda"]
    if usable is None:
        assert checked(command).nproc_per_node == 2
    else:
        with pytest.raises(UsageError, match=f"capability 6.0 to 8.9, got {usable} for 2: type --device cpu"):
            checked(command)


def test_a_typing_error_sets_nothing_up(tmp_path):
    shutil.copy(ROOT / "launch.sh", tmp_path)
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    job = Run(str(tmp_path / "launch.sh"), "paln", "--num-layers", "4").wait()
    assert (job.code, job.err.strip()) == (2, f"launch.sh: paln: {NO_SUCH_SCRIPT}")
    assert not (tmp_path / ".venv").exists()
