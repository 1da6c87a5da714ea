"""What the recipes on starting say beyond values: ranks find each other, and after a death the bits are the same."""

import os
import re
import shutil
import signal
import sys
import time

import pytest

from tests.cases import ROOT
from tests.hosts import NO_HOSTS
from tests.jobs import LAUNCH, Run, free_port, official, repeated
from tests.markdown import BY_HAND, CLUSTERS, blocks

HELLO, RENDEZVOUS, SPAWN, ELASTIC = (
    f"recipes/starting/{name}.py" for name in ("hello_ranks", "rendezvous", "spawn", "elastic_training")
)
MODES = pytest.mark.parametrize("more", [(), ("--graph",)], ids=["eager", "graph"])
LONG = 300  # seconds for what takes few: a busy machine is no failure
BARE = {name: None for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")}
WITH_A_WAY_OUT = ["bash", "-c", 'ip route replace default dev eth0 && exec "$0" "$@"']  # as a host has; ours have none


def changed(path, folder, *changes):
    """A copy of a recipe in which each of these texts is another one."""
    text = (ROOT / path).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / path.rpartition("/")[2]
    copy.write_text(text)
    return copy


def ended(runs):
    """All of them, at their end, with nothing left."""
    for run in runs:
        run.wait(LONG)
    assert all(run.all_gone() for run in runs)
    return runs


def by_hand(script, ranks, *arguments, hosts=None, before=(), **variables):
    """A script started once for each of these ranks, on two hosts in turns; all at their end."""
    given = {**BARE, "WORLD_SIZE": str(len(ranks)), "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "3", **variables}
    on = [[*hosts.on(rank % 2), *before] if hosts and hosts.real else [] for rank in ranks]
    command = [sys.executable, script, *arguments]
    return ended([Run(*words, *command, **{**given, "RANK": str(rank)}) for words, rank in zip(on, ranks)])


def met(runs, ranks):
    """The address of rank 0, which says that all ranks are there; the others say nothing."""
    assert [(run.code, run.err) for run in runs] == [(0, "")] * len(runs)
    [said] = [run.out for run in runs if run.out]
    numbers = " ".join(map(str, range(ranks)))
    assert said.endswith(f"the sum over ranks is {ranks * (ranks - 1) // 2}, as on a single device: {numbers}\n")
    return re.match(rf"{ranks} ranks met by \S+; rank 0 is at (\S+):\d+\n", said).group(1)


@MODES
def test_ranks_meet_at_an_address(hosts, more):
    where = f"tcp://{hosts.addresses[0]}:{free_port()}"
    assert met(by_hand(RENDEZVOUS, [3, 1, 0, 2], "--meet", where, *more, hosts=hosts), 4) == hosts.addresses[0]


def test_ranks_meet_by_a_file(hosts, tmp_path):
    where = f"file://{tmp_path}/job"
    leader = met(by_hand(RENDEZVOUS, [1, 0, 2, 3], "--meet", where, hosts=hosts, before=WITH_A_WAY_OUT), 4)
    assert leader == hosts.addresses[0] or not hosts.real
    assert os.listdir(tmp_path) == []


def test_ranks_of_a_launcher_meet_by_a_file(tmp_path):
    job = Run(LAUNCH, "-n", 3, RENDEZVOUS, "--meet", f"file://{tmp_path}/job").wait(LONG)
    assert (job.code, job.err) == (0, "") and "[0] the sum over ranks is 3, as on a single device: 0 1 2\n" in job.out


def test_rank_that_waits_in_vain_for_the_file_says_so(tmp_path):
    script = changed(RENDEZVOUS, tmp_path, ("time.monotonic() + 60", "time.monotonic() + 1"))
    [run] = by_hand(script, [1], "--meet", f"file://{tmp_path}/job", WORLD_SIZE="2")
    assert (run.code, run.err) == (1, f"rank 1 waited 60 seconds for rank 0 to write {tmp_path}/job\n")


def hello(rank, n, local, host, address):
    return rf"\[{rank}\] rank {rank} of {n}: local rank {local} on host {host} \(\S+, {address}\), cpu:\d+, started by "


def test_hello_tells_hosts_apart(hosts):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    common = ["--nnodes", 2, "--master_addr", hosts.addresses[0], "--master_port", free_port(), "-n", 2]
    runs = [Run(*hosts.on(k), LAUNCH, *common, "--node_rank", k, ROOT / HELLO, "--graph") for k in (0, 1)]
    for host, run in enumerate(ended(runs)):
        assert (run.code, run.err) == (0, "")
        lines = [hello(2 * host + local, 4, local, host, hosts.addresses[host]) for local in (0, 1)]
        assert all(re.search(line, run.out) for line in lines), run.out
        assert len(set(re.findall(r"started by process (\d+)", run.out))) == 1
    assert runs[0].out.endswith("[0] all 4 ranks are there, once each; number of hosts: 2\n")


@pytest.mark.parametrize("where", [(0, 1, 0, 1), (1, 0, 0, 1)], ids=["in turns", "inside out"])
def test_hello_tells_hosts_apart_whose_ranks_are_mixed(hosts, where):
    """Hosts are counted by their first rank; the local ranks are those that OneFlow goes by."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    common = ["--nnodes", 4, "--master_addr", hosts.addresses[where[0]], "--master_port", free_port(), "-n", 1]
    runs = [Run(*hosts.on(host), LAUNCH, *common, "--node_rank", k, ROOT / HELLO) for k, host in enumerate(where)]
    for rank, run in enumerate(ended(runs)):
        assert (run.code, run.err) == (0, "")
        line = hello(rank, 4, rank % 2, int(where[rank] != where[0]), hosts.addresses[where[rank]])
        assert re.search(line, run.out), run.out
    assert runs[0].out.endswith("[0] all 4 ranks are there, once each; number of hosts: 2\n")


LARGE = ("in_features=5, out_features=8", "in_features=5, out_features=8192")  # w does not fit into a pipe


@pytest.mark.parametrize("command", [[sys.executable], [LAUNCH]], ids=["python", "launch.sh"])
def test_program_that_spawns_sends_large_arguments(tmp_path, command):
    run = Run(*command, changed(SPAWN, tmp_path, LARGE), "--ranks", 2, **BARE).wait(LONG)
    assert run.code == 0 and run.all_gone(), run.err
    held = "".join(f"rank {rank} of 2 held x (2, 5), w (5, 8192), out (2, 8192)\n" for rank in (0, 1))
    assert run.out == f"{held}out equals x @ w on a single device\n"


def test_spawned_rank_that_raises_ends_the_program(tmp_path):
    raises = ("    out = model(x)\n", "    out = model(x)\n    1 / (flow.env.get_rank() - 1)\n")
    run = Run(sys.executable, changed(SPAWN, tmp_path, raises), "--ranks", 3, **BARE).wait(LONG)
    assert run.code == 1 and run.all_gone(), run.err
    assert run.err.count("ZeroDivisionError: division by zero") == 1 and "RuntimeError: rank 1 of 3 died" in run.err


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_spawned_rank_that_dies_in_its_import_ends_the_program(tmp_path, rank):
    """The others wait for it in theirs, and do not read their large arguments."""
    dies = f"if __name__ == '__mp_main__' and os.environ['RANK'] == '{rank}':\n    os._exit(1)\n"
    script = changed(SPAWN, tmp_path, LARGE, ("import oneflow as flow\n", f"{dies}import oneflow as flow\n"))
    run = Run(sys.executable, script, "--ranks", 3, **BARE).wait(LONG)
    assert run.code == 1 and run.all_gone() and f"RuntimeError: rank {rank} of 3 died" in run.err, run.err


@pytest.mark.parametrize("there", [1, 2, 3])
def test_program_that_is_terminated_leaves_no_rank(there):
    """When it has started so many of them."""
    run, deadline = Run(sys.executable, SPAWN, "--ranks", 3, **BARE), time.monotonic() + LONG
    while len(run.alive()) <= there and run.process.poll() is None:
        assert time.monotonic() < deadline, f"{there} ranks were not started in {LONG} seconds"
        time.sleep(0.01)
    run.process.terminate()
    run.wait(LONG)
    assert run.code in (0, 1) and run.all_gone(), run.err


def saved(folder):
    """The checkpoints in a folder, byte by byte, by step."""
    return {int(path.name[5:]): path.read_bytes() for path in folder.glob("step-*")}


def job(folder, *command):
    """A job of elastic_training.py, whole; once more, from the same checkpoints, where OneFlow died of SIGSEGV."""
    before = saved(folder)
    run = Run(LAUNCH, *command, "--folder", folder).wait(LONG)
    if run.code == 128 + signal.SIGSEGV:
        repeated.append(" ".join(map(str, command)))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for step, data in before.items():
            (folder / f"step-{step:08}").write_bytes(data)
        run = Run(LAUNCH, *command, "--folder", folder).wait(LONG)
    assert run.all_gone()
    return run


def train(folder, *more, n=2, before=()):
    """A job that must end well."""
    run = job(folder, "-n", n, *before, ELASTIC, *more)
    assert run.code == 0 and "equals that of a single device" in run.out, run.err
    return run


@pytest.fixture(scope="module", params=[(), ("--graph",)], ids=["eager", "graph"])
def undisturbed(request, tmp_path_factory):
    """The mode, and the checkpoints after steps 4 and 6 of a job without a death."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert "[0] began with step 1: no checkpoint\n" in train(folder, "--steps", 6, *request.param).out
    assert sorted(saved(folder)) == [4, 6]
    return request.param, saved(folder)


def test_weights_after_a_death_are_those_of_an_undisturbed_run_bit_by_bit(undisturbed, tmp_path):
    more, wanted = undisturbed
    run = train(tmp_path, "--steps", 6, "--die", 5, *more, before=("--max-restarts", 1))
    assert "killed by signal 9" in run.err and "[0] went on after step 4, from its checkpoint\n" in run.out
    assert saved(tmp_path) == wanted
    again = train(tmp_path, "--steps", 6, *more)
    assert "[0] went on after step 4, from its checkpoint\n" in again.out and saved(tmp_path) == wanted


@MODES
def test_weights_after_a_death_under_oneflows_launcher_are_the_same(tmp_path, more):
    """It does not choose the kernels of matmuls as launch.sh does, so bits are compared with those of its own job."""
    folders = tmp_path / "undisturbed", tmp_path / "died"
    jobs = []
    for folder, die in zip((*folders, folders[1]), (0, 5, 0)):
        jobs.append(official(2, ELASTIC, "--folder", folder, "--steps", 6, "--die", die, *more).wait(LONG))
        assert (jobs[-1].code == 0) == (die == 0) and jobs[-1].all_gone(within=60), jobs[-1].err
        assert sorted(saved(folder)) == ([2, 4] if die else [4, 6])
    assert "went on after step 4, from its checkpoint\n" in jobs[2].out
    assert saved(folders[0]) == saved(folders[1])


LINES_OF_SAVE = ("        with open(folder", "            file.flush(", "        os.replace(", "        for older in")


@pytest.mark.parametrize("place", LINES_OF_SAVE)
def test_death_while_a_checkpoint_is_written_loses_none(undisturbed, tmp_path, place):
    """Rank 0 is killed just before this line, while it saves step 4."""
    more, wanted = undisturbed
    kill = " " * (len(place) - len(place.lstrip())) + "step == 4 and os.kill(os.getpid(), signal.SIGKILL)\n"
    script = changed(ELASTIC, tmp_path, (place, f"{kill}{place}"))
    folder = tmp_path / "checkpoints"
    assert job(folder, script, *more).code == 137
    begin = 4 if "for older" in place else 2
    assert f"[0] went on after step {begin}, from its checkpoint\n" in train(folder, "--steps", 6, *more).out
    assert saved(folder) == wanted


@pytest.mark.parametrize("how", ["cut", "flip", "remove"])
def test_damaged_checkpoint_is_passed_over(undisturbed, tmp_path, how):
    more, wanted = undisturbed
    train(tmp_path, *more)
    path = tmp_path / "step-00000004"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if how != "remove":
        path.write_bytes(data if how == "flip" else data[:-1])
    assert "[0] went on after step 2, from its checkpoint\n" in train(tmp_path, "--steps", 6, *more).out
    assert saved(tmp_path) == wanted


def test_job_without_a_checkpoint_that_is_whole_begins_anew(undisturbed, tmp_path):
    more, wanted = undisturbed
    for step in (2, 4):
        (tmp_path / f"step-{step:08}").write_bytes(wanted[step + 2][:-1])
    assert "[0] began with step 1: no checkpoint\n" in train(tmp_path, "--steps", 6, *more).out
    assert saved(tmp_path) == wanted


@MODES
def test_training_goes_on_on_fewer_ranks_and_on_more(tmp_path, more):
    """The weights are compared with those of numpy: sums of other ranks round otherwise."""
    assert job(tmp_path, "-n", 3, ELASTIC, "--die", 3, *more).code == 137
    for n, begin, steps in ((2, 2, 6), (1, 6, 8), (4, 8, 10)):
        assert f"went on after step {begin}, from its" in train(tmp_path, "--steps", steps, *more, n=n).out


def test_block_of_the_page_on_clusters(tmp_path):
    [command] = [line for line in BY_HAND if "--max-restarts" in line]
    run = Run("bash", "-c", command.replace("checkpoints", str(tmp_path))).wait(LONG)
    [shown] = [block for block in blocks(CLUSTERS, "text") if "restart 1 of 3" in block]
    said = (run.err + run.out).splitlines()
    assert run.code == 0 and all(line in said for line in shown.splitlines()), said
