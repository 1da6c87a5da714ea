"""A sample of the faults of docs/faults.md, how tries are drawn and continued, and that the page has what was found."""

import json
import re
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from benchmarks import fault_kinds, faults, faults_page
from benchmarks.elastic_jobs import STEPS
from benchmarks.faults_page import Outcome
from harness.jobs.hosts import NO_HOSTS, Hosts
from harness.jobs.run import Run
from harness.start.errors import UsageError

# One for each part of the page. tests/slow/ has others: test_nodes.py for hosts, test_launcher.py, test_starting.py.
SAMPLE = [  # (fault, number of hosts)
    ("a rank is killed (SIGKILL)", 2),
    ("launch.sh is killed (SIGKILL)", 2),
    ("the link goes down for 2 s", 2),
    ("the disk is full at a checkpoint", 1),
    ("a file of the checkpoint is missing", 1),
]
GOOD = Outcome("1/1", "a host dies", 2, True, seconds=0.25, says="launch.sh: node 1 is gone", equal=True)


@pytest.fixture(scope="module")
def tries():
    with Hosts(2) as hosts:
        if not hosts.real:
            pytest.skip(NO_HOSTS)
    with faults.Tries() as tries:
        yield tries


@pytest.mark.parametrize("name, hosts", SAMPLE)
def test_fault_ends_as_promised(tries, monkeypatch, name, hosts):
    """In a graph, on any machine: within no limit of time. `./launch.sh faults` tries all kinds in both modes."""
    monkeypatch.setattr(faults, "FAULTS", [replace(fault, within=300) for fault in faults.FAULTS])
    drawn = faults.Draw("test/1", name, hosts, True, restarts=False, moment=0.3, victim=0.6, amount=0.4)
    outcome = tries.make(drawn)
    assert faults.good(outcome), outcome


CONNECT = "import socket; socket.create_connection(('10.0.0.2', 4321), 1)"
LISTEN = "import socket, time; server = socket.create_server(('', 4321)); print('up', flush=True); time.sleep(1000)"


def test_hosts_tell_who_listens_and_lose_what_one_of_them_sends(tries):
    """Cut from host 0 to host 1, and then mended."""
    hosts = tries.hosts
    server = Run(*hosts.on(1), sys.executable, "-c", LISTEN).until("up")
    try:
        assert (hosts.listening(0), hosts.listening(1)) == ([], [4321])
        codes = [Run(*hosts.on(0), sys.executable, "-c", CONNECT).wait().code]
        hosts.cut(0, 1)
        codes.append(Run(*hosts.on(0), sys.executable, "-c", CONNECT).wait().code)
        hosts.mend()
        codes.append(Run(*hosts.on(0), sys.executable, "-c", CONNECT).wait().code)
        assert codes == [0, 1, 0]
    finally:
        hosts.mend()
        server.kill()
    assert hosts.listening(1) == []


def test_files_beside_the_last_checkpoint_are_found(tmp_path):
    job = SimpleNamespace(checkpoints=tmp_path / "a", work=tmp_path / "b", temporary=tmp_path / "c")
    trial = faults.Trial(None, None, None, tmp_path, None, None, 1, job=job)
    for path in (job.checkpoints / str(STEPS), job.work, job.temporary):
        path.mkdir(parents=True)
    assert trial.files_left() == []
    for path in (job.checkpoints / "unfinished", job.work / "core", job.temporary / "lock"):
        path.touch()
    assert trial.files_left() == ["file a/unfinished", "file b/core", "file c/lock"]


def test_same_seed_draws_the_same_and_another_number_draws_another_try():
    draws = [faults.draw(3, i) for i in range(1, 300)]
    assert draws == [faults.draw(3, i) for i in range(1, 300)]
    assert len({replace(one, seed="") for one in draws}) == len(draws)
    assert draws[7] != replace(faults.draw(4, 8), seed=draws[7].seed)


@pytest.mark.parametrize("seed", range(5))
def test_each_kind_comes_early(seed):
    drawn = {faults.draw(seed, i).fault for i in range(1, 101)}
    assert drawn == {fault.name for fault in fault_kinds.FAULTS}


def test_each_draw_is_one_that_its_kind_allows():
    kinds = {fault.name: fault for fault in fault_kinds.FAULTS}
    assert len(kinds) == len(fault_kinds.FAULTS)
    draws = [faults.draw(1, i) for i in range(1, 2000)]
    assert all(one.hosts in kinds[one.fault].hosts for one in draws)
    assert all(kinds[one.fault].restarts or not one.restarts for one in draws)
    both = {(one.fault, one.hosts, one.graph) for one in draws}
    assert both == {(name, n, graph) for name, kind in kinds.items() for n in kind.hosts for graph in (False, True)}


def outcome_of(i, **changed):
    drawn = faults.draw(1, i)
    return replace(GOOD, seed=drawn.seed, fault=drawn.fault, **changed)


def test_interrupted_tries_continue_where_they_stopped():
    known = {one.seed: one for one in (outcome_of(1), outcome_of(3, lost=True))}
    assert [one.seed for one in faults.open_tries(1, 4, known, retry=False)] == ["1/2", "1/4"]
    assert [one.seed for one in faults.open_tries(1, 4, known, retry=True)] == ["1/3"]
    assert len(faults.open_tries(2, 4, known, retry=False)) == 4


def test_outcomes_that_were_drawn_from_other_kinds_are_refused():
    with pytest.raises(
        UsageError, match="1/2 in faults.jsonl was drawn from other kinds of faults: type another --seed"
    ):
        faults.open_tries(1, 4, {"1/2": replace(outcome_of(2), fault="an earthquake")}, retry=False)


def test_outcome_is_kept_and_read_again(monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "FOUND", tmp_path / "faults.jsonl")
    monkeypatch.setattr(faults, "PAGE", tmp_path / "faults.md")
    for outcome in (outcome_of(1, lost=True), outcome_of(2), outcome_of(1)):  # the first is made again
        faults.keep(outcome)
    machine, outcomes, earlier = faults_page.read(tmp_path / "faults.jsonl")
    assert "cores" in machine and outcomes == [outcome_of(1), outcome_of(2)] and earlier == [outcome_of(1, lost=True)]
    undisturbed = faults_page.read_soak(faults_page.SOAK)
    assert (tmp_path / "faults.md").read_text() == faults_page.page(machine, outcomes, earlier, undisturbed)


@pytest.mark.parametrize(
    "changed", [{"problems": ["it took 20 s"]}, {"left": ["1 processes"]}, {"lost": True}, {"equal": False}]
)
def test_outcome_is_good_only_if_all_is_well(changed):
    assert faults.good(GOOD) and not faults.good(replace(GOOD, **changed))


def test_table_counts_tries_and_shows_the_seed_of_each_that_failed():
    slow = replace(GOOD, seed="1/2", seconds=3.75)
    failed, again = (replace(GOOD, seed=f"1/{i}", seconds=0.5, problems=["it said nothing"]) for i in (3, 4))
    page = faults_page.page("2 cores", [GOOD, slow, failed], [again])
    assert "| all processes of a host are killed | ends with 1 | 3 | 2 | 0.5, 3.8 |" in page
    assert "- all processes of a host are killed: `launch.sh: node 1 is gone`\n" in page and "`1/2`" not in page
    assert "Runs that did not behave as expected: 1.\n\n- `1/3`: all processes of a host are killed. " in page
    repeated = "Runs that failed at first, and were repeated after a fix: 1.\n\n"
    assert f"{repeated}- `1/4`: all processes of a host are killed. " in page
    assert "3 faults of 1 kinds" in page and page.count("## Hosts") == 1 and "## Network" not in page
    assert "Not run yet: a rank is killed (SIGKILL); " in page and "| a rank is killed" not in page


def test_page_counts_what_was_observed_where_a_job_can_end_in_two_ways():
    killed = replace(GOOD, fault="a rank is killed (SIGKILL)", restarts=True)
    page = faults_page.page(
        "2 cores", [killed, replace(killed, seed="1/2"), replace(killed, seed="1/3", restarts=False)]
    )
    assert "| a rank is killed (SIGKILL) | ends with 137 (1 of 3) or restarts (2 of 3) | 3 |" in page
    few = replace(GOOD, fault="few files can be open (ulimit -n 10 to 100)", continued=True)
    page = faults_page.page("2 cores", [few, replace(few, seed="1/2", continued=False)])
    assert "| ends with an error (1 of 2) or continues (1 of 2) | 2 |" in page
    assert "| ends with an error | 1 |" in faults_page.page("2 cores", [replace(few, continued=False)])
    assert "| continues | 1 |" in faults_page.page("2 cores", [few])


@pytest.mark.parametrize("changed", [{"left": ["1 processes"]}, {"lost": True}, {"equal": False}])
def test_page_says_that_nothing_was_left_or_lost_only_if_it_was_so(changed):
    well = "No run left anything behind. After each fault the job"
    assert well in faults_page.page("2 cores", [GOOD])
    page = faults_page.page("2 cores", [GOOD, replace(GOOD, seed="1/2", **changed)])
    assert well not in page and sorted(re.findall(r"(\d) (?:runs left|lost|ended)", page)) == ["0", "0", "1"]


@pytest.mark.parametrize("closes", [True, False])
def test_a_port_may_close_a_moment_after_the_processes(monkeypatch, closes):
    monkeypatch.setattr(faults, "PORTS_CLOSE", 0.5)
    answers = iter([[4321], [] if closes else [4321]])
    hosts = SimpleNamespace(listening=lambda host: next(answers, [] if closes else [4321]))
    trial = SimpleNamespace(draw=SimpleNamespace(hosts=1), hosts=hosts)
    assert faults.Trial.listening(trial) == ([] if closes else ["port 4321 is open"])


def test_names_that_the_page_changes_are_those_of_kinds():
    assert set(faults_page.SHOWN) <= {fault.name for fault in fault_kinds.FAULTS}


@pytest.mark.parametrize(
    "typed", ["--count 0", "--count x", "--seed x", "--only 7/y", "--only 7", "--only 7/0", "more"]
)
def test_bad_input_is_refused_in_one_line(capfd, typed):
    assert faults.main(typed.split()) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("launch.sh: ") and said.err.count("\n") == 1


def test_page_is_what_was_found():
    undisturbed = faults_page.read_soak(faults_page.SOAK)
    machine, outcomes, earlier = faults_page.read(faults_page.FOUND)
    assert faults_page.PAGE.read_text() == faults_page.page(machine, outcomes, earlier, undisturbed)
    assert outcomes and f"{len(outcomes)} faults" in faults_page.PAGE.read_text()
    lines = faults_page.FOUND.read_text().splitlines()
    assert all(asdict(Outcome(**json.loads(line))) == json.loads(line) for line in lines[1:])


def test_recorded_tries_are_those_that_their_seeds_draw():
    """Or a run could not be continued: a new kind of fault needs a new file."""
    for one in faults_page.read(faults_page.FOUND)[1]:
        drawn = faults.draw(*map(int, one.seed.split("/")))
        assert (one.fault, one.hosts, one.graph) == (drawn.fault, drawn.hosts, drawn.graph)
