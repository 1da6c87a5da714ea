"""launch.sh on several hosts: what it prints on each, that values are right, and that all end when one does."""

import os
import signal
import socket
import threading
import time

import pytest

from harness.start.nodes import Nodes, Peer
from tests.hosts import NO_HOSTS
from tests.jobs import EQUAL, LAUNCH, LONG, MET, SLEEPS, Run, ended, free_port
from tests.markdown import BY_HAND

NOWHERE = ("--master_addr", "nowhere.invalid", "--master_port", 29500)


def start(hosts, *arguments, only=(0, 1), port=None, where=(0, 1), **more):
    """The same command as each of these nodes. where: the host of each node; hosts None: all at this host's address."""
    port, address, runs = port or free_port(), hosts.addresses[0] if hosts else "127.0.0.1", []
    for node in only:
        meeting = ["--nnodes", len(where), "--node_rank", node, "--master_addr", address, "--master_port", port]
        runs.append(Run(*(hosts.on(where[node]) if hosts else []), LAUNCH, *meeting, *arguments, **more))
    return runs


@pytest.fixture(scope="module")
def in_vain(hosts):
    """Launchers that wait for a node that never comes, while other tests run: name -> run."""
    command = ("--timeout", 20, "recipes/hybrid_parallel.py")  # long enough to say for whom they wait
    runs = {
        "node 1": start(hosts, *command, only=[0])[0],
        "node 0": start(hosts, *command, only=[1])[0],
        "name": Run(LAUNCH, "--nnodes", 2, "--node_rank", 1, *NOWHERE, *command),
    }
    yield runs
    ended(runs.values())


@pytest.mark.parametrize("more", [(), ("--graph",)], ids=["eager", "graph"])
def test_commands_of_the_page_on_two_hosts(hosts, in_vain, more):  # which begins to wait
    commands = [line for line in BY_HAND if line.startswith("./launch.sh --nnodes")]
    assert len(commands) == 2
    assert all(f"--node_rank {k} --master_addr 10.0.0.1 " in line for k, line in enumerate(commands))
    commands = [line.replace("10.0.0.1", hosts.addresses[0]) for line in commands]
    first, second = ended([Run(*hosts.on(node), *line.split(), *more) for node, line in enumerate(commands)])
    assert (first.code, first.err, second.code, second.err, second.out) == (0, "", 0, "", "")
    assert first.out.splitlines()[-1] == "[0] out1 equals x0 @ w0 @ w1 on a single device"
    assert "[0] x1    (4, 8)  oneflow.sbp.broadcast     local shapes (0, 0) (0, 0) (4, 8) (4, 8)" in first.out


def test_two_nodes_with_one_address():
    first, second = ended(start(None, "-n", 2, "recipes/row_parallel.py"))
    assert (first.code, second.code, first.err + second.err) == (0, 0, "")
    assert EQUAL in first.out and "local shapes (4, 2) (4, 1) (4, 1) (4, 1)" in first.out


@pytest.mark.parametrize("where", [(0, 0, 0, 1), (0, 1, 0, 1)], ids=["uneven", "in turns"])
def test_hosts_with_ranks_of_which_oneflow_would_lose_some(hosts, where):
    """As a scheduler may place its tasks. With LOCAL_RANK 0, 1, 2, 0 or 0, 0, 1, 1 some ranks have no shard."""
    runs = ended(start(hosts, "-n", 1, "recipes/row_parallel.py", only=range(4), where=where))
    assert [(run.code, run.err) for run in runs] == [(0, "")] * 4
    assert EQUAL in runs[0].out and "local shapes (4, 2) (4, 1) (4, 1) (4, 1)" in runs[0].out


def test_ranks_that_the_hosts_do_not_divide_are_refused(hosts):
    """OneFlow would hang at the start, or abort."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    for run in ended(start(hosts, "-n", 1, "recipes/row_parallel.py", only=range(3), where=(0, 1, 0))):
        assert run.code == 2 and "OneFlow 0.9.0 would hang: 3 ranks cannot be divided by 2 hosts" in run.err


def test_host_that_knows_its_own_name_as_127_0_1_1(hosts, tmp_path):
    """As Debian writes it into /etc/hosts: the ranks of host 1 would look on host 1 for those of host 0."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    runs, port = [], free_port()
    for node, address in enumerate(("127.0.1.1", hosts.addresses[0])):
        names = tmp_path / f"hosts{node}"
        names.write_text(f"127.0.0.1 localhost\n{address} alpha\n")
        known = ["sh", "-euc", f'mount --bind {names} /etc/hosts; exec "$@"', "sh"]
        command = ["--nnodes", 2, "--node_rank", node, "--master_addr", "alpha", "--master_port", port, "-n", 2]
        runs.append(Run(*hosts.on(node), *known, LAUNCH, *command, "recipes/hybrid_parallel.py"))
    first, second = ended(runs)
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "") and EQUAL in first.out


@pytest.mark.parametrize("real", [True, False], ids=["names", "addresses"])
def test_proxy_in_the_environment_does_no_harm_on_two_hosts(hosts, script, real):
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    if real:
        proxy["no_proxy"] = ",".join(hosts.addresses)  # right, and of no use to gRPC beside a no_grpc_proxy of ours
    first, second = ended(start(hosts, "-n", 1, script("print('met')", MET), **proxy))
    assert [(run.code, run.err, run.out.count("met")) for run in (first, second)] == [(0, "", 1)] * 2


def test_rank_that_fails_ends_both(hosts, script):
    path = script(f"print('met', flush=True)\nif rank == 3: 1 / 0\n{SLEEPS}", MET)
    first, second = ended(start(hosts, "-n", 2, path))
    assert (first.code, second.code, second.out.count("met")) == (1, 1, 2)
    assert "[3] ZeroDivisionError: division by zero" in second.err and "Traceback" not in first.err
    for run in (first, second):
        assert "rank 3 of 4 on node 1 (" in run.err.splitlines()[-1], run.err
        assert run.err.splitlines()[-1].endswith("failed: exit code 1; every rank is ended")


@pytest.mark.parametrize("more", [(), ("--timeout", 0, "--max-restarts", 3)], ids=["once", "restarts"])
@pytest.mark.parametrize("node", [0, 1])
def test_node_that_dies_ends_the_other(hosts, script, node, more):
    """There is nobody to start again there, and nobody to wait for."""
    runs = start(hosts, "-n", 1, *more, script(SLEEPS, MET))
    for run in runs:
        run.until("ready")
    runs[node].kill()
    [other] = ended([runs[1 - node]])
    assert other.code == 1 and "restart" not in other.err, other.err
    assert f"node {node} (" in other.err.splitlines()[-1] and "is gone" in other.err.splitlines()[-1], other.err


def test_link_that_goes_down_ends_both(hosts, script):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    runs = start(hosts, "-n", 1, script(SLEEPS))
    for run in runs:
        run.until("ready")
    hosts.link(1, "down")
    try:
        first, second = ended(runs)
    finally:
        hosts.link(1, "up")
    assert (first.code, second.code) == (1, 1)
    assert "node 1 (" in first.err and "is gone" in first.err and "node 0 (" in second.err, second.err


def test_interrupt_on_one_node_ends_both(hosts, script):
    runs = start(hosts, "-n", 1, script(SLEEPS))
    for run in runs:
        run.until("ready")
    os.killpg(runs[1].process.pid, signal.SIGINT)
    first, second = ended(runs)
    assert (first.code, second.code) == (130, 130)
    assert all("SIGINT on node 1 (" in run.err for run in runs)


def test_time_limit_shows_where_each_rank_is_on_each_node(hosts, script):
    path = script(SLEEPS)
    for limit in (4, 120):  # the second where the machine is too busy to come so far in the first
        first, second = ended(start(hosts, "-n", 1, "--timeout", limit, path))
        assert (first.code, second.code) == (124, 124)
        if all(f'File "{path}", line 4' in run.err for run in (first, second)):
            break
    assert "rank 0 of 2 is running" in first.err and "rank 1 of 2 is running" in second.err
    assert all(f'File "{path}", line 4' in run.err for run in (first, second)), first.err + second.err


def test_reader_that_has_enough_on_one_host_is_told_on_the_other(hosts, script):
    path, port = script("if rank == 0: time.sleep(1000)\nfor i in range(10**6): print('line', i)"), free_port()
    command = f"{LAUNCH} --nnodes 2 --node_rank 1 --master_addr {hosts.addresses[0]} --master_port {port} -n 1 {path}"
    second = Run(*hosts.on(1), "bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}")
    first, _ = ended([*start(hosts, "-n", 1, path, only=[0], port=port), second])
    assert (first.code, second.code, second.out, second.err) == (141, 141, "[1] line 0\n", "")
    assert first.err.startswith("launch.sh: nobody reads the output on node 1 (")


def test_restart_on_every_node(hosts, script, tmp_path):
    mark = f"mark = '{tmp_path}/failed'\nif rank == 1 and not os.path.exists(mark): open(mark, 'w'); sys.exit(3)\n"
    path = script(mark + "flow.comm.barrier()\nprint('met again')", MET)
    first, second = ended(start(hosts, "-n", 1, "--max-restarts", 2, path))
    assert (first.code, first.out, second.code, second.out) == (0, "[0] met again\n", 0, "[1] met again\n")
    for run in (first, second):
        reason, restart = run.err.splitlines()
        assert "rank 1 of 2 on node 1 (" in reason and "failed: exit code 3; every rank is ended" in reason
        assert restart == "launch.sh: restart 1 of 2"


def test_restarts_come_to_an_end(script):
    [run] = ended([Run(LAUNCH, "-n", 2, "--max-restarts", 2, script("sys.exit(3 if rank == 0 else 0)"))])
    assert run.code == 3 and run.err.count("rank 0 of 2 failed: exit code 3") == 3
    restarts = [line for line in run.err.splitlines() if "restart" in line]
    assert restarts == [f"launch.sh: restart {k} of 2" for k in (1, 2)]


def test_node_that_comes_late(hosts, script):
    port, path = free_port(), script("print('met')")
    [second] = start(hosts, "-n", 1, path, only=[1], port=port)
    second.until("launch.sh: waiting for node 0 at ", stream="stderr")
    [first] = start(hosts, "-n", 1, path, only=[0], port=port)
    ended([first, second])
    assert (first.code, first.err, first.out, second.out) == (0, "", "[0] met\n", "[1] met\n")
    assert (second.code, second.err, second.waited.count("\n")) == (0, "", 1)


def test_strangers_at_the_port_do_no_harm(script):
    port, path = free_port(), script("print('met')")
    [first] = start(None, "-n", 1, path, only=[0], port=port)
    first.until("waiting for node 1", stream="stderr")
    strangers = []
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"node": 1}\n', b""):
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[-1].sendall(words)
    [second] = start(None, "-n", 1, path, only=[1], port=port)
    ended([first, second])
    for stranger in strangers:
        stranger.close()
    assert (first.code, first.err, first.out, second.out) == (0, "", "[0] met\n", "[1] met\n")


def test_nodes_with_one_number_say_so(script):
    port, path = free_port(), script("")
    [first] = start(None, "-n", 1, path, only=[0], port=port)
    first.until("waiting for node 1", stream="stderr")
    [again] = ended(start(None, "-n", 1, path, only=[0], port=port))
    ended([first.signal(signal.SIGTERM)])
    assert again.code == 2 and "take another one, the same on each node" in again.err


def test_launchers_of_two_jobs_do_not_mix(script, tmp_path):
    """Some of an earlier try that still wait, or of another job at this port: the job goes on without them."""
    port, path = free_port(), script("print('met')")
    other = tmp_path / "other" / "other.py"
    other.parent.mkdir()
    other.write_text(path.read_text())
    changed = other.with_name("mine.py")
    changed.write_text(path.read_text() + "# changed\n")
    here, same = ("--master_addr", "127.0.0.1", "-n", 1), "type the same on each node"
    strangers = {  # the command of node 1 -> what it is told
        (*here, path, "--seed", 7): f"arguments --seed 7 here, and none on node 0: {same}",
        ("--master_addr", "127.0.0.2", "-n", 1, path): f"--master_addr 127.0.0.2 here, and 127.0.0.1 on node 0: {same}",
        (*here[:-1], 2, path): f"--nproc_per_node 2 here, and 1 on node 0: {same}",
        (*here, changed): "version of the script ",
        (*here, other): f"script other.py here, and mine.py on node 0: {same}",
    }
    where = ["--nnodes", 2, "--node_rank", 1, "--master_port", port]
    runs = [Run(LAUNCH, *where, *command) for command in strangers]
    [first] = start(None, "-n", 1, path, only=[0], port=port)
    for run, words in zip(ended(runs), strangers.values()):
        assert run.code == 2 and run.err.startswith(f"launch.sh: {words}") and run.err.count("\n") == 1, run.err
    [second] = start(None, "-n", 1, path, only=[1], port=port)
    ended([first, second])
    assert (first.code, first.out, second.code, second.out) == (0, "[0] met\n", 0, "[1] met\n")


@pytest.mark.parametrize("who, missing", [("node 1", "node 1 of 2"), ("node 0", "node 0 at ")])
def test_node_that_never_comes(in_vain, who, missing):
    run = in_vain[who].wait()
    [gives_up] = run.err.splitlines()
    assert run.code == 2 and run.waited.startswith(f"launch.sh: waiting for {missing}")
    assert gives_up.startswith(f"launch.sh: {missing}") and "did not come until --timeout" in gives_up


def test_name_that_is_not_known_is_tried_again_and_told(in_vain):
    run = in_vain["name"].wait()
    gives_up = run.err.splitlines()[-1]  # to ask for a name may take long
    assert run.code == 2 and "did not come" in gives_up
    assert gives_up.startswith("launch.sh: node 0 at nowhere.invalid:29500 (")


def test_messages_that_come_with_the_start_are_kept(monkeypatch):
    """Node 0 may send the start and, a moment later, the verdict, before a busy node 1 reads either."""
    port, receive = free_port(), Peer.receive
    first, second = (Nodes(2, number, 1, "127.0.0.1", port, {}) for number in (0, 1))

    def lead():
        first.begin(1, time.monotonic() + LONG, lambda: False)
        first.send(verdict={"code": 3})

    def read_late(peer):
        if threading.current_thread() is not leader:
            leader.join(LONG)
        return receive(peer)

    leader = threading.Thread(target=lead, daemon=True)
    monkeypatch.setattr(Peer, "receive", read_late)
    with first, second:
        leader.start()
        assert second.begin(0, time.monotonic() + LONG, lambda: False)["port"] == 1
        assert list(second.receive()) == [{"verdict": {"code": 3}}]
