"""launch.sh on several hosts: each launcher starts the ranks of its host, watches them, and talks to no other one."""

import os
import re
import signal

import pytest

from tests.hosts import NO_HOSTS
from tests.jobs import EQUAL, LAUNCH, MET, SLEEPS, Run, ended, free_port, has_printed, start
from tests.markdown import BY_HAND


def test_commands_of_the_page_on_two_hosts(hosts):
    commands = [line for line in BY_HAND if line.startswith("./launch.sh --nnodes")]
    assert len(commands) == 2
    assert all(f"--node_rank {k} --master_addr 10.0.0.1 " in line for k, line in enumerate(commands))
    commands = [line.replace("10.0.0.1", hosts.addresses[0]) for line in commands]
    first, second = ended([Run(*hosts.on(node), *line.split()) for node, line in enumerate(commands)])
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    assert has_printed("hybrid_parallel", first.out.splitlines(), (0, 1)), first.out
    assert has_printed("hybrid_parallel", second.out.splitlines(), (2, 3)), second.out


def test_hosts_with_unequal_numbers_of_ranks_and_a_proxy_in_the_environment(hosts):
    """As a scheduler may place its tasks. With LOCAL_RANK 0, 1, 2, 0 OneFlow would leave some ranks without a shard."""
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # gRPC would use it
    runs = ended(start(hosts, "-n", 1, "recipes/row_parallel.py", only=range(4), where=(0, 0, 0, 1), **proxy))
    assert [(run.code, run.err) for run in runs] == [(0, "")] * 4
    assert EQUAL in runs[0].out
    shapes = ["(4, 2)", "(4, 1)", "(4, 1)", "(4, 1)"]
    assert all(f"[{k}] x {shape} of (4, 5)" in run.out for k, (shape, run) in enumerate(zip(shapes, runs)))


def test_launchers_on_one_host_have_no_local_ranks_of_their_own():
    """0, 0 would give shards of (0, 0)."""
    first, second = ended(start(None, "-n", 1, "recipes/data_parallel.py"))
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    assert "[0] x (2, 5) of (4, 5)" in first.out and "[1] x (2, 5) of (4, 5)" in second.out


@pytest.mark.parametrize("failing, aborts", [(0, 1), (3, 0)])
def test_rank_that_fails_is_shown_on_its_host_and_oneflow_aborts_the_others(hosts, script, failing, aborts):
    path = script(f"if rank == {failing}: 1 / 0\n{SLEEPS}", MET)
    runs = ended(start(hosts, "-n", 2, path))
    fails, other = runs[1 - aborts], runs[aborts]
    assert (fails.code, other.code) == (1, 134), fails.err + other.err
    assert f"[{failing}] ZeroDivisionError: division by zero" in fails.err and "Traceback" not in other.err
    last, last_of_other = (run.err.splitlines()[-1] for run in (fails, other))
    assert re.fullmatch(rf"launch\.sh: rank {failing} of 4 on \S+ failed: exit code 1; every rank here is ended", last)
    reason = "killed by signal 6, SIGABRT, perhaps because a rank on another host ended; every rank here is ended"
    assert last_of_other.endswith(f" failed: {reason}"), other.err


def test_hosts_that_start_different_numbers_of_ranks_end(script):
    path, port = script(SLEEPS, MET), free_port()
    runs = [*start(None, "-n", 2, path, only=[0], port=port), *start(None, "-n", 1, path, only=[1], port=port)]
    assert [run.code for run in ended(runs)] == [134, 134]
    assert "rpc_server.cpp:78] Check failed: barrier_num" in runs[0].err, runs[0].err


def test_restarts_come_to_an_end(script):
    [run] = ended([Run(LAUNCH, "-n", 2, "--max-restarts", 2, script("sys.exit(3 if rank == 0 else 0)"))])
    assert run.code == 3 and run.err.count("rank 0 of 2 failed: exit code 3") == 3
    restarts = [line for line in run.err.splitlines() if "restart" in line]
    assert restarts == [f"launch.sh: restart {k} of 2" for k in (1, 2)]


def test_rank_that_waits_says_for_what(script):
    """And what no launcher can compare with the others: the number of launchers and of ranks, script and arguments."""
    port, path = free_port(), script("print('met')", MET)
    same = f"; each host needs the same: --nnodes 2 -n 1 {path} --seed 7\n"
    [second] = start(None, "-n", 1, path, "--seed", 7, only=[1], port=port)
    second.until(f"launch.sh: waiting for rank 0 at 127.0.0.1:{port} (Connection refused){same}", stream="stderr")
    second.signal(signal.SIGTERM)
    [first] = start(None, "-n", 1, path, "--seed", 7, only=[0], port=port)
    first.until(f"launch.sh: waiting for more ranks, as fewer than 2 have come{same}", stream="stderr")
    [again] = start(None, "-n", 1, path, "--seed", 7, only=[1], port=port)
    ended([first, second, again])
    assert [(run.code, run.out, run.err) for run in (first, again)] == [(0, "[0] met\n", ""), (0, "[1] met\n", "")]


def test_rank_that_waits_for_a_host_without_a_name_yet():
    nowhere = ("--master_addr", "nowhere.invalid", "--master_port", 29500, "--timeout", 12)
    [lost] = ended([Run(LAUNCH, "--nnodes", 2, "--node_rank", 1, *nowhere, "recipes/hybrid_parallel.py")])
    assert lost.code == 124 and lost.waited.startswith("launch.sh: waiting for rank 0 at nowhere.invalid:29500 (")


def test_silence_is_shown_where_rank_0_runs(script):
    """In most scripts only rank 0 prints."""
    path = script(f"if rank: time.sleep(5); sys.exit()\n{SLEEPS}")
    first, second = start(None, "-n", 1, "--silent", 1, path)
    first.until(f"launch.sh: no rank on {os.uname().nodename} has printed for ", stream="stderr")
    first.until("launch.sh: rank 0 of 2 is running", stream="stderr")
    first.signal(signal.SIGINT)
    ended([first, second])
    assert (first.code, second.code, second.err) == (130, 0, "")


def test_launcher_listens_on_no_port(script):
    runs = [run.until("ready") for run in start(None, "-n", 1, script(SLEEPS))]
    listening = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}", encoding="utf-8") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        listening.update(f"socket:[{row[9]}]" for row in rows if row[3] == "0A")
    for run in runs:
        [launcher] = run.alive(b"/harness\0")
        opened = {os.readlink(f"/proc/{launcher}/fd/{number}") for number in os.listdir(f"/proc/{launcher}/fd")}
        assert len(opened) > 3 and not opened & listening
        run.signal(signal.SIGINT)
    ended(runs)


def test_host_without_a_loopback_interface_is_refused(hosts, script):
    """Its ranks would wait for each other forever."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    hosts.loopback(1, "down")
    try:
        [second] = ended(start(hosts, "-n", 2, script("print('met')", MET), only=[1]))
    finally:
        hosts.mend()
    assert second.code == 2 and "launch.sh: ranks cannot meet at 127.0.0.1: " in second.err
