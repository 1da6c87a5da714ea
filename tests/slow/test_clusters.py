"""The commands and files of docs/clusters.md run under Slurm, Open MPI and ssh."""

import os
import re
import signal

import pytest

from tests.cases import ROOT
from tests.clusters import Cluster, install
from tests.hosts import NO_HOSTS
from tests.jobs import MET, PLAIN, SLEEPS, ended, has_printed, wait_until
from tests.markdown import CLUSTERS as PAGE
from tests.markdown import blocks, commands_of

FOLDER = PAGE.with_suffix("")  # of the files that the page links
COMMANDS = [line for text in blocks(PAGE, "bash") for line in commands_of(text)]
OVER_SSH, BATCH = "bash docs/clusters/over_ssh.sh", "sbatch --wait docs/clusters/train.sbatch"
SAVES = """
def save(number, frame):
    if rank == 0:
        print("saves", flush=True)
        time.sleep(10)
        open("saved", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
"""
OWN = {  # of the tests, beside the files of the page
    "sleeps.py": f"{PLAIN}{SLEEPS}\n",
    "meets.py": f"{MET}{SLEEPS}\n",
    "fails.py": f"{MET}if rank == 3: 1 / 0\n{SLEEPS}\n",
    "saves.py": MET + SAVES + SLEEPS + "\n",
    # The number of steps: endless before the job is requeued, then 50 more than the last checkpoint has.
    "steps.sh": "last=$(ls requeued 2>/dev/null | grep -x '[0-9]*' | sort -n | tail -n 1)\n"
    '[ "$SLURM_RESTART_COUNT" ] && echo $((last + 50)) || echo 1000000000\n',
}
OWN["requeued.sbatch"] = (
    (FOLDER / "train.sbatch")
    .read_text()
    .replace("--checkpoint-dir checkpoints", '--checkpoint-dir requeued --save-every 50 --steps "$(bash steps.sh)"')
)
OWN["dies.sbatch"] = (
    (FOLDER / "train.sbatch").read_text().replace("--checkpoint-dir checkpoints", "--checkpoint-dir died --die 3")
)
installs = pytest.mark.installs("Slurm, Open MPI and sshd, as root on Debian or Ubuntu")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    install()
    with Cluster(tmp_path_factory.mktemp("cluster")) as both:
        yield both
    wait_until(lambda: not both.left(), "the end of the daemons and of what they have started")


@pytest.fixture(scope="module")
def checkout(cluster, tmp_path_factory):
    """A folder like a checkout in which the page's files lie."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("launch.sh", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs" / "clusters").mkdir(parents=True)
    of_page = {f"docs/clusters/{path.name}": path.read_text() for path in FOLDER.iterdir()}
    for name, text in {**of_page, **OWN}.items():
        (folder / name).write_text(cluster.named(text))
    return folder


@pytest.fixture(scope="module")
def waiting(cluster, checkout):
    """Jobs that wait most of the time, while others run: name -> Run."""
    again = (
        "job=$(sbatch --parsable --output=requeued.out requeued.sbatch)\n"
        "until ls -d requeued/[0-9]*; do sleep 0.2; done >/dev/null 2>&1\n"
        "scontrol requeue $job; while squeue --noheader --jobs $job 2>&1 | grep -q $job; do sleep 0.5; done\n"
    )
    commands = {BATCH: BATCH, "requeue": again, "dies": "sbatch --wait --output=died.out dies.sbatch"}
    runs = {name: cluster.run(command, cwd=checkout) for name, command in commands.items()}
    yield runs
    for run in runs.values():
        run.kill()


def trained(out):
    """The first and last step that elastic_training.py prints; its result must be right, and be printed once."""
    assert len(re.findall(r"^\[0] all losses equal those of a single device", out, flags=re.MULTILINE)) == 1, out
    [steps] = re.findall(r"^\[0] loss \S+ in step (\d+) -> \S+ in step (\d+)$", out, flags=re.MULTILINE)
    return tuple(map(int, steps))


# What may be on standard error in a job without a fault: srun says that it waits, and mpirun of Open MPI 4 warns if the
# ssh that it starts has set its own process group first (plm_rsh_module.c).
HARMLESS = (
    r"srun: job \d+ (queued and waiting for|has been allocated) resources\n",
    r"\[\S+:\d+] plm:rsh: Warning: setpgid\(\d+,\d+\) failed in parent with errno=Permission denied\(13\)\n",
)


def errors(job):
    """What else a job wrote on standard error."""
    return re.sub("|".join(HARMLESS), "", job.err)


def test_each_command_of_the_page_is_run():
    starts = ("srun ", "mpirun ", f"{OVER_SSH} ", "HOSTS=")
    assert len(COMMANDS) == 10 and {line for line in COMMANDS if not line.startswith(starts)} == {BATCH}
    assert all(f"(clusters/{path.name})" in PAGE.read_text() for path in FOLDER.iterdir())


@installs
@pytest.mark.parametrize("command", [line for line in COMMANDS if line != BATCH])
def test_command_runs(cluster, checkout, waiting, command):
    [job] = ended([cluster.run(command, cwd=checkout)])
    recipe = re.search(r"recipes/(\w+)\.py", command).group(1)
    assert (job.code, errors(job)) == (0, "") and has_printed(recipe, job.out.splitlines()), job.out + cluster.log()


@installs
def test_batch_file(waiting, checkout, cluster):
    [job] = ended([waiting[BATCH]])
    [output] = checkout.glob("train-*.out")
    assert (job.code, job.err) == (0, ""), output.read_text() + cluster.log()
    number = re.fullmatch(r"Submitted batch job (\d+)\n", job.out).group(1)
    assert output.name == f"train-{number}.out" and trained(output.read_text()) == (1, 4)
    assert (checkout / "checkpoints" / "4").is_dir()


@installs
def test_batch_file_starts_the_ranks_again_after_one_has_failed(waiting, checkout, cluster):
    [job] = ended([waiting["dies"]])
    printed = (checkout / "died.out").read_text()
    assert job.code == 0, printed + cluster.log()
    assert "rank 3 of 4 on " in printed and "failed: killed by signal 9, SIGKILL" in printed
    assert trained(printed) == (3, 4) and "[0] resumes after step 2, from its checkpoint\n" in printed


START = {  # engine -> its exit code after rank 3 has failed with 1
    "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ./launch.sh -n 2": 143,  # of the one that it ended
    "mpirun --host host0:2,host1:2 ./launch.sh": 1,
    f"{OVER_SSH} -n 2": 1,
}


@installs
@pytest.mark.parametrize("start", START)
def test_rank_that_fails_ends_all(cluster, checkout, waiting, start):
    [job] = ended([cluster.run(f"{start} fails.py", cwd=checkout)])
    printed = job.out + job.err
    assert job.code == START[start], printed
    assert printed.count("Traceback") == printed.count("[3] ZeroDivisionError: division by zero") == 1, printed
    assert "rank 3 of 4 on " in printed


@installs
def test_launcher_that_is_killed_ends_all(cluster, checkout, waiting):
    command = "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ./launch.sh -n 2 sleeps.py"
    job = cluster.run(command, cwd=checkout).until("ready")
    first, second = job.alive(f"{ROOT}/harness\0".encode())  # the launchers
    os.kill(second, signal.SIGKILL)
    assert ended([job]) and job.code != 0, job.err


@installs
def test_scancel_ends_all(cluster, checkout, waiting):
    job = cluster.run("srun --job-name=sleeps --nodes=2 --ntasks-per-node=2 ./launch.sh meets.py", cwd=checkout)
    job.until("ready")
    assert cluster.run("scancel --name=sleeps").wait().code == 0
    assert ended([job]) and job.code == 128 + signal.SIGTERM
    assert "launch.sh: SIGTERM on " in job.err and "Traceback" not in job.err, job.err


@installs
def test_rank_0_that_saves_for_10_s_at_sigterm_is_not_killed(cluster, checkout, waiting):
    """The launcher without rank 0 ends with 0, so srun does not kill the other."""
    start = "srun --job-name=saves --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ./launch.sh -n 2 saves.py"
    job = cluster.run(start, cwd=checkout).until("ready", times=4)
    assert cluster.run("scancel --signal=TERM --name=saves").wait().code == 0
    assert ended([job]) and (job.code, (checkout / "saved").exists()) == (0, True), job.err


@installs
@pytest.mark.parametrize(
    "start", ["srun --job-name=shows --nodes=2 --ntasks-per-node=2", "mpirun --host host0:2,host1:2"]
)
def test_signal_shows_where_each_rank_is_and_the_job_continues(cluster, checkout, start):
    """As docs/errors-hangs.md says."""
    job = cluster.run(f"{start} ./launch.sh sleeps.py", cwd=checkout).until("ready", times=4)
    if start.startswith("srun"):
        assert cluster.run("scancel --signal=USR1 --name=shows").wait().code == 0
    else:
        [mpirun] = job.alive(b"mpirun\0--host\0")
        os.kill(mpirun, signal.SIGUSR1)
    for rank in range(4):
        job.until(f'[{rank}]   File "{checkout}/sleeps.py", line', stream="stderr")
    assert job.process.poll() is None
    os.killpg(job.process.pid, signal.SIGTERM)
    assert ended([job]) and job.code != 0


@installs
def test_interrupt_ends_all_over_ssh(cluster, checkout, waiting):
    job = cluster.run(f"{OVER_SSH} -n 2 sleeps.py", cwd=checkout).until("ready", times=4)
    assert len(job.ranks()) == 4
    os.killpg(job.process.pid, signal.SIGINT)
    assert ended([job]) and job.code != 0


@installs
def test_job_that_is_requeued_resumes_from_its_last_checkpoint(waiting, checkout):
    [job] = ended([waiting["requeue"]])
    printed = (checkout / "requeued.out").read_text()
    assert (job.code, job.out) == (0, ""), job.err
    first, last = trained(printed)
    assert "DUE TO JOB REQUEUE" in printed and first > 50 and last == first + 49, printed


@installs
def test_host_that_does_not_answer_ends_the_others_over_ssh(cluster, checkout):
    """When it is back, its own ranks end too."""
    if not cluster.real:
        pytest.skip(NO_HOSTS)
    job = cluster.run(f"{OVER_SSH} -n 2 meets.py", cwd=checkout).until("ready", times=4)
    cluster.hosts.link(1, "down")
    try:
        assert job.wait().code == 255, job.out
    finally:
        cluster.hosts.link(1, "up")
    ended([job])
