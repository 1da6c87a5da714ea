"""launch.sh on several hosts: what it prints on each, that values are right, and that all end when one does."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from harness.start.nodes import PEER_TIMEOUT, Nodes, Peer
from tests.hosts import NO_HOSTS
from tests.jobs import LAUNCH, Run, ended, free_port
from tests.markdown import BY_HAND

HEAD = "import os, sys, time\nimport oneflow as flow\nrank = flow.env.get_rank()\nflow.comm.barrier()\n"
EQUAL = " on a single device"
IN_TIME = 15  # seconds within which a job must end when a rank or a node is gone


@pytest.fixture(scope="module")
def waiting(hosts, tmp_path_factory):
    """Jobs that take long because they wait, all started at once: name -> runs."""
    path, port = tmp_path_factory.mktemp("waiting") / "mine.py", free_port()
    path.write_text(HEAD + "time.sleep(60)\n")
    short, nowhere = ("--timeout", 5), ("--master_addr", "nowhere.invalid", "--master_port", 29500)
    runs = {
        "time limit": start(hosts, "-n", 1, "--timeout", 12, path),
        "without 1": start(hosts, *short, "recipes/hybrid_parallel.py", only=[0]),
        "without 0": start(hosts, *short, "recipes/hybrid_parallel.py", only=[1]),
        "name": [Run(LAUNCH, "--nnodes", 2, "--node_rank", 1, *nowhere, *short, "recipes/hybrid_parallel.py")],
        "one": start(hosts, "-n", 2, *short, "recipes/row_parallel.py", only=[0], port=port),
    }
    runs["one"] += start(hosts, "-n", 1, *short, "recipes/row_parallel.py", only=[1], port=port)
    yield runs
    ended([run for both in runs.values() for run in both])


def start(hosts, *arguments, only=(0, 1), port=None, **more):
    """The same command on each of two hosts; without hosts, on two nodes that have one address."""
    port, runs = port or free_port(), []
    for node in only:
        address, prefix = (hosts.addresses[0], hosts.on(node)) if hosts else ("127.0.0.1", [])
        where = ["--nnodes", 2, "--node_rank", node, "--master_addr", address, "--master_port", port]
        runs.append(Run(*prefix, LAUNCH, *where, *arguments, **more))
    return runs


@pytest.fixture
def script(tmp_path):
    def write(lines, head=HEAD):
        path = tmp_path / "mine.py"
        path.write_text(head + lines + "\n")
        return path

    return write


@pytest.mark.parametrize("more", [(), ("--graph",)], ids=["eager", "graph"])
def test_commands_of_the_page_on_two_hosts(hosts, waiting, more):  # those that wait do so while others run
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
    port = free_port()
    command = ["--nnodes", 4, "--master_addr", hosts.addresses[0], "--master_port", port, "-n", 1, "--node_rank"]
    runs = [Run(*hosts.on(host), LAUNCH, *command, node, "recipes/row_parallel.py") for node, host in enumerate(where)]
    assert [(run.code, run.err) for run in ended(runs)] == [(0, "")] * 4
    assert EQUAL in runs[0].out
    assert "local shapes (4, 2) (4, 1) (4, 1) (4, 1)" in runs[0].out


def test_ranks_that_the_hosts_do_not_divide_are_refused(hosts):
    """OneFlow would hang at the start, or abort."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    command = ["--nnodes", 3, "--master_addr", hosts.addresses[0], "--master_port", free_port(), "-n", 1, "--node_rank"]
    for run in ended(
        [Run(*hosts.on(node % 2), LAUNCH, *command, node, "recipes/row_parallel.py") for node in range(3)]
    ):
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
        runs.append(Run(*hosts.on(node), *known, LAUNCH, *command, "--timeout", 60, "recipes/hybrid_parallel.py"))
    first, second = ended(runs)
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "") and EQUAL in first.out


def test_rank_that_fails_ends_both(hosts, script):
    runs = first, second = start(
        hosts, "-n", 2, script("print('met', flush=True)\nif rank == 3: 1 / 0\ntime.sleep(60)")
    )
    second.until("met")
    begin = time.monotonic()
    ended(runs)
    assert (first.code, second.code) == (1, 1) and time.monotonic() - begin < IN_TIME
    assert "[3] ZeroDivisionError: division by zero" in second.err and "Traceback" not in first.err
    for run in (first, second):
        assert "rank 3 of 4 on node 1 (" in run.err.splitlines()[-1], run.err
        assert run.err.splitlines()[-1].endswith("failed: exit code 1; every rank is ended")


@pytest.mark.parametrize("more", [(), ("--timeout", 0, "--max-restarts", 3)], ids=["once", "restarts"])
@pytest.mark.parametrize("node", [0, 1])
def test_node_that_dies_ends_the_other(hosts, script, node, more):
    """There is nobody to start again there, and nobody to wait for."""
    runs = start(hosts, "-n", 2, *more, script("print('met', flush=True)\ntime.sleep(60)"))
    for run in runs:
        run.until("met")
    begin = time.monotonic()
    runs[node].kill()
    [other] = ended([runs[1 - node]])
    assert other.code == 1 and time.monotonic() - begin < IN_TIME and "restart" not in other.err, other.err
    assert f"node {node} (" in other.err.splitlines()[-1] and "is gone" in other.err.splitlines()[-1], other.err


def test_reader_that_has_enough_on_one_host_is_told_on_the_other(hosts, script):
    lines = "if os.environ['RANK'] == '0': time.sleep(60)\nfor i in range(10**6): print('line', i)"
    port, path = free_port(), script(lines, "import os, time\n")
    command = f"{LAUNCH} --nnodes 2 --node_rank 1 --master_addr {hosts.addresses[0]} --master_port {port} -n 1 {path}"
    second = Run(*hosts.on(1), "bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}")
    [first] = start(hosts, "-n", 1, path, only=[0], port=port)
    ended([first, second])
    assert (first.code, second.code, second.out, second.err) == (141, 141, "[1] line 0\n", "")
    assert first.err.startswith("launch.sh: nobody reads the output on node 1 (")


def test_link_that_goes_down_ends_both(hosts, script):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    runs = start(hosts, "-n", 1, script("print('met', flush=True)\ntime.sleep(60)"))
    for run in runs:
        run.until("met")
    begin = time.monotonic()
    hosts.link(1, "down")
    try:
        first, second = ended(runs)
    finally:
        hosts.link(1, "up")
    assert time.monotonic() - begin < PEER_TIMEOUT + IN_TIME and (first.code, second.code) == (1, 1)
    assert "node 1 (" in first.err and "is gone" in first.err and "node 0 (" in second.err, second.err


@pytest.mark.parametrize("node, missing", [(0, "node 1 of 2"), (1, "node 0 at ")])
def test_node_that_never_comes(waiting, node, missing):
    [run] = ended(waiting[f"without {1 - node}"])
    [gives_up] = run.err.splitlines()
    assert run.code == 2 and run.waited.startswith(f"launch.sh: waiting for {missing}")
    assert gives_up.startswith(f"launch.sh: {missing}") and "did not come until --timeout" in gives_up


def test_name_that_is_not_known_is_tried_again_and_told(waiting):
    [run] = ended(waiting["name"])
    gives_up = run.err.splitlines()[-1]  # to ask for a name may take long
    assert run.code == 2 and "did not come" in gives_up
    assert gives_up.startswith("launch.sh: node 0 at nowhere.invalid:29500 (")


def test_node_that_comes_late(hosts, script):
    port = free_port()
    [second] = start(hosts, "-n", 1, script("print('met')"), only=[1], port=port)
    second.until("launch.sh: waiting for node 0 at ", stream="stderr")
    [first] = start(hosts, "-n", 1, script("print('met')"), only=[0], port=port)
    ended([first, second])
    assert (first.code, first.err, first.out, second.out) == (0, "", "[0] met\n", "[1] met\n")
    assert (second.code, second.err, second.waited.count("\n")) == (0, "", 1)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"node": 1}\n', b""])
def test_stranger_at_the_port_does_no_harm(script, words):
    port, path = free_port(), script("print('met')", "")
    [first] = start(None, "-n", 1, path, only=[0], port=port)
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            [second] = start(None, "-n", 1, path, only=[1], port=port)
            ended([first, second])
            break
    assert (first.code, first.err, first.out, second.out) == (0, "", "[0] met\n", "[1] met\n")


def test_nodes_with_one_number_say_so():
    runs = start(None, "-n", 1, "--timeout", 3, "recipes/row_parallel.py", only=[0, 0])
    assert sorted(run.code for run in ended(runs)) == [2, 2]
    assert any("take another one, the same on each node" in run.err for run in runs)


def test_nodes_that_do_not_agree_say_so(waiting):
    first, second = ended(waiting["one"])
    words = "--nproc_per_node 1 here, and 2 on node 0: type the same on each node"
    assert (first.code, second.code) == (2, 2) and second.err == f"launch.sh: {words}\n"


def test_interrupt_on_one_node_ends_both(hosts, script):
    runs = start(hosts, "-n", 2, script("print('met', flush=True)\ntime.sleep(60)"))
    for run in runs:
        run.until("met")
    os.killpg(runs[1].process.pid, signal.SIGINT)
    first, second = ended(runs)
    assert (first.code, second.code) == (130, 130)
    assert all("SIGINT on node 1 (" in run.err for run in runs)


def test_time_limit_shows_where_each_rank_is_on_each_node(waiting):
    first, second = ended(waiting["time limit"])
    assert (first.code, second.code) == (124, 124)
    assert "rank 0 of 2 is running" in first.err and "rank 1 of 2 is running" in second.err
    assert all("mine.py" in run.err for run in (first, second))


def test_restart_on_every_node(hosts, script, tmp_path):
    lines = (
        f"mark = '{tmp_path}/failed'\nif rank == 1 and not os.path.exists(mark):\n    open(mark, 'w'); sys.exit(3)\n"
    )
    path = script(lines + "flow.comm.barrier()\nprint('met again')")
    first, second = ended(start(hosts, "-n", 1, "--max-restarts", 2, path))
    assert (first.code, first.out, second.code, second.out) == (0, "[0] met again\n", 0, "[1] met again\n")
    for run in (first, second):
        reason, restart = run.err.splitlines()
        assert "rank 1 of 2 on node 1 (" in reason and "failed: exit code 3; every rank is ended" in reason
        assert restart == "launch.sh: restart 1 of 2"


def test_on_one_host_no_address_is_needed():
    run = Run(LAUNCH, "--master_addr", "10.9.9.9", "--timeout", 30, "recipes/data_parallel.py").wait()
    assert (run.code, run.err) == (0, "") and EQUAL in run.out


def test_restarts_come_to_an_end(script):
    path = script("sys.exit(3 if rank == 0 else 0)", "import os, sys\nrank = int(os.environ['RANK'])\n")
    run = Run(LAUNCH, "-n", 2, "--max-restarts", 2, path).wait()
    assert run.code == 3 and run.err.count("rank 0 of 2 failed: exit code 3") == 3 and run.all_gone()
    assert [line for line in run.err.splitlines() if "restart" in line] == [
        f"launch.sh: restart {k} of 2" for k in (1, 2)
    ]


BAD_INPUT = {
    "--nnodes 0": "--nnodes must be 1 or more, got 0",
    "--nnodes 2 --node_rank 2": "--node_rank must be from 0 to 1 with --nnodes 2, got 2",
    "--nnodes 2": "--nnodes needs node 0's address, the same on each node: --master_addr HOST --master_port 29500",
    "--nnodes 3 --master_addr 127.0.0.1 --master_port 29500": "runs on 4 ranks, not on 3 (1 on each of 3 nodes)",
    "--max-restarts -1": "--max-restarts must be 0 or more, got -1",
    "--nnodes 2 --master_addr ::1 --master_port 29500": "--master_addr ::1: OneFlow knows IPv4 only: type a name, or",
}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(line):
    run = Run(LAUNCH, *line.split(), "recipes/hybrid_parallel.py").wait()
    assert run.code == 2 and BAD_INPUT[line] in run.err and len(run.err.splitlines()) == 1, run.err


@pytest.mark.parametrize("real", [True, False], ids=["names", "addresses"])
def test_proxy_in_the_environment_does_no_harm_on_two_hosts(hosts, script, real):
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    if real:
        proxy["no_proxy"] = ",".join(hosts.addresses)  # right, and of no use to gRPC beside a no_grpc_proxy of ours
    first, second = ended(start(hosts, "-n", 2, "--timeout", 40, script("print('met')"), **proxy))
    assert [(run.code, run.err, run.out.count("met")) for run in (first, second)] == [(0, "", 2)] * 2


@pytest.mark.parametrize(
    "what, arguments, words",
    [
        ("arguments", ("--seed", 7), "arguments --seed 7 here, and none on node 0: type the same on each node"),
        ("master_addr", (), "--master_addr 127.0.0.2 here, and 127.0.0.1 on node 0: type the same on each node"),
        ("version", (), "version of the script "),
        ("script", (), "script other.py here, and mine.py on node 0: type the same on each node"),
    ],
)
def test_launchers_of_two_jobs_do_not_mix(script, tmp_path, what, arguments, words):
    """One of an earlier try that still waits, or of another job at this port: the job goes on without it."""
    port, path = free_port(), script("print('met')", "")
    other = tmp_path / "other" / ("other.py" if what == "script" else "mine.py")
    other.parent.mkdir()
    other.write_text(path.read_text() + "# changed\n" * (what == "version"))
    where = ["--nnodes", 2, "--node_rank", 1, "--master_port", port, "-n", 1]
    address = "127.0.0.2" if what == "master_addr" else "127.0.0.1"
    stale = Run(LAUNCH, *where, "--master_addr", address, other, *arguments)
    [first] = start(None, "-n", 1, path, only=[0], port=port)
    ended([stale])
    assert stale.code == 2 and stale.err.splitlines()[-1].startswith(f"launch.sh: {words}"), stale.err
    [second] = start(None, "-n", 1, path, only=[1], port=port)
    ended([first, second])
    assert (first.code, first.out, second.code, second.out) == (0, "[0] met\n", 0, "[1] met\n")


def test_messages_that_come_with_the_start_are_kept(monkeypatch):
    """Node 0 may send the start and, a moment later, the verdict, before a busy node 1 reads either."""
    port, receive = free_port(), Peer.receive
    first, second = (Nodes(2, number, 1, "127.0.0.1", port) for number in (0, 1))

    def lead():
        first.begin(1, time.monotonic() + 60, lambda: False)
        first.send(verdict={"code": 3})

    def read_late(peer):
        if threading.current_thread() is not leader:
            leader.join(60)
        return receive(peer)

    leader = threading.Thread(target=lead)
    monkeypatch.setattr(Peer, "receive", read_late)
    with first, second:
        leader.start()
        assert second.begin(0, time.monotonic() + 60, lambda: False)["port"] == 1
        assert list(second.receive()) == [{"verdict": {"code": 3}}]
