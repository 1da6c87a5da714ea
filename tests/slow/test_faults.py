"""Faults of docs/faults.md in jobs of elastic_training.py: how the job ends, and its weights when it resumes.

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
from tests.jobs import ELASTIC, LAUNCH, PLAIN, SLEEPS, Run, changed, ended, saved, start, steps_in, train, wait_until

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


def on_two_hosts(hosts, folder, fault, *options, steps=(5,)):
    script = with_fault(folder, fault, steps)
    return start(hosts, "-n", 1, *options, script, "--checkpoint-dir", folder / "checkpoints", *STEPS)


def assert_resumes(folder, step, weights):
    """The job, started again, resumes after this step."""
    run = train(folder, *STEPS)
    assert f"[0] resumes after step {step}, from its checkpoint\n" in run.out
    assert saved(folder) == weights


RAISES_AND_CRASHES = "if step == 3: raise ValueError('boom')\nos.kill(os.getpid(), signal.SIGSEGV)"


def test_rank_that_fails_twice_is_restarted_twice_and_the_weights_are_the_same(hosts, weights, tmp_path):
    runs = ended(on_two_hosts(hosts, tmp_path, RAISES_AND_CRASHES, "--max-restarts", 2, steps=(3, 5)))
    for run in runs:
        assert run.code == 0, run.err
        failed, restart, failed_again, restart_again = re.findall(r"^launch\.sh: (.*)", run.err, flags=re.MULTILINE)
        rank = r"rank 1 of 2 on node 1 \(.*\) failed:"
        assert re.fullmatch(rf"{rank} exit code 1; every rank is ended", failed)
        assert re.fullmatch(rf"{rank} killed by signal 11, SIGSEGV; every rank is ended", failed_again)
        assert (restart, restart_again) == ("restart 1 of 2", "restart 2 of 2")
    begins = re.findall(r"^\[0] (resumes after step \d|starts with step 1)", runs[0].out, flags=re.MULTILINE)
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


def kill_launcher(hosts, runs):
    """Its ranks end with it."""
    runs[1].signal(signal.SIGKILL)


def freeze_host(hosts, runs):
    """Until the other host has given it up."""
    processes = runs[1].alive()
    send(processes, signal.SIGSTOP)
    runs[0].wait()
    send(processes, signal.SIGCONT)


LOSSES = {kill_launcher: (1, -signal.SIGKILL), freeze_host: (1, 1)}  # -> exit codes by node


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_job_ends_when_its_hosts_lose_each_other(hosts, weights, tmp_path, loss):
    runs = on_two_hosts(hosts, tmp_path, WAITS)
    runs[1].until("waits")
    loss(hosts, runs)
    ended(runs)
    for node, (run, code) in enumerate(zip(runs, LOSSES[loss])):
        assert run.code == code, run.err
        assert code != 1 or re.search(rf"launch\.sh: node {1 - node} \(.*\) is gone\n", run.err), run.err
    if loss == kill_launcher:
        assert_resumes(tmp_path / "checkpoints", 4, weights)
    else:
        assert steps_in(tmp_path / "checkpoints") == [2, 4]


def resends(hosts):
    """Whether a connection of host 0 sends packets again that were not received."""
    table = subprocess.run([*hosts.on(0), "cat", "/proc/net/tcp"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return any(int(line.split()[6], 16) for line in table.splitlines()[1:])


def test_link_that_is_back_within_10_seconds_does_no_harm(hosts, weights, tmp_path):
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    runs = on_two_hosts(hosts, tmp_path, WAITS)
    runs[1].until("waits")
    hosts.link(1, "down")
    try:
        wait_until(lambda: resends(hosts), "a packet that is sent again")
    finally:
        hosts.link(1, "up")
    (tmp_path / "go").touch()
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
