"""What the recipes on starting say beyond values: ranks find each other, and after a death the bits are the same."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cases import ROOT
from tests.hosts import NO_HOSTS
from tests.jobs import LAUNCH, Run, ended, free_port, launch, official, without_rounding
from tests.markdown import COMMANDS, ENGLISH, blocks

EQUAL = "equal to the single-device values: largest difference "
MODES = pytest.mark.parametrize("more", [(), ("--graph",)], ids=["eager", "graph"])
ALONE = {name: None for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")}


def killed(run):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGKILL)
    return run.wait()


@pytest.fixture
def one_rank():
    """Starts rendezvous.py once, as one of two ranks if nothing else is said; who still runs at the end is killed."""
    runs = []

    def start(meet, *more, before=(), **variables):
        given = {**ALONE, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "3", **variables}
        runs.append(Run(*before, sys.executable, "recipes/starting/rendezvous.py", "--meet", meet, *more, **given))
        return runs[-1]

    yield start
    for run in runs:
        killed(run)


def ports(run, state):
    """The local ports of the TCP sockets in this state (0A listens, 01 is connected) on the host where a run is."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{run.process.pid}/net/tcp").read_text().splitlines()[1:]
        return [int(line.split()[1].split(":")[1], 16) for line in lines if line.split()[3] == state]
    return []


def received(run, port, guests):
    """Wait until a run that receives at this port has so many guests, or listens, if none are asked for."""
    deadline = time.monotonic() + 30
    while port not in ports(run, "0A") or ports(run, "01").count(port) < guests:
        assert time.monotonic() < deadline and run.process.poll() is None, killed(run).err
        time.sleep(0.02)
    return run


def guest(at, **words):
    """A connection to the rank of this host that receives at this port; on it another rank has said hello."""
    connection = socket.create_connection(("127.0.0.1", at), timeout=30)
    hello = {"secret": "", "via": "127.0.0.1", "rank": None, "port": 1, "world_size": 2, **words}
    connection.sendall((json.dumps(hello) + "\n").encode())
    return connection


def answer(connection):
    """What the guest is told when all have come, behind the word that it has met somebody."""
    lines = connection.makefile()
    assert json.loads(lines.readline()) == {"met": True}
    return lines.readline()


def meeting(meet, ranks, hosts=None, more=(), **variables):
    """rendezvous.py started once for each rank, which is its RANK or None, on two hosts in turns; all at their end."""
    given = {**ALONE, "WORLD_SIZE": str(len(ranks)), "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "3", **variables}
    command = [sys.executable, "recipes/starting/rendezvous.py", "--meet", meet, *more]
    return ended(
        [
            Run(*(hosts.on(k % 2) if hosts else []), *command, **{**given, "RANK": None if rank is None else str(rank)})
            for k, rank in enumerate(ranks)
        ]
    )


def found_each_other(runs, numbers=None):
    """Each rank is there once, all say the same of rank 0, whose address they return."""
    assert [(run.code, run.err) for run in runs] == [(0, "")] * len(runs)
    said = [
        re.search(r"rank (\d+): by .+ rank (\d+) has found rank 0 at (\S+):\d+\n", run.out).groups() for run in runs
    ]
    assert sorted(int(own) for own, _, _ in said) == list(range(len(runs)))
    assert all(own == again for own, again, _ in said)
    assert numbers is None or [int(own) for own, _, _ in said] == numbers
    [leader] = {leader for _, _, leader in said}
    [result] = [line for run in runs for line in run.out.splitlines() if EQUAL in line]
    return leader


@MODES
def test_ranks_without_numbers_meet_at_an_address(hosts, more):
    where = f"tcp://{hosts.addresses[1]}:{free_port()}"
    leader = found_each_other(meeting(where, [None] * 4, hosts, more))
    assert leader in hosts.addresses


def test_ranks_with_and_without_numbers_meet_at_an_address():
    runs = meeting(f"tcp://127.0.0.1:{free_port()}", [2, None, 0])
    found_each_other(runs, [2, 1, 0])


def test_ranks_meet_by_a_file(hosts, tmp_path):
    leader = found_each_other(meeting(f"file://{tmp_path}/job", [1, 0, 2, 3], hosts), [1, 0, 2, 3])
    assert leader == hosts.addresses[1] or not hosts.real
    assert os.listdir(tmp_path) == []


def test_ranks_without_numbers_get_neighbouring_ones_on_each_host(hosts, one_rank):
    port = free_port()
    where, variables = f"tcp://{hosts.addresses[0]}:{port}", {"WORLD_SIZE": "4"}
    runs = [received(one_rank(where, before=hosts.on(0), **variables), port, 0)]
    for k in (1, 0, 1):
        runs.append(one_rank(where, before=hosts.on(k), **variables))
        if len(runs) < 4:
            received(runs[0], port, len(runs) - 1)
    found_each_other(ended(runs), [0, 2, 1, 3] if hosts.real else [0, 1, 2, 3])


def test_rank_0_beside_the_one_that_receives_is_told_by_an_address_for_all(hosts, one_rank, tmp_path):
    """On its own host the name is 127.0.1.1, as Debian sets it up; elsewhere it is an address that can be reached."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    port, before = free_port(), []
    for k, address in enumerate(["127.0.1.1", hosts.addresses[0]]):
        (tmp_path / f"hosts{k}").write_text(f"127.0.0.1 localhost\n{address} first\n")
        names = f'mount --bind {tmp_path}/hosts{k} /etc/hosts && exec "$0" "$@"'
        before.append([*hosts.on(k), "bash", "-c", names])
    runs = [received(one_rank(f"tcp://first:{port}", before=before[0], WORLD_SIZE="4"), port, 0)]
    for k, rank in ((0, "0"), (1, None), (1, None)):
        runs.append(one_rank(f"tcp://first:{port}", before=before[k], WORLD_SIZE="4", RANK=rank))
        if len(runs) < 4:
            received(runs[0], port, len(runs) - 1)
    assert found_each_other(ended(runs), [1, 0, 2, 3]) == hosts.addresses[0]


def test_ranks_of_one_host_meet_on_its_loopback(one_rank):
    """A guest may have come through an interface that others do not reach, such as that of Docker."""
    port = free_port()
    received(one_rank(f"tcp://127.0.0.1:{port}", RANK="0"), port, 0)
    with guest(port, via="172.17.0.1") as connection:
        told = answer(connection)
    assert '"127.0.0.1"' in told and "172.17.0.1" not in told


def test_guest_that_has_left_before_all_meet_is_not_counted(one_rank):
    port = free_port()
    where, three = f"tcp://127.0.0.1:{port}", {"WORLD_SIZE": "3"}
    runs = [received(one_rank(where, RANK="0", **three), port, 0)]
    left = one_rank(where, RANK="1", **three)
    received(runs[0], port, 1)
    killed(left)
    runs.append(one_rank(where, RANK="2", **three))
    received(runs[0], port, 1)
    time.sleep(1)
    runs.append(one_rank(where, RANK="1", **three))
    found_each_other(ended(runs), [0, 2, 1])


def test_guest_that_leaves_while_it_is_told_hurts_nobody():
    code = (
        "import sys; sys.path.insert(0, 'recipes'); import socket, rendezvous; a, b = socket.socketpair(); b.close();"
    )
    run = Run(sys.executable, "-c", f"{code} rendezvous.say(a, rank=1); print('said')", **ALONE).wait()
    assert (run.code, run.out) == (0, "said\n"), run.err


def test_rank_0_has_time_to_start_after_all_have_met(one_rank):
    """It is there late, and then imports OneFlow, beyond the time until which the first would have waited for it."""
    port = free_port()
    received(one_rank(f"tcp://127.0.0.1:{port}", "--wait", 12, RANK="1"), port, 0)
    time.sleep(6)
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", 0))
        with guest(port, rank=0, port=rank_0.getsockname()[1]) as connection:
            assert answer(connection)
        time.sleep(7)
        rank_0.listen()
        rank_0.settimeout(10)
        rank_0.accept()[0].close()


def test_rank_0_that_does_not_start_is_told(one_rank):
    port = free_port()
    run = received(one_rank(f"tcp://127.0.0.1:{port}", "--wait", 3, RANK="1"), port, 0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with guest(port, rank=0, port=nobody.getsockname()[1]) as connection:
            assert answer(connection)
            run.wait()
    words = "recipes/starting/rendezvous.py: rank 0 met us and then did not start OneFlow on 127.0.0.1\n"
    assert (run.code, run.err, run.all_gone()) == (2, words, True)


@pytest.mark.parametrize("later", ["of another job", None])
def test_file_of_a_later_job_is_left_alone(one_rank, tmp_path, later):
    run, path = one_rank(f"file://{tmp_path}/job", "--wait", 2, RANK="0"), tmp_path / "job"
    while not path.exists():
        time.sleep(0.02)
    path.unlink()
    if later:
        path.write_text(later)
    run.wait()
    assert run.code == 2 and "only 1 of 2 ranks came" in run.err and run.err.count("\n") == 1, run.err
    assert [path.read_text() for path in tmp_path.iterdir()] == [later] * bool(later)


def test_rank_of_another_world_size_is_refused_and_the_others_meet(one_rank):
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    first = received(one_rank(where), port, 0)
    wrong = one_rank(where, WORLD_SIZE="4").wait()
    words = "WORLD_SIZE is 4 here, and 2 at the rank that receives us: set the same for each rank\n"
    assert (wrong.code, wrong.err) == (2, f"recipes/starting/rendezvous.py: {words}")
    found_each_other(ended([first, one_rank(where)]))


@pytest.mark.parametrize("way", ["tcp", "file"])
def test_ranks_that_the_hosts_do_not_divide_are_refused(hosts, tmp_path, way):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    where = {"tcp": f"tcp://{hosts.addresses[0]}:{free_port()}", "file": f"file://{tmp_path}/job"}[way]
    for run in meeting(where, [0, 1, 2], hosts):
        assert run.code == 2 and "OneFlow 0.9.0 would hang: 3 ranks cannot be divided by 2 hosts" in run.err


@pytest.mark.parametrize("stale", ['{"addresses": ["127.0.0.1"], "port": PORT, "secret": "x"}', "{", "[]", ""])
def test_file_of_an_earlier_job_confuses_nobody(tmp_path, stale):
    """At its port nobody listens, or somebody else: here a later job, which waits for its own ranks."""
    port = free_port()
    (tmp_path / "job").write_text(stale.replace("PORT", str(port)))
    given = {**ALONE, "WORLD_SIZE": "2", "GLOG_minloglevel": "3"}
    command = [sys.executable, "recipes/starting/rendezvous.py", "--wait", 20, "--meet"]
    late = [Run(*command, f"file://{tmp_path}/job", **{**given, "RANK": "1"})]
    other = [Run(*command, f"tcp://127.0.0.1:{port}", **given) for _ in range(2)]
    ended(other)
    late.append(Run(*command, f"file://{tmp_path}/job", **{**given, "RANK": "0"}))
    for job in (other, late):
        found_each_other(ended(job))


def test_two_jobs_at_once_by_two_files(tmp_path):
    given = {**ALONE, "WORLD_SIZE": "2", "GLOG_minloglevel": "3"}
    command = [sys.executable, "recipes/starting/rendezvous.py", "--meet"]
    jobs = [[Run(*command, f"file://{tmp_path}/{job}", **{**given, "RANK": str(k)}) for k in (0, 1)] for job in "ab"]
    for job in jobs:
        found_each_other(ended(job))


TAKES = "--meet takes env://, tcp://HOST:PORT with a name or an IPv4 address, or file:///PATH, not"
REFUSED = {
    "tcp://127.0.0.1:PORT": (["0", "0"], "the ranks must be 0 to 1, each once, not [0, 0]: set RANK right"),
    "file:///nowhere/job": (["0"], "--meet file:///nowhere/job: No such file or directory: name a file in a folder"),
    "file:///tmp/no": ([None], "--meet file:// needs a RANK and a WORLD_SIZE of 2 or more in the environment"),
    "tcp://127.0.0.1:29400": (["1x"], "RANK must be a number from 0 to 1, not 1x: WORLD_SIZE is 2"),
    "tcp://127.0.0.1:29401": (["2"], "RANK must be a number from 0 to 1, not 2: WORLD_SIZE is 2"),
    "file:///tmp/never": (["-1"], "RANK must be a number from 0 to 1, not -1: WORLD_SIZE is 2"),
}
for no_way in (
    *("udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536"),
    *("tcp://:29400", "tcp://a..b:29400", "tcp://[::1]:29400", "file://shared/job", "file:job", "file:///"),
):
    REFUSED[no_way] = (["0"], f"{TAKES} {no_way}: type --meet tcp://127.0.0.1:29400")


@pytest.mark.parametrize("meet", REFUSED)
def test_bad_meeting_is_refused_in_one_line(meet):
    ranks, words = REFUSED[meet]
    for run in meeting(meet.replace("PORT", str(free_port())), ranks, WORLD_SIZE="2"):
        assert run.code == 2 and words in run.err and run.err.count("\n") == 1, run.err
        assert run.seconds < 30


@pytest.mark.parametrize("wait", ["0", "-1", "x", "99999999999"])
def test_meeting_that_waits_for_no_time_is_refused(one_rank, wait):
    run = one_rank("tcp://127.0.0.1:29400", "--wait", wait).wait()
    words = (
        "argument --wait: invalid int value: 'x'" if wait == "x" else f"--wait takes 1 to 1000000 seconds, not {wait}"
    )
    assert run.code == 2 and words in run.err and run.err.count("\n") == 1, run.err


def test_meeting_at_an_unknown_name_is_refused_for_that_reason(one_rank):
    run = one_rank("tcp://nosuch.invalid:29400", "--wait", 1).wait()
    words = (
        r"nobody received us at tcp://nosuch.invalid:29400 in 1 s: .*; no address of nosuch.invalid is known \(.+\)\n"
    )
    assert run.code == 2 and re.search(words, run.err) and run.err.count("\n") == 1, run.err


def test_meeting_at_a_port_of_another_program_is_refused_for_that_reason(one_rank):
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        run = one_rank(where, "--wait", 1).wait()
    words = "start the others as well, or --wait longer; another program may have the port\n"
    assert (run.code, run.err) == (2, f"recipes/starting/rendezvous.py: nobody received us at {where} in 1 s: {words}")


def test_path_may_be_any(tmp_path):
    found_each_other(meeting(f"file://{tmp_path}/job ?#1", [0, 1]))


def test_file_that_cannot_be_put_there_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    [run] = meeting(f"file://{tmp_path}/folder", [0], WORLD_SIZE="2")
    words = f"--meet file://{tmp_path}/folder: Is a directory: name a file in a folder that all hosts share\n"
    assert (run.code, run.err) == (2, f"recipes/starting/rendezvous.py: {words}")
    assert os.listdir(tmp_path) == ["folder"]


def test_option_may_be_cut_short(one_rank):
    run = one_rank("env://", "--mee", "tcp://127.0.0.1:1", "--wai", 1, RANK="2").wait()
    assert run.code == 2 and "RANK must be a number from 0 to 1, not 2" in run.err


@pytest.mark.parametrize("way", ["tcp", "file"])
def test_rank_that_was_received_knows_that_others_are_missing(one_rank, tmp_path, way):
    port, three = free_port(), {"WORLD_SIZE": "3"}
    where = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/job"}[way]
    first = one_rank(where, "--wait", 30, RANK="0", **three)
    if way == "tcp":
        received(first, port, 0)
    else:
        while not (tmp_path / "job").exists():
            time.sleep(0.02)
    run = one_rank(where, "--wait", 2, RANK="1", **three).wait()
    words = f"only some of 3 ranks came to {where} in 2 s: start the others as well, or --wait longer\n"
    assert (run.code, run.err) == (2, f"recipes/starting/rendezvous.py: {words}")


def test_file_of_an_earlier_job_whose_port_is_silent_confuses_nobody(one_rank, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stale = {"addresses": ["127.0.0.1"], "port": silent.getsockname()[1], "secret": "x"}
        (tmp_path / "job").write_text(json.dumps(stale))
        where = f"file://{tmp_path}/job"
        late = one_rank(where, "--wait", 30, RANK="1")
        time.sleep(1)
        found_each_other(ended([late, one_rank(where, "--wait", 30, RANK="0")]))


def test_rank_that_is_lost_after_all_have_met_does_not_hold_up_the_others(one_rank):
    """Rank 1 has met us, and never starts OneFlow; in another job rank 0, at whose port somebody else listens."""
    port = free_port()
    left = received(one_rank(f"tcp://127.0.0.1:{port}", "--wait", 5, RANK="0"), port, 0)
    with guest(port, rank=1) as connection:
        assert "leader" in answer(connection)
    other, port = free_port(), free_port()
    alone = received(one_rank(f"tcp://127.0.0.1:{port}", "--wait", 5, RANK="1"), port, 0)
    with socket.create_server(("127.0.0.1", other)), guest(port, rank=0, port=other):
        for run in (left, alone):
            run.wait(30)
            assert run.code == 1 and "Timeout (0:00:05)!" in run.err, run.err


def test_meeting_at_a_port_of_the_system_is_refused_to_others(one_rank):
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) < 2:
        pytest.skip("each user may take each port here")
    before = [] if os.geteuid() else ["setpriv", "--bounding-set", "-net_bind_service"]
    run = one_rank("tcp://127.0.0.1:1", before=before).wait()
    words = "recipes/starting/rendezvous.py: --meet tcp://127.0.0.1:1: port 1 is not for all users: take one from 1024 up\n"
    assert (run.code, run.err) == (2, words) and run.seconds < 30


@pytest.mark.parametrize("world_size", ["", "0", "1", "-2", "two"])
def test_meeting_of_nobody_is_refused(world_size):
    [run] = meeting("tcp://127.0.0.1:1", [None], WORLD_SIZE=world_size)
    words = "--meet tcp:// needs a WORLD_SIZE of 2 or more in the environment of each rank\n"
    assert (run.code, run.err) == (2, f"recipes/starting/rendezvous.py: {words}")


@pytest.mark.parametrize("meet, words", [("tcp", "only 1 of 2 ranks came"), ("file", "only 1 of 2 ranks came")])
def test_rank_that_does_not_come_is_missed(tmp_path, meet, words):
    where = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/job"}[meet]
    [run] = meeting(where, ["0"], more=("--wait", 1), WORLD_SIZE="2")
    assert run.code == 2 and words in run.err and run.seconds < 15 and os.listdir(tmp_path) == []


def test_hello_tells_hosts_apart(hosts):
    port = free_port()
    common = ["--nnodes", 2, "--master_addr", hosts.addresses[0], "--master_port", port, "-n", 2]
    runs = [
        Run(*hosts.on(k), LAUNCH, *common, "--node_rank", k, ROOT / "recipes" / "starting" / "hello_ranks.py", "--graph")
        for k in (0, 1)
    ]
    ended(runs)
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    for rank in range(4):
        out = runs[rank // 2].out
        assert f"[{rank}] rank {rank}: I am rank {rank} of 4: local rank {rank % 2} on node {rank // 2} of 2\n" in out
        assert f"({hosts.addresses[rank // 2]}); rank 0 is at {hosts.addresses[0]}:" in out


@pytest.mark.parametrize("where", [(0, 1, 0, 1), (1, 0, 0, 1)], ids=["in turns", "inside out"])
def test_hello_tells_hosts_apart_whose_ranks_are_mixed(hosts, where):
    """Nodes are counted by their first rank, as a reader counts them, and local ranks on each."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    common = ["--nnodes", 4, "--master_addr", hosts.addresses[where[0]], "--master_port", free_port(), "-n", 1]
    runs = [
        Run(*hosts.on(host), LAUNCH, *common, "--node_rank", rank, ROOT / "recipes" / "starting" / "hello_ranks.py")
        for rank, host in enumerate(where)
    ]
    for rank, run in enumerate(ended(runs)):
        local, node = where[:rank].count(where[rank]), int(where[rank] != where[0])
        assert (run.code, run.err) == (0, ""), run.err
        assert f"[{rank}] rank {rank}: I am rank {rank} of 4: local rank {local} on node {node} of 2\n" in run.out
        assert f"({hosts.addresses[where[rank]]}); rank 0 is at {hosts.addresses[where[0]]}:" in run.out
    assert EQUAL in runs[0].out


def test_spawned_rank_that_raises_ends_the_program(tmp_path):
    text = (ROOT / "recipes" / "starting" / "spawn.py").read_text()
    broken = text.replace("    out = model(x)\n", "    out = model(x)\n    if flow.env.get_rank() == 1: 1 / 0\n")
    (tmp_path / "mine.py").write_text(broken)
    run = Run(sys.executable, tmp_path / "mine.py", "--ranks", 3, **ALONE).wait()
    assert run.code == 1 and run.seconds < 80 and run.all_gone(), run.err
    assert run.err.count("ZeroDivisionError: division by zero") == 1
    assert "RuntimeError: rank 1 of 3 ended without a result" in run.err


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_spawned_rank_that_dies_in_its_import_ends_the_program(tmp_path, rank):
    """The others wait for it in theirs, and do not read their large arguments."""
    text = (ROOT / "recipes" / "starting" / "spawn.py").read_text()
    dies = f"    if __name__ == '__mp_main__' and os.environ['RANK'] == '{rank}':\n        os._exit(1)\n"
    (tmp_path / "mine.py").write_text(text.replace("    import oneflow", f"{dies}    import oneflow"))
    large = ["--ranks", 3, "--batch", 512, "--in-features", 512]
    run = Run(sys.executable, tmp_path / "mine.py", *large, **ALONE).wait()
    assert run.code == 1 and run.seconds < 80 and run.all_gone(), run.err
    assert f"RuntimeError: rank {rank} of 3 ended without a result" in run.err


@pytest.mark.parametrize("after", [0.5, 1, 1.5, 2, 3])
def test_program_that_is_terminated_leaves_no_rank(after):
    run = Run(sys.executable, "recipes/starting/spawn.py", "--ranks", 4, "--batch", 512, **ALONE)
    time.sleep(after)
    run.process.terminate()
    run.wait(30)
    assert run.code in (-signal.SIGTERM, 128 + signal.SIGTERM, 0) and run.all_gone(), run.err


def test_program_that_spawns_is_started_in_all_ways():
    """Large arguments, which do not fit into a pipe before OneFlow is imported on the other side."""
    for command in ([sys.executable], [LAUNCH]):
        run = Run(*command, "recipes/starting/spawn.py", "--ranks", 2, "--batch", 512, "--in-features", 512, **ALONE).wait()
        assert run.code == 0 and EQUAL in run.out and run.all_gone(), run.err
        assert "rank 0: rank 1 of 2 held x (256, 512), w (512, 8), out (256, 8)" in run.out


ELASTIC = "recipes/starting/elastic_training.py"


def hashes(run):
    assert run.code == 0 and EQUAL in run.out, run.err
    return set(re.findall(r"sha256 of the weights (\w{16})$", run.out, flags=re.MULTILINE))


def train(folder, *more, n=2, before=()):
    return Run(LAUNCH, "-n", n, *before, ELASTIC, "--folder", folder, *more).wait()


@MODES
def test_weights_after_a_death_are_those_of_an_undisturbed_run_bit_by_bit(tmp_path, more):
    [wanted] = hashes(Run(LAUNCH, ELASTIC, "--steps", 6, *more).wait())
    run = train(tmp_path, "--steps", 6, "--die", 5, *more, before=("--max-restarts", 1))
    assert hashes(run) == {wanted} and "rank 1: steps 5 to 6;" in run.out
    assert kept(tmp_path) == ["step-4", "step-6"]
    again = train(tmp_path, "--steps", 6, *more)
    assert hashes(again) == {wanted} and "all 6 steps were done before" in again.out


def test_block_of_the_readme(tmp_path):
    [command] = [line for line in COMMANDS if "--max-restarts" in line]
    run = Run("bash", "-c", command.replace("checkpoints", str(tmp_path))).wait()
    [shown] = [block for block in blocks(ENGLISH, "text") if "restart 1 of 3" in block]
    said = without_rounding(run.err + run.out).splitlines()
    assert run.code == 0 and all(line in said for line in without_rounding(shown).splitlines()), said


@MODES
def test_training_goes_on_on_fewer_ranks(tmp_path, more):
    assert train(tmp_path, "--steps", 6, "--die", 3, *more, n=3).code == 137
    run = train(tmp_path, "--steps", 6, *more, n=2)
    assert len(hashes(run)) == 1 and "rank 1: steps 3 to 6;" in run.out
    run = train(tmp_path, "--steps", 7, *more, n=1)
    assert len(hashes(run)) == 1 and "steps 7 to 7;" in run.out


def spoil(path, how):
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "flip":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "flip", "remove"])
@pytest.mark.parametrize("file", ["pickled_data", "sha256", "global_tensor_*/out"])
def test_damaged_checkpoint_is_put_aside_and_the_one_before_taken(trained, tmp_path, file, how):
    folder, wanted = trained
    shutil.copytree(folder, tmp_path / "new")
    spoil(min((tmp_path / "new" / "step-4").glob(file)), how)
    run = train(tmp_path / "new")
    assert hashes(run) == {wanted} and "steps 3 to 4;" in run.out
    assert kept(tmp_path / "new") == ["step-2", "step-4", "step-4-damaged"]
    words = f"checkpoint 4 is damaged: it is now {tmp_path}/new/step-4-damaged, and training goes on from step 2"
    assert run.err == f"[0] elastic_training.py: {words}\n"


def kept(folder):
    """The names in a folder but for that of the lock, which is empty."""
    return sorted(set(os.listdir(folder)) - {"step-lock"})


def everything(folder):
    """All that is in a folder but for the lock: names, and what is in the files."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()]
    found = [path for path in found if path.name != "step-lock"]
    return [(str(path), os.readlink(path) if path.is_symlink() else path.read_bytes()) for path in found]


def test_no_checkpoint_that_is_whole_is_no_new_beginning(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "new")
    for step in (2, 4):
        spoil(tmp_path / "new" / f"step-{step}" / "pickled_data", "flip")
    before = everything(tmp_path / "new")
    for _ in range(2):
        run = train(tmp_path / "new", before=("--max-restarts", 3))
        words = f"--folder {tmp_path}/new: no checkpoint in it is whole: name another folder"
        assert (run.code, run.err) == (2, f"elastic_training.py: {words}\n")
    assert everything(tmp_path / "new") == before


@pytest.mark.parametrize("file", ["pickled_data", "sha256", "global_tensor_*/out"])
def test_disk_that_cannot_be_read_damages_no_checkpoint(trained, tmp_path, file):
    """/proc/self/mem is a file at the start of which Linux always says EIO."""
    shutil.copytree(trained[0], tmp_path / "new")
    path = min((tmp_path / "new" / "step-4").glob(file))
    path.unlink()
    path.symlink_to("/proc/self/mem")
    before = everything(tmp_path / "new")
    run = train(tmp_path / "new")
    words = f"--folder {tmp_path}/new: Input/output error: name another folder"
    assert (run.code, run.err) == (2, f"elastic_training.py: {words}\n")
    assert everything(tmp_path / "new") == before


@pytest.mark.parametrize("closed", ["step-4", "step-4/global_tensor_*", "step-4/sha256", "step-4/pickled_data"])
def test_checkpoint_that_one_may_not_read_is_not_put_aside(trained, tmp_path, closed):
    shutil.copytree(trained[0], tmp_path / "new")
    before, [path] = everything(tmp_path / "new"), sorted((tmp_path / "new").glob(closed))[:1]
    mode = path.stat().st_mode
    path.chmod(0)
    run = Run(*not_root(), LAUNCH, ELASTIC, "--folder", tmp_path / "new").wait()
    path.chmod(mode)
    words = f"--folder {tmp_path}/new: Permission denied: name another folder"
    assert (run.code, run.err) == (2, f"elastic_training.py: {words}\n")
    assert everything(tmp_path / "new") == before


def not_root():
    """The words that run a command with the rights of the owner of our files alone."""
    if os.geteuid():
        return []
    if subprocess.run(["unshare", "--user", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("root may read and write all, and `unshare --user` does not work here")
    return ["unshare", "--user"]


def test_folder_that_cannot_be_written_is_refused(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "new")
    before = everything(tmp_path / "new")
    (tmp_path / "new").chmod(0o555)
    run = Run(*not_root(), LAUNCH, ELASTIC, "--folder", tmp_path / "new", "--steps", 6).wait()
    (tmp_path / "new").chmod(0o755)
    words = f"--folder {tmp_path}/new: cannot be written: name another folder"
    assert (run.code, run.err) == (2, f"elastic_training.py: {words}\n")
    assert everything(tmp_path / "new") == before


def test_disk_that_is_mounted_read_only_is_refused(hosts, tmp_path):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    script = f"mount -t tmpfs -o ro none {tmp_path} && {LAUNCH} {ELASTIC} --folder {tmp_path}"
    user = [*hosts.user, "--map-root-user"] if hosts.user else []
    run = Run("unshare", *user, "--mount", "bash", "-c", script).wait()
    words = f"--folder {tmp_path}: cannot be written: name another folder"
    assert (run.code, run.err) == (2, f"elastic_training.py: {words}\n")


@MODES
def test_training_touches_nothing_else_in_the_folder(tmp_path, more):
    """What a user keeps there, and the checkpoints of another recipe, also one that a crash has left unfinished."""
    assert launch("recipes/data_and_state/checkpoint.py", "--folder", tmp_path).code == 0
    for name in ("2023", "2024", "9", "unfinished", "damaged-2", "step-last", "step-08"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("keep")
    before, names = everything(tmp_path), sorted(os.listdir(tmp_path))
    for steps in (6, 8):
        assert len(hashes(train(tmp_path, "--steps", steps, *more))) == 1
    assert kept(tmp_path) == sorted([*names, "step-6", "step-8"])
    assert [one for one in everything(tmp_path) if "/step-6/" not in one[0] and "/step-8/" not in one[0]] == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the checkpoints of a run, and the hash of its weights."""
    folder = tmp_path_factory.mktemp("trained")
    [wanted] = hashes(train(folder))
    return folder, wanted


WRONG = {
    "--hidden 6": "checkpoint 4 is of batch 8, graph False, hidden 8, in_features 4, out_features 4, seed 0",
    "--graph": "checkpoint 4 is of batch 8, graph False, hidden 8",
    "--steps 3": "checkpoint 4 is of a later step: type --steps 4",
    "--die 2": "elastic_training.py: --die 2: takes a step after the first checkpoint, up to --steps: type --die 3",
    "--die x": "elastic_training.py: --die x: takes a step after the first checkpoint, up to --steps: type --die 3",
    "--every 9 --die 3": "--die 3: takes a step after the first checkpoint, up to --steps: type --every 1 --die 2",
    "--die 5": "elastic_training.py: --die 5: takes a step after the first checkpoint, up to --steps: type --die 3",
}


@pytest.mark.parametrize("more", WRONG)
def test_folder_of_another_training_is_refused(trained, more):
    run = train(trained[0], *more.split(), before=("--max-restarts", 3))
    assert run.code == 2 and WRONG[more] in run.err and run.err.count("\n") == 1, run.err
    assert kept(trained[0]) == ["step-2", "step-4"]


@pytest.mark.parametrize("more", ["--hidden 6", "--steps 1", "--die x"])
def test_run_that_is_refused_puts_nothing_aside(trained, tmp_path, more):
    shutil.copytree(trained[0], tmp_path / "new")
    spoil(tmp_path / "new" / "step-4" / "pickled_data", "cut")
    before = everything(tmp_path / "new")
    run = train(tmp_path / "new", *more.split())
    assert run.code == 2 and run.err.count("\n") == 1 and "damaged" not in run.err, run.err
    assert everything(tmp_path / "new") == before


def test_folder_whose_name_is_in_another_encoding(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    job = train(folder, n=2)
    assert job.code == 0 and EQUAL in job.out and "step-4" in kept(folder), job.err


def test_two_jobs_do_not_train_in_one_folder(tmp_path):
    first = Run(LAUNCH, "-n", 1, ELASTIC, "--folder", tmp_path, "--steps", 100000, "--every", 100)
    while not list(tmp_path.glob("step-[1-9]*")):
        assert first.process.poll() is None
        time.sleep(0.05)
    second = train(tmp_path, "--steps", 100000, n=1)
    words = f"--folder {tmp_path}: another job trains in it: end that one, or name another folder"
    assert (second.code, second.err) == (2, f"elastic_training.py: {words}\n")
    killed(first)
    assert first.all_gone()
    step = max(
        int(name[5:]) for name in kept(tmp_path) if name[5:].isdecimal()
    )  # what was being saved is no number yet
    last = train(tmp_path, "--steps", step + 200, "--every", 100, n=1)
    assert last.code == 0, last.err


def test_job_that_was_done_long_ago_is_right_when_it_is_started_again(tmp_path):
    """The weights have the rounding of all steps, although none is left to do."""
    more = ("--steps", 500, "--every", 500, "--seed", 1)
    [wanted] = hashes(train(tmp_path, *more, n=1))
    again = train(tmp_path, *more, n=1)
    assert hashes(again) == {wanted} and "all 500 steps were done before" in again.out


def test_error_while_it_saves_ends_the_job_of_another_launcher_too(tmp_path):
    """There no other rank would notice that rank 0 has raised."""
    (tmp_path / "step-unfinished").write_text("a file in place of a folder")
    job = official(2, ELASTIC, "--folder", tmp_path).wait(60)
    words = f"checkpoint 2 could not be saved in {tmp_path}: Not a directory: make room, and start again"
    assert job.code != 0 and job.err.count(f"elastic_training.py: {words}\n") == 1 and job.all_gone(), job.err


def test_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    run = train(tmp_path / "file")
    assert (run.code, run.err) == (
        2,
        f"elastic_training.py: --folder {tmp_path}/file: File exists: name another folder\n",
    )
    run = Run(LAUNCH, ELASTIC, "--die", 3).wait()
    assert run.code == 2 and "--die 3: needs a folder to go on from: type --folder FOLDER" in run.err


def test_disk_that_is_full_loses_no_checkpoint(hosts, tmp_path):
    """The third checkpoint does not fit beside two others. The job ends; with more room it goes on."""
    size = ["--steps", 6]
    (tmp_path / "disk").mkdir()
    small = f"mount -t tmpfs -o size=100k none {tmp_path}/disk && {LAUNCH} {ELASTIC} --folder {tmp_path}/disk"
    script = f"{small} {' '.join(map(str, size))}; echo code $?; cp -r {tmp_path}/disk {tmp_path}/kept"
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    user = [*hosts.user, "--map-root-user"] if hosts.user else []
    run = Run("unshare", *user, "--mount", "bash", "-c", script).wait()
    assert "code 1\n" in run.out and "No space left on device" in run.err and run.all_gone(), run.err
    assert {"step-2", "step-4"} <= set(os.listdir(tmp_path / "kept"))
    [wanted] = hashes(Run(LAUNCH, ELASTIC, *size).wait())
    again = train(tmp_path / "kept", *size)
    assert hashes(again) == {wanted} and "steps 5 to 6;" in again.out
