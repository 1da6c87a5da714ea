"""The command line of launch.sh, before any rank starts: what is accepted, and what is refused in one line."""

import re
import shutil
import socket
import subprocess

import pytest

from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.options import NO_SUCH_SCRIPT, checked, parser
from oneflow_cookbook.start.ranks import RankAssignment
from oneflow_cookbook.start.recipe import find, path_of
from tests.cases import ROOT
from tests.jobs import LAUNCH, Run
from tests.markdown import CLUSTERS


def test_help_fits_a_screen_and_shows_known_commands_and_options():
    """Each option is in the help or on the page of clusters, and no other."""
    shown = subprocess.run([LAUNCH, "--help"], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert len(shown.splitlines()) <= 35 and max(map(len, shown.splitlines())) <= 80
    assert all(f"./launch.sh {command}" in shown for command in ("list", "show", "bytes", "test"))
    names = [set(action.option_strings) for action in parser()._actions if action.option_strings]
    section = CLUSTERS.read_text().partition("## All options\n")[2].partition("\n## ")[0]
    heads = [line.split(": ")[0] for line in section.splitlines() if line.startswith("- **`-")]
    documented = {option for head in heads for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", head)}
    helped = set(re.findall(r"^  (--?[\w-]+)", shown.partition("\noptions\n")[2], flags=re.MULTILINE))
    assert {"-n", "--timeout", "--silent", "--grace", "--log-dir", "-m"} <= helped
    assert all(option & (documented | helped) for option in names) and documented | helped <= set.union(*names, {"-h"})


@pytest.mark.parametrize("name", ["two_d_sbp", "two_d_sbp.py", "recipes/layouts/two_d_sbp.py"])
def test_recipe_is_found_by_its_path_and_by_its_bare_name(name):
    assert find(name).resolve() == path_of("two_d_sbp")


def test_module_is_found_without_being_imported(tmp_path, monkeypatch):
    """In the current folder, also where a module of ours has its name; all that follows are its arguments."""
    for name in ("harness/train.py", "harness/tool/__main__.py", "namespace/inner/it.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("WORLD_SIZES = (3,)\n")
    (tmp_path / "harness" / "__init__.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    for name, module, file in [
        ("harness.train", "harness.train", "harness/train.py"),
        ("harness.tool", "harness.tool.__main__", "harness/tool/__main__.py"),
        ("namespace.inner.it", "namespace.inner.it", "namespace/inner/it.py"),
    ]:
        options = checked(["--timeout", "9", "-m", name, "--timeout", "8", "-m", "x"])
        assert (options.module, options.script, options.nproc_per_node, options.timeout) == (module, file, 3, 9.0)
        assert options.arguments == ["--timeout", "8", "-m", "x"]


DATA, HYBRID = "recipes/data_parallel.py", "recipes/hybrid_parallel.py"
AT = "--master_addr 127.0.0.1 --master_port 29500"
BAD_INPUT = {
    f"-n 1 {DATA}": "data_parallel.py runs on 2 to 4 ranks, not on 1: type -n 2",
    f"-n 3 {HYBRID}": "hybrid_parallel.py runs on 4 ranks, not on 3: type -n 4",
    "-n 2 recipes/single_device.py": "single_device.py runs on 1 ranks, not on 2: type -n 1",
    f"-n 0 {DATA}": "-n must be 1 or more, got 0",
    f"-n two {DATA}": "argument -n/--nproc_per_node/--nproc-per-node: invalid int value: 'two'",
    f"--nproc 2 {DATA}": "unrecognized arguments: --nproc; see ./launch.sh --help",
    "-n 2": "name a Python script, such as recipes/data_parallel.py",
    f"--timeout -1 {DATA}": "--timeout must be a number of seconds, or 0 for no limit, got -1",
    f"--silent -1 {DATA}": "--silent must be a number of seconds, or 0 for never, got -1",
    f"--master_port 80 {DATA}": "--master_port must be from 1024 to 65535, got 80",
    "-n 2 -m": "after -m type the name of one module, and its arguments: -m package.train --steps 3",
    "-moneflow_cookbook.plan x": "after -m type the name of one module",
    "-m harness.no_such": "-m harness.no_such: no such module in this folder, nor installed; type its name with dots",
    "-m recipes/data_parallel.py": "-m recipes/data_parallel.py: no such module in this folder",
    "-m tests.cases": "-m tests.cases: the package has no __main__.py; name one of its modules, as in -m tests.cases.",
    "-m numpy.core._multiarray_umath": "it is not written in Python",
    "-n 5 -m recipes.hybrid_parallel -n 4": "hybrid_parallel.py runs on 4 ranks, not on 5: type -n 4",
    "recipes/data_paralel.py": f"recipes/data_paralel.py: {NO_SUCH_SCRIPT}",
    "recipes": f"recipes: {NO_SUCH_SCRIPT}",
    "launch.sh": "(launch.sh, line ",
    f"--nnodes 0 {HYBRID}": "--nnodes must be 1 or more, got 0",
    f"--nnodes 2 --node_rank 2 {HYBRID}": "--node_rank must be from 0 to 1 with --nnodes 2, got 2",
    f"--nnodes 2 {HYBRID}": "--nnodes needs host 0's address and a port, the same on each host: --master_addr HOST",
    f"--nnodes 3 {AT} {HYBRID}": "on 4 ranks, not on 3 (1 of each of 3 launchers)",
    f"--nnodes 2 --max-restarts 3 {AT} {HYBRID}": "--max-restarts cannot restart other launchers: a loop around srun",
    f"--nnodes 2 --master_addr ::1 --master_port 29500 {HYBRID}": "--master_addr ::1: OneFlow 0.9.0 listens at IPv4",
}


def test_job_on_one_host_has_no_time_limit_and_needs_no_address():
    options = checked(["--master_addr", "10.9.9.9", DATA])
    assert (options.timeout, options.master_addr) == (None, "127.0.0.1")


def test_name_that_means_127_on_host_0_is_refused_there(monkeypatch):
    """As Debian writes it into /etc/hosts: ranks of other hosts would look for those of host 0 on their own host."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1" if name == "alpha" else name)
    command = f"--nnodes 2 --master_port 29500 --master_addr {{}} --node_rank {{}} {HYBRID}"
    with pytest.raises(UsageError, match=r"alpha: on host 0 it is 127\.0\.1\.1, where .*: type its address"):
        checked(command.format("alpha", 0).split())
    for address, node_rank in (("alpha", 1), ("10.0.0.1", 0), ("127.0.0.1", 0)):  # launchers may share a host
        assert checked(command.format(address, node_rank).split()).master_addr == address


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(line):
    with pytest.raises(UsageError) as refused:
        checked(line.split())
    assert BAD_INPUT[line] in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("WORLD_SIZES = (2, 4)", "mine.py runs on 2 or 4 ranks, not on 3: type -n 2"),
        ("WORLD_SIZES = (2, 1, 4)", "mine.py runs on 1, 2 or 4 ranks, not on 3: type -n 2"),
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


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """A function that imitates an nvidia-smi, of a host with GPUs of these compute capabilities, or removes it."""

    def imitate(capabilities, code=0):
        lines = ["#!/bin/sh", *(f"echo {capability}" for capability in capabilities.split()), f"exit {code}"]
        (tmp_path / "nvidia-smi").write_text("\n".join(lines))
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return imitate


@pytest.mark.parametrize(
    "capabilities, usable", [("8.9 7.0", 2), ("8.0 6.0 9.0", 2), ("8.0", 1), ("8.0 12.0", 1), ("5.2 9.0", 0)]
)
def test_cuda_needs_a_gpu_that_works_for_each_rank(nvidia_smi, capabilities, usable):
    nvidia_smi(capabilities)
    command = ["-n", "2", DATA, "--device", "cuda"]
    if usable == 2:
        assert checked(command).nproc_per_node == 2
        return
    with pytest.raises(UsageError) as error:
        checked(command)
    wanted = "each rank needs a GPU of compute capability 6.0 to 8.9"
    assert str(error.value) == f"{wanted}, got {usable} for 2: type --device cpu"


@pytest.mark.parametrize("words", ["--device=cuda", "--graph --device cuda", "--dev cuda", "--d=cuda --graph"])
def test_cuda_is_refused_without_a_driver_however_it_is_typed(nvidia_smi, words):
    """argparse takes abbreviations. There is no nvidia-smi, or it prints that it cannot reach the driver."""
    command = ["-n", "2", DATA, *words.split()]
    with pytest.raises(UsageError, match="got 0 for 2: type --device cpu"):
        checked(command)
    nvidia_smi("8.0 8.0", code=9)
    with pytest.raises(UsageError, match="got 0 for 2: type --device cpu"):
        checked(command)


def test_cuda_is_not_refused_where_the_driver_does_not_tell_the_compute_capability(nvidia_smi):
    nvidia_smi("", code=2)
    assert checked(["-n", "2", DATA, "--device", "cuda"]).nproc_per_node == 2


@pytest.mark.parametrize("visible, shown", [("0,1", 2), ("3", 1), ("GPU-1a, ", 1), ("-1", 0), ("", 0)])
def test_gpus_that_cuda_does_not_show_do_not_count(monkeypatch, nvidia_smi, visible, shown):
    nvidia_smi("8.0 8.0 8.0 8.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    command = ["-n", "2", DATA, "--device", "cuda"]
    if shown == 2:
        assert checked(command).nproc_per_node == 2
    else:
        with pytest.raises(UsageError, match=f"got {shown} for 2: type --device cpu"):
            checked(command)


def test_gpus_have_the_numbers_of_nvidia_smi(monkeypatch):
    """By default CUDA counts the fastest one first."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert RankAssignment(2, port=1).environment(0)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert RankAssignment(2, port=1).environment(0)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_typing_error_sets_nothing_up(tmp_path):
    shutil.copy(ROOT / "launch.sh", tmp_path)
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    job = Run(str(tmp_path / "launch.sh"), "paln", "--num-layers", "4").wait()
    assert (job.code, job.err.strip()) == (2, f"launch.sh: paln: {NO_SUCH_SCRIPT}")
    assert not (tmp_path / ".venv").exists()
