"""launch.sh on several hosts: what it prints on each, that values are right, and that all end when one of them does."""

import os
import re
import signal
import socket
import time

import pytest

from oneflow_cookbook.start.peer import Peer
from tests.hosts import NO_HOSTS
from tests.jobs import EQUAL, LAUNCH, MET, PLAIN, SLEEPS, Run, ended, free_port, has_printed, start, wait_until
from tests.markdown import BY_HAND

NOWHERE = ("--master_addr", "nowhere.invalid", "--master_port", 29500)


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
        with_names = ["sh", "-euc", f'mount --bind {names} /etc/hosts; exec "$@"', "sh"]
        command = ["--nnodes", 2, "--node_rank", node, "--master_addr", "alpha", "--master_port", port, "-n", 2]
        runs.append(Run(*hosts.on(node), *with_names, LAUNCH, *command, "recipes/hybrid_parallel.py"))
    first, second = ended(runs)
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "") and EQUAL in first.out


def test_rank_that_fails_ends_both(hosts, script):
    path = script(f"print('met', flush=True)\nif rank == 3: 1 / 0\n{SLEEPS}", MET)
    first, second = ended(start(hosts, "-n", 2, path))
    assert (first.code, second.code, second.out.count("met")) == (1, 1, 2)
    assert "[3] ZeroDivisionError: division by zero" in second.err and "Traceback" not in first.err
    for run in (first, second):
        assert "rank 3 of 4 on node 1 (" in run.err.splitlines()[-1], run.err
        assert run.err.splitlines()[-1].endswith("failed: exit code 1; every rank is ended")


def pull_cable(hosts, runs):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    hosts.link(1, "down")


# What happens to a node -> how, and the exit code and the last line of the launchers that report it, by node.
ENDS = {
    "node 0 dies": (lambda hosts, runs: runs[0].kill(), {1: (1, r"node 0 \(.*is gone")}),
    "node 1 dies": (lambda hosts, runs: runs[1].kill(), {0: (1, r"node 1 \(.*is gone")}),
    "link goes down": (pull_cable, {0: (1, r"node 1 \(.*is gone"), 1: (1, r"node 0 \(.*is gone")}),
    "Ctrl-C": (
        lambda hosts, runs: os.killpg(runs[1].process.pid, signal.SIGINT),
        {0: (130, r"SIGINT on node 1 \("), 1: (130, r"SIGINT on node 1 \(")},
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_end_of_one_node_ends_the_other_in_spite_of_restarts(hosts, script, what):
    """A launcher that is gone cannot start its ranks again."""
    happens, reports = ENDS[what]
    head = MET if "dies" in what else PLAIN  # OneFlow aborts a rank whose peer is gone: that must not be the reason
    runs = start(hosts, "-n", 1, "--timeout", 0, "--max-restarts", 3, script(SLEEPS, head))
    for run in runs:
        run.until("ready")
    happens(hosts, runs)
    try:
        ended(runs[node] for node in reports)
    finally:
        if hosts.real:
            hosts.link(1, "up")
    for node, (code, words) in reports.items():
        assert runs[node].code == code and re.search(words, runs[node].err.splitlines()[-1]), runs[node].err
        assert "restart" not in runs[node].err


def test_restarts_come_to_an_end(script):
    [run] = ended([Run(LAUNCH, "-n", 2, "--max-restarts", 2, script("sys.exit(3 if rank == 0 else 0)"))])
    assert run.code == 3 and run.err.count("rank 0 of 2 failed: exit code 3") == 3
    restarts = [line for line in run.err.splitlines() if "restart" in line]
    assert restarts == [f"launch.sh: restart {k} of 2" for k in (1, 2)]


def test_node_that_comes_late(hosts, script):
    """The wait has no limit, and after --silent the launcher says again which node is missing, and what to check."""
    port, path = free_port(), script("print('met')")
    [second] = start(hosts, "-n", 1, "--silent", 3, path, only=[1], port=port)
    second.until("launch.sh: waiting for node 0 at ", stream="stderr")
    second.until("launch.sh: still waiting for node 0 at ", stream="stderr")
    [first] = start(hosts, "-n", 1, path, only=[0], port=port)
    ended([first, second])
    assert (first.code, first.out, second.code, second.out) == (0, "[0] met\n", 0, "[1] met\n")
    assert (first.err, second.waited.count("\n"), second.err.count("\n")) == ("", 1, 1)
    assert "; check that launch.sh runs there" in second.err
    assert second.err.endswith("; to end it, press Ctrl-C, or start it with --timeout SECONDS\n")


def test_silent_job_is_shown_on_every_node(script):
    runs = start(None, "-n", 1, "--silent", 1, script(SLEEPS))
    for rank, run in enumerate(runs):
        run.until("launch.sh: no rank has printed for ", stream="stderr")
        run.until(f"launch.sh: rank {rank} of 2 is running", stream="stderr")
    runs[1].signal(signal.SIGINT)
    assert [run.code for run in ended(runs)] == [130, 130]


def early_jobs(tmp_path_factory):
    """A job whose rank 0 is silent for longer than --silent, while rank 1 prints."""
    script = tmp_path_factory.mktemp("silence") / "mine.py"
    lines = "for i in range(200 if rank else 1): print(i, flush=True); time.sleep(0.1)\nif not rank: time.sleep(20)\n"
    script.write_text(PLAIN + lines)
    return {"silence": start(None, "-n", 1, "--silent", 15, script)}


def test_what_ranks_of_another_node_print_ends_the_silence(early):
    """As in most training scripts, in which one rank prints the loss."""
    for rank, run in enumerate(ended(early["silence"])):
        assert (run.code, run.err) == (0, "") and f"[{rank}] 0\n" in run.out


def test_launchers_of_two_jobs_do_not_mix(script, tmp_path):
    """A launcher of an earlier try that still waits, or of another job at this port, is refused; the job continues."""
    port, path = free_port(), script("print('met')")
    (tmp_path / "other").mkdir()
    changed = tmp_path / "other" / "mine.py"
    changed.write_text(path.read_text() + "# changed\n")
    strangers = {  # what node 1 starts -> why it is refused
        (path, "--seed", 7): "arguments --seed 7 here, and none on node 0: type the same on each node",
        (changed,): "version of the script ",
    }
    runs = [start(None, "-n", 1, *command, only=[1], port=port)[0] for command in strangers]
    [first] = start(None, "-n", 1, path, only=[0], port=port)
    for run, words in zip(ended(runs), strangers.values()):
        assert run.code == 2 and run.err.startswith(f"launch.sh: {words}") and run.err.count("\n") == 1, run.err
    [second] = start(None, "-n", 1, path, only=[1], port=port)
    ended([first, second])
    assert (first.code, first.out, second.code, second.out) == (0, "[0] met\n", 0, "[1] met\n")


def test_node_that_is_started_twice_is_refused_while_the_job_runs(script):
    """Else it would wait forever, and a second job at this port would accept launchers of the first."""
    port, path = free_port(), script(SLEEPS)
    runs = start(None, "-n", 1, path, port=port)
    runs[0].until("ready")
    again = [start(None, "-n", 1, path, only=[node], port=port)[0] for node in (1, 0)]
    joins, leads = (run.err for run in ended(again))
    assert joins == "launch.sh: --node_rank 1 is taken: number the nodes from 0 to 1, each once\n"
    assert leads.startswith(f"launch.sh: --master_port {port}: Address already in use; ") and leads.count("\n") == 1
    assert [run.code for run in again] == [2, 2] and all(run.process.poll() is None for run in runs)
    runs[0].signal(signal.SIGTERM)
    assert [run.code for run in ended(runs)] == [143, 143]


SAVES = """
def save(number, frame):
    print("saves", flush=True)
    while not os.path.exists("go"): time.sleep(0.01)
    sys.exit("saved")
if rank == RANK: signal.signal(signal.SIGTERM, save)
"""


@pytest.mark.parametrize("saving, signalled", [(0, 1), (1, 0)])
def test_nodes_wait_for_a_rank_that_saves_a_checkpoint_at_sigterm(script, tmp_path, saving, signalled):
    """Whichever launcher gets the signal. All end together: srun may kill the others when the first exits."""
    path = script(SAVES.replace("RANK", str(saving)) + SLEEPS)
    runs = [run.until("ready") for run in start(None, "-n", 1, "--grace", 1000, path, cwd=tmp_path)]
    runs[signalled].signal(signal.SIGTERM)
    runs[saving].until("saves")
    wait_until(lambda: not runs[1 - saving].ranks(), "the end of the rank that does not save")
    time.sleep(1.5)  # ranks of a job that has failed have 1 s
    assert all(run.process.poll() is None for run in runs)
    (tmp_path / "go").touch()
    assert [run.code for run in ended(runs)] == [143, 143]
    assert f"[{saving}] saved" in runs[saving].err, runs[saving].err


def test_node_without_a_loopback_interface_is_refused(hosts, script):
    """Its ranks would wait for each other forever."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    hosts.loopback(1, "down")
    try:
        first, second = ended(start(hosts, "-n", 2, "--timeout", 2, script("print('met')", MET)))
    finally:
        hosts.mend()
    assert second.code == 2 and "launch.sh: ranks cannot meet at 127.0.0.1: " in second.err
    assert first.code == 2 and "node 1 of 2 did not come within --timeout" in first.err


def test_node_that_never_comes():
    command = ("--timeout", 1, "recipes/hybrid_parallel.py")
    [leader] = start(None, *command, only=[0])
    lost = Run(LAUNCH, "--nnodes", 2, "--node_rank", 1, *NOWHERE, *command)
    for run, missing in zip(ended([leader, lost]), ("node 1 of 2", "node 0 at nowhere.invalid:29500 (")):
        gives_up = run.err.splitlines()[-1]
        assert run.code == 2 and "did not come within --timeout" in gives_up
        assert gives_up.startswith(f"launch.sh: {missing}")


def test_messages_that_come_together_are_read_one_by_one():
    """Node 0 may send the start and, a moment later, the verdict, before a busy node 1 reads either."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as node_0:
        connection, _ = server.accept()
        with connection:
            peer = Peer(connection, "")
            node_0.sendall(b'{"start": 1}\n{"verdict": 2}\n')
            wait_until(lambda: peer.receive() == {"start": 1}, "the first message")
            assert (peer.receive(), peer.receive()) == ({"verdict": 2}, None)
