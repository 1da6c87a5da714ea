"""What the recipes on starting say beyond values: ranks find each other, and after a death the bits are the same."""

import os
import re
import signal
import sys

import pytest

from tests.cases import ROOT
from tests.hosts import NO_HOSTS
from tests.jobs import ELASTIC, LAUNCH, Run, changed, ended, free_port, saved, train, undisturbed, wait_until
from tests.markdown import BY_HAND, CLUSTERS, blocks

HELLO, RENDEZVOUS, SPAWN = (f"recipes/starting/{name}.py" for name in ("hello_ranks", "rendezvous", "spawn"))
BARE = {name: None for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")}
WITH_A_WAY_OUT = ["bash", "-c", 'ip route replace default dev eth0 && exec "$0" "$@"']  # as a host has; ours have none


def by_hand(hosts, script, ranks, *arguments, before=(), **variables):
    """A script started once for each of these ranks, on two hosts in turns."""
    given = {**BARE, "WORLD_SIZE": str(len(ranks)), "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "3", **variables}
    on = [[*hosts.on(rank % 2), *before] if hosts.real else [] for rank in ranks]
    command = [sys.executable, script, *arguments]
    return [Run(*words, *command, **{**given, "RANK": str(rank)}) for words, rank in zip(on, ranks)]


@pytest.fixture(scope="module")
def meetings(hosts, tmp_path_factory):
    """Jobs of 4 ranks, begun together because they wait: by an address, and by a file in a folder."""
    folder, address = tmp_path_factory.mktemp("meetings"), f"tcp://{hosts.addresses[0]}:{free_port()}"
    by_file = by_hand(hosts, RENDEZVOUS, [1, 0, 2, 3], "--init-method", f"file://{folder}/job", before=WITH_A_WAY_OUT)
    by_address = by_hand(hosts, RENDEZVOUS, [3, 1, 0, 2], "--init-method", address)
    return {"address": by_address, "file": by_file, "folder": folder}


def test_ranks_of_a_launcher_meet_by_a_file(meetings, tmp_path):  # those wait while others run
    job = Run(LAUNCH, "-n", 3, RENDEZVOUS, "--init-method", f"file://{tmp_path}/job").wait()
    assert (job.code, job.err) == (0, "") and "[0] the sum over ranks is 3, as in numpy: 0 1 2\n" in job.out
    assert os.listdir(tmp_path) == []


def test_rank_that_waits_in_vain_for_the_file_says_so(hosts, tmp_path):
    script = changed(RENDEZVOUS, tmp_path, ("time.monotonic() + 60", "time.monotonic() + 1"))
    [run] = ended(by_hand(hosts, script, [1], "--init-method", f"file://{tmp_path}/job", WORLD_SIZE="2"))
    assert (run.code, run.err) == (1, f"rank 1 waited 60 seconds for rank 0 to write {tmp_path}/job\n")


@pytest.mark.parametrize("where", [(0, 1, 0, 1), (1, 0, 0, 1)], ids=["in turns", "inside out"])
def test_hello_tells_hosts_apart(hosts, where):
    """Hosts are counted by their first rank; the local ranks are those that OneFlow goes by."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    common = ["--nnodes", 4, "--master_addr", hosts.addresses[where[0]], "--master_port", free_port(), "-n", 1]
    runs = [Run(*hosts.on(host), LAUNCH, *common, "--node_rank", k, ROOT / HELLO) for k, host in enumerate(where)]
    for rank, run in enumerate(ended(runs)):
        assert (run.code, run.err) == (0, "")
        local, host = rank % 2, int(where[rank] != where[0])
        known = (
            rf"rank {rank} of 4: local rank {local} on host {host} \(\S+, {hosts.addresses[where[rank]]}\), cpu:\d+, "
        )
        assert re.search(rf"\[{rank}\] {known}started by process \d+", run.out), run.out
    assert runs[0].out.endswith("[0] all 4 ranks are there, once each; number of hosts: 2\n")


LARGE = ("in_features=5, out_features=8", "in_features=5, out_features=8192")  # w does not fit into a pipe


@pytest.mark.parametrize("command", [[sys.executable], [LAUNCH]], ids=["python", "launch.sh"])
def test_program_that_spawns_sends_large_arguments(tmp_path, command):
    [run] = ended([Run(*command, changed(SPAWN, tmp_path, LARGE), "--ranks", 2, **BARE)])
    assert run.code == 0, run.err
    returned = "".join(f"rank {rank} of 2 returned (2, 8192) of (4, 8192)\n" for rank in (0, 1))
    assert run.out == f"{returned}out equals x @ w on a single device\n"


def test_program_spawns_a_single_rank():
    """It listens at no port: OneFlow has nobody to wait for."""
    [run] = ended([Run(sys.executable, SPAWN, "--ranks", 1, **BARE)])
    assert run.code == 0, run.err
    assert run.out == "rank 0 of 1 returned (4, 8) of (4, 8)\nout equals x @ w on a single device\n"


def test_spawned_rank_that_dies_in_its_import_ends_the_program(tmp_path):
    """The others wait for it in theirs, and do not read their large arguments. A program for each rank that dies."""
    dies = "if __name__ == '__mp_main__' and os.environ['RANK'] == os.environ['DIES']:\n    os._exit(1)\n"
    script = changed(SPAWN, tmp_path, LARGE, ("import oneflow as flow\n", f"{dies}import oneflow as flow\n"))
    runs = [Run(sys.executable, script, "--ranks", 3, **BARE, DIES=str(rank)) for rank in range(3)]
    for rank, run in enumerate(ended(runs)):
        assert run.code == 1 and f"RuntimeError: rank {rank} of 3 died: exit code 1\n" in run.err, run.err


@pytest.mark.parametrize("there", [1, 3])
def test_program_that_is_terminated_leaves_no_rank(there):
    """When it has started so many of them."""
    run = Run(sys.executable, SPAWN, "--ranks", 3, **BARE)
    wait_until(lambda: len(run.alive()) > there or run.process.poll() is not None, f"{there} ranks")
    [run] = ended([run.signal(signal.SIGTERM)])
    assert run.code in (0, 1), run.err


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("eager"))


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("graph"), "--graph")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_weights_after_a_death_are_those_of_an_undisturbed_run_bit_by_bit(request, tmp_path, mode):
    more = ["--graph"] * (mode == "graph")
    run = train(tmp_path / "saved", "--steps", 6, "--die", 5, *more, options=("--max-restarts", 1))
    assert "killed by signal 9" in run.err and "[0] resumes after step 4, from its checkpoint\n" in run.out
    assert saved(tmp_path / "saved") == request.getfixturevalue(mode)


# Checkpoints are written and read in the same way in either mode, so eager mode is enough from here on.
LINES_OF_SAVE = {  # -> the step from whose checkpoint the job resumes
    "            fsync(path)": 2,
    "        os.replace(": 2,
    "        fsync(checkpoint_dir)": 4,
    "        for older in": 4,
    "            shutil.rmtree(f": 4,
}


@pytest.mark.parametrize("place", LINES_OF_SAVE)
def test_death_while_a_checkpoint_is_written_loses_none(eager, tmp_path, place):
    """Rank 0 is killed once, just before this line, while it saves step 4."""
    folder, indent = tmp_path / "checkpoints", " " * (len(place) - len(place.lstrip()))
    killed, before = "pathlib.Path(checkpoint_dir, 'killed')", "2 in checkpoints(checkpoint_dir)"
    begin = LINES_OF_SAVE[place]
    now = f"{before} and 4 in checkpoints(checkpoint_dir)" if begin == 4 else before
    once = f"{now} and not {killed}.exists() and ({killed}.touch(), os.kill(os.getpid(), 9))"
    script = changed(ELASTIC, tmp_path, (place, f"{indent}{once}\n{place}"))
    run = train(folder, "--steps", 6, script=script, options=("--max-restarts", 1))
    assert "killed by signal 9" in run.err and f"[0] resumes after step {begin}, from its checkpoint\n" in run.out
    assert saved(folder) == eager


def test_death_after_a_step_that_is_saved_loses_no_checkpoint(eager, tmp_path):
    """Where rank 0 is slow to name it."""
    slow = ("        os.replace(", "        __import__('time').sleep(3)\n        os.replace(")
    script = changed(ELASTIC, tmp_path, slow)
    run = train(tmp_path / "saved", "--steps", 6, "--die", 2, script=script, options=("--max-restarts", 1))
    assert "killed by signal 9" in run.err and "[0] resumes after step 2, from its checkpoint\n" in run.out
    assert saved(tmp_path / "saved") == eager


def test_training_resumes_on_fewer_ranks_and_on_more(tmp_path):
    """The losses are compared with those on one rank: sums of other ranks round otherwise."""
    train(tmp_path / "saved", "--die", 3, "--graph", n=3, code=137)
    assert "resumes after step 2, from its" in train(tmp_path / "saved", "--steps", 6, "--graph", n=1).out
    assert "resumes after step 6, from its" in train(tmp_path / "saved", "--steps", 8, "--graph", n=2).out


def test_block_of_the_page_on_clusters(tmp_path):
    [command] = [line for line in BY_HAND if "--max-restarts" in line]
    run = Run("bash", "-c", command.replace("checkpoints", str(tmp_path))).wait()
    [shown] = [block for block in blocks(CLUSTERS, "text") if "restart 1 of 3" in block]
    said = (run.err + run.out).splitlines()
    assert run.code == 0 and all(line in said for line in shown.splitlines()), said


def test_script_of_the_page_on_clusters_saves_a_checkpoint_at_sigterm(tmp_path):
    """All ranks stop after the same step, although they get the signal at different moments."""
    [code] = [block for block in blocks(CLUSTERS, "python") if "SIGTERM" in block]
    code = code.replace("    w = w + 1", '    print("step", step, flush=True)\n    w = w + 1')
    (tmp_path / "stops.py").write_text(code)
    [command] = [line for line in BY_HAND if line.endswith("stops.py")]
    arguments = command.partition("./launch.sh ")[2].split()
    run = Run(LAUNCH, "-n", 3, *arguments, cwd=tmp_path).until("step 3", times=3).signal(signal.SIGTERM)
    [run] = ended([run])
    assert (run.code, run.err) == (143, "launch.sh: SIGTERM: every rank is ended\n")
    [step] = set(re.findall(r"saved step (\d+)", run.out))
    assert run.out.count("saved step") == 3 and (tmp_path / f"checkpoint_{step}").is_dir(), run.out


@pytest.mark.parametrize("how", ["address", "file"])
def test_ranks_meet(hosts, meetings, how):
    """Rank 0 says where it is when all are there; the others say nothing, and no file is left."""
    runs = ended(meetings[how])
    assert [(run.code, run.err) for run in runs] == [(0, "")] * 4
    [said] = [run.out for run in runs if run.out]
    assert said.endswith("the sum over ranks is 6, as in numpy: 0 1 2 3\n")
    leader = re.match(r"4 ranks met by \S+; rank 0 is at (\S+):\d+\n", said).group(1)
    assert leader == hosts.addresses[0] or how == "file" and not hosts.real
    assert os.listdir(meetings["folder"]) == [] or how == "address"
