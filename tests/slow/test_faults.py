"""Faults of docs/clusters.md in jobs of elastic_training.py: how the job ends, and its weights when it resumes.

The other faults of that page are in test_launcher.py, test_nodes.py, test_starting.py and test_state.py.
"""

import os
import re
import signal
import subprocess
from pathlib import Path
from textwrap import indent

import pytest

from tests.hosts import NO_HOSTS
from tests.jobs import ELASTIC, LAUNCH, PLAIN, SLEEPS, Run, changed, ended, saved, start, train, wait_until

STEPS = ("--steps", 6)  # checkpoints after steps 2, 4 and 6; two of them stay
BEGIN_OF_STEP = "        rng = np.random.default_rng([seed, step])"
WAITS = """import time
print("waits", flush=True)
while not pathlib.Path("{folder}/go").exists():  # the test makes it
    time.sleep(0.01)
"""


def with_fault(folder, fault, steps=(5,)):
    """A copy of the recipe whose last rank runs these lines once, at the beginning of each of these steps.

    First all ranks wait for rank 0, which may still be saving the step before.
    """
    mark = f"pathlib.Path('{folder}', f'fault {{step}}')"
    last = "flow.env.get_rank() == flow.env.get_world_size() - 1"
    lines = f"if step in {steps}:\n    flow.comm.barrier()\n"
    lines += f"if step in {steps} and {last} and not {mark}.exists():\n    {mark}.touch()\n"
    lines += indent(fault.format(folder=folder), "    ")
    return changed(ELASTIC, folder, (BEGIN_OF_STEP, f"{indent(lines, ' ' * 8)}\n{BEGIN_OF_STEP}"))


def on_two_hosts(hosts, folder, fault):
    return start(hosts, "-n", 1, with_fault(folder, fault), "--checkpoint-dir", folder / "checkpoints", *STEPS)


def assert_resumes(folder, step, weights):
    """The job, started again, resumes after this step."""
    run = train(folder, *STEPS)
    assert f"[0] resumes after step {step}, from its checkpoint\n" in run.out
    assert saved(folder) == weights


RAISES_AND_CRASHES = "if step == 3: raise ValueError('boom')\nos.kill(os.getpid(), signal.SIGSEGV)"


def test_rank_that_fails_twice_is_restarted_twice_and_the_weights_are_the_same(weights, tmp_path):
    script = with_fault(tmp_path, RAISES_AND_CRASHES, steps=(3, 5))
    command = ["-n", 2, "--max-restarts", 2, script, "--checkpoint-dir", tmp_path / "checkpoints", *STEPS]
    [run] = ended([Run(LAUNCH, *command)])
    assert run.code == 0, run.err
    assert re.findall(r"^launch\.sh: (.*)", run.err, flags=re.MULTILINE) == [
        "rank 1 of 2 failed: exit code 1; every rank is ended",
        "restart 1 of 2",
        "rank 1 of 2 failed: killed by signal 11, SIGSEGV; every rank is ended",
        "restart 2 of 2",
    ]
    begins = re.findall(r"^\[0] (resumes after step \d|starts with step 1)", run.out, flags=re.MULTILINE)
    assert begins == ["starts with step 1", "resumes after step 2", "resumes after step 4"]
    assert saved(tmp_path / "checkpoints") == weights


def early_jobs(tmp_path_factory):
    """A job that waits for its time limit; without OneFlow, its ranks stop long before that."""
    script = tmp_path_factory.mktemp("silent") / "mine.py"
    stops = "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    script.write_text(f"{PLAIN}{stops}\nif rank == 2: sys.exit(0)\n{SLEEPS}\n")
    return {"silent": Run(LAUNCH, "-n", 3, "--timeout", 15, script)}


def test_time_limit_names_a_rank_that_is_stopped_and_one_that_has_ended(early):
    [run] = ended([early["silent"]])
    assert run.code == 124
    states = ("is running", "is stopped (SIGSTOP, or a debugger)", "has ended")
    assert all(f"launch.sh: rank {rank} of 3 {state}\n" in run.err for rank, state in enumerate(states)), run.err


def send(pids, number):
    for pid in pids:
        os.kill(pid, number)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_job_that_is_stopped_for_a_while_continues(weights, tmp_path):
    folder = tmp_path / "checkpoints"
    run = Run(LAUNCH, "-n", 2, with_fault(tmp_path, WAITS), "--checkpoint-dir", folder, *STEPS).until("waits")
    processes = run.alive()
    send(processes, signal.SIGSTOP)
    wait_until(lambda: all(map(is_stopped, processes)), "all processes to stop")
    send(processes, signal.SIGCONT)
    (tmp_path / "go").touch()
    assert (ended([run])[0].code, len(processes), saved(folder)) == (0, 3, weights)


def test_ranks_end_when_the_launcher_of_another_host_is_killed(hosts, weights, tmp_path):
    """Its ranks end with it, and OneFlow aborts the others."""
    runs = on_two_hosts(hosts, tmp_path, WAITS)
    runs[1].until("waits").signal(signal.SIGKILL)
    first, second = ended(runs)
    assert (first.code, second.code) == (134, -signal.SIGKILL), first.err
    assert "SIGABRT, perhaps because a rank on another host ended; every rank here is ended\n" in first.err
    assert_resumes(tmp_path / "checkpoints", 4, weights)


def resends(hosts, host):
    """Whether a connection of this host sends packets again that were not received."""
    command = [*hosts.on(host), "cat", "/proc/net/tcp"]
    table = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return any(int(line.split()[6], 16) for line in table.splitlines()[1:])


def test_link_that_is_down_for_a_moment_does_no_harm(hosts, weights, tmp_path):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    runs = on_two_hosts(hosts, tmp_path, WAITS)
    runs[1].until("waits")
    hosts.link(1, "down")
    (tmp_path / "go").touch()
    try:
        wait_until(lambda: resends(hosts, 0) or resends(hosts, 1), "a packet that is sent again")
    finally:
        hosts.link(1, "up")
    assert [run.code for run in ended(runs)] == [0, 0], runs[0].err
    assert saved(tmp_path / "checkpoints") == weights


# The disk has room for one checkpoint.
ON_A_DISK = """
mount -t tmpfs -o size=56k none $0/disk
"$@"
code=$?
cp -r $0/disk $0/checkpoints
exit $code
"""


def test_disk_without_room_ends_the_job_and_the_last_checkpoint_stays(hosts, weights, tmp_path):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    (tmp_path / "disk").mkdir()
    command = [LAUNCH, "-n", 2, ELASTIC, "--checkpoint-dir", tmp_path / "disk", *STEPS]
    [run] = ended([Run(*hosts.on(0), "bash", "-c", ON_A_DISK, tmp_path, *command)])
    assert run.code == 1 and "[0] OSError: [Errno 28] No space left on device" in run.err, run.err
    assert run.err.endswith("launch.sh: rank 0 of 2 failed: exit code 1; every rank is ended\n")
    assert_resumes(tmp_path / "checkpoints", 2, weights)
