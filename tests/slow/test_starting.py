"""What the recipes on starting claim beyond values: ranks meet, and a job that resumes has the same bits."""

import os
import re
import signal
import sys

import pytest

from tests.cases import ROOT
from tests.hosts import NO_HOSTS
from tests.jobs import ELASTIC, LAUNCH, Run, changed, ended, free_port, saved, train
from tests.markdown import BY_HAND, CLUSTERS, blocks

HELLO, RENDEZVOUS, SPAWN = (f"recipes/starting/{name}.py" for name in ("hello_ranks", "rendezvous", "spawn"))
BARE = {name: None for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")}
PROXY = {
    **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("no_grpc_proxy", "no_proxy", "NO_PROXY")),
}
WITH_A_DEFAULT_ROUTE = ["bash", "-c", 'ip route replace default dev eth0 && exec "$0" "$@"']  # as real hosts have


def by_hand(hosts, script, ranks, *arguments, prefix=(), **variables):
    """A script started once for each of these ranks, on two hosts in turns."""
    common = {**BARE, "WORLD_SIZE": str(len(ranks)), "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "3", **variables}
    runs = []
    for rank in ranks:
        on_host = [*hosts.on(rank % 2), *prefix] if hosts.real else []
        runs.append(Run(*on_host, sys.executable, script, *arguments, **{**common, "RANK": str(rank)}))
    return runs


@pytest.fixture(scope="module")
def meetings(hosts, tmp_path_factory):
    """Jobs of 2 ranks, begun together because they wait: by an address, and by a file in a folder."""
    folder, address = tmp_path_factory.mktemp("meetings"), f"tcp://{hosts.addresses[0]}:{free_port()}"
    file = f"file://{folder}/job"
    by_file = by_hand(hosts, RENDEZVOUS, [1, 0], "--init-method", file, prefix=WITH_A_DEFAULT_ROUTE)
    by_address = by_hand(hosts, RENDEZVOUS, [1, 0], "--init-method", address)
    return {"address": by_address, "file": by_file, "folder": folder}


def test_rendezvous_of_the_ranks_of_a_launcher_by_a_file(
    meetings, tmp_path
):  # meetings begin here, and are read at the end
    job = Run(LAUNCH, "-n", 3, RENDEZVOUS, "--init-method", f"file://{tmp_path}/job").wait()
    assert (job.code, job.err) == (0, "") and "[0] the sum over ranks is 3, as in numpy: 0 1 2\n" in job.out
    assert os.listdir(tmp_path) == []


def test_rank_that_waits_in_vain_names_the_file(hosts, tmp_path):
    script = changed(RENDEZVOUS, tmp_path, ("time.monotonic() + 60", "time.monotonic() + 1"))
    [run] = ended(by_hand(hosts, script, [1], "--init-method", f"file://{tmp_path}/job", WORLD_SIZE="2"))
    assert (run.code, run.err) == (1, f"rank 1 waited 60 seconds for rank 0 to write {tmp_path}/job\n")


def test_rendezvous_without_a_launcher_is_refused():
    done = Run(sys.executable, RENDEZVOUS, **BARE).wait()
    words = "--init-method env://: set WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT, or use a launcher"
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_ranks_that_are_started_by_hand_meet_behind_a_proxy():
    address = f"tcp://127.0.0.1:{free_port()}"
    runs = [
        Run(sys.executable, RENDEZVOUS, "--init-method", address, **{**BARE, **PROXY, "WORLD_SIZE": "2", "RANK": rank})
        for rank in "01"
    ]
    for run in ended(runs):
        assert run.code == 0, run.err


def test_hello_ranks_tells_hosts_apart(hosts):
    """Hosts are numbered by their first rank, and local ranks as in OneFlow."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    where = (1, 0, 1, 0)
    common = ["--nnodes", 4, "--master_addr", hosts.addresses[where[0]], "--master_port", free_port(), "-n", 1]
    runs = [Run(*hosts.on(host), LAUNCH, *common, "--node_rank", k, ROOT / HELLO) for k, host in enumerate(where)]
    for rank, run in enumerate(ended(runs)):
        assert (run.code, run.err) == (0, "")
        host, address = int(where[rank] != where[0]), hosts.addresses[where[rank]]
        ids = rf"rank {rank} of 4: local rank {rank % 2} on host {host} \(\S+, {address}\), cpu:\d+, "
        assert re.search(rf"\[{rank}\] {ids}started by process \d+", run.out), run.out
    assert runs[0].out.endswith("[0] all 4 ranks are there, once each; number of hosts: 2\n")


LARGE = ("in_features=5, out_features=8", "in_features=5, out_features=8192")  # w does not fit into a pipe


@pytest.mark.parametrize("ranks", [2, 1])  # with 1 rank, nobody listens at a port
def test_program_spawns_ranks_with_large_arguments(tmp_path, ranks):
    """Behind a proxy, too."""
    [run] = ended([Run(sys.executable, changed(SPAWN, tmp_path, LARGE), "--ranks", ranks, **BARE, **PROXY)])
    assert run.code == 0, run.err
    shards = [f"rank {rank} of {ranks} returned ({4 // ranks}, 8192) of (4, 8192)" for rank in range(ranks)]
    assert run.out.splitlines() == [*shards, "out equals x @ w on a single device"]


def test_spawned_rank_that_dies_in_its_import_ends_the_program(tmp_path):
    """The other one waits for it in its import, and does not read its large argument."""
    dies = "if __name__ == '__mp_main__' and os.environ['RANK'] == '1':\n    os._exit(1)\n"
    script = changed(SPAWN, tmp_path, LARGE, ("import oneflow as flow\n", f"{dies}import oneflow as flow\n"))
    [run] = ended([Run(sys.executable, script, "--ranks", 2, **BARE)])
    assert run.code == 1 and "RuntimeError: rank 1 of 2 died: exit code 1\n" in run.err, run.err


# Checkpoints are written and read in the same way in either mode, so eager mode is enough here. That the weights are
# the same after a death between two saves is in test_faults.py.
DEATHS = {  # before this line -> the step from whose checkpoint the job resumes
    "        os.replace(": 2,
    "            shutil.rmtree(self": 4,
}


@pytest.mark.parametrize("line", DEATHS)
def test_elastic_training_loses_no_checkpoint_by_a_death_while_one_is_written(weights, tmp_path, line):
    """Rank 0 is killed once, while it saves step 4: before the checkpoint has its name, and before step 2's goes."""
    folder, indent, step = tmp_path / "checkpoints", " " * (len(line) - len(line.lstrip())), DEATHS[line]
    killed, last = "(self.folder / 'killed')", f"self._steps()[-1:] == [{step}]"
    kill = f"{last} and not {killed}.exists() and ({killed}.touch(), os.kill(os.getpid(), 9))"
    script = changed(ELASTIC, tmp_path, (line, f"{indent}{kill}\n{line}"))
    run = train(folder, "--steps", 6, "--keep", 1, script=script, options=("--max-restarts", 1))
    assert "killed by signal 9" in run.err and f"[0] resumes after step {step}, from its checkpoint\n" in run.out
    assert saved(folder) == weights


def test_elastic_training_loses_no_checkpoint_by_a_death_after_a_step_that_is_saved(weights, tmp_path):
    """Although rank 0 is slow to give it its name."""
    slow = ("        os.replace(", "        __import__('time').sleep(2 * (step == 2))\n        os.replace(")
    script = changed(ELASTIC, tmp_path, slow)
    run = train(tmp_path / "saved", "--steps", 6, "--die", 2, script=script, options=("--max-restarts", 1))
    assert "killed by signal 9" in run.err and "[0] resumes after step 2, from its checkpoint\n" in run.out
    assert saved(tmp_path / "saved") == weights


def test_elastic_training_resumes_on_fewer_ranks_and_on_more(tmp_path):
    """The recipe compares the losses with those on one rank: on other numbers of ranks, sums round differently."""
    died = train(tmp_path / "saved", "--die", 3, "--graph", n=3, code=137).err
    assert "rank 2 of 3 failed: killed by signal 9" in died, died
    assert "resumes after step 2, from its" in train(tmp_path / "saved", "--steps", 6, "--graph", n=1).out
    assert "resumes after step 6, from its" in train(tmp_path / "saved", "--steps", 8, "--graph", n=2).out


def test_block_of_the_page_on_clusters(tmp_path):
    [command] = [line for line in BY_HAND if "--max-restarts" in line]
    run = Run("bash", "-c", command.replace("checkpoints", str(tmp_path))).wait()
    [shown] = [block for block in blocks(CLUSTERS, "text") if "restart 1 of 3" in block]
    lines = (run.err + run.out).splitlines()
    assert run.code == 0 and all(line in lines for line in shown.splitlines()), lines


def test_script_of_the_page_on_clusters_saves_a_checkpoint_at_sigterm(tmp_path):
    """All ranks stop after the same step, although they get the signal at different moments."""
    [code] = [block for block in blocks(CLUSTERS, "python") if "SIGTERM" in block]
    code = code.replace("    w = w + 1", '    print("step", step, flush=True)\n    w = w + 1')
    (tmp_path / "stops.py").write_text(code)
    [command] = [line for line in BY_HAND if line.endswith("stops.py")]
    arguments = command.partition("./launch.sh ")[2].split()
    run = Run(LAUNCH, "-n", 3, *arguments, cwd=tmp_path).until("step 3", times=3).signal(signal.SIGTERM)
    [run] = ended([run])
    assert (run.code, run.err) == (0, "launch.sh: SIGTERM: every rank is ended\n")
    [step] = set(re.findall(r"saved step (\d+)", run.out))
    assert run.out.count("saved step") == 3 and (tmp_path / f"checkpoint_{step}").is_dir(), run.out


@pytest.mark.parametrize("how", ["address", "file"])
def test_rendezvous_of_hosts(hosts, meetings, how):
    """Rank 0 prints where it is when all are there; the others print nothing, and no file is left."""
    runs = ended(meetings[how])
    assert [(run.code, run.err) for run in runs] == [(0, "")] * 2
    [printed] = [run.out for run in runs if run.out]
    assert printed.endswith("the sum over ranks is 1, as in numpy: 0 1\n")
    leader = re.match(r"2 ranks met by \S+; rank 0 is at (\S+):\d+\n", printed).group(1)
    assert leader == hosts.addresses[0] or how == "file" and not hosts.real
    assert os.listdir(meetings["folder"]) == [] or how == "address"
