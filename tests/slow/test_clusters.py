"""docs/clusters.md says what is true: its commands and files run under Slurm, Open MPI and ssh, or are validated."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess

import pytest

from harness.jobs.run import Run, wait_until
from tests.cases import ROOT
from tests.clusters import POD, Cluster, install
from tests.jobs import EQUAL, MET, SLEEPS, ended, launch
from tests.linters import linter
from tests.markdown import CLUSTERS as PAGE
from tests.markdown import blocks

# Files that the page gives in full: name -> text.
FILES = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
COMMANDS = [line for text in blocks(PAGE, "bash") if text not in FILES.values() for line in text.splitlines()]
BATCH = "sbatch --wait train.sbatch"
KUBERNETES = ("1.27", "1.37")  # the oldest and the newest that kubernetes-validate knows
OWN = {  # of the tests, beside the files of the page
    "sleeps.py": MET + SLEEPS + "\n",
    "fails.py": f"{MET}if rank == 3: 1 / 0\n{SLEEPS}\n",
    # The number of steps: without end before the job is requeued, 50 more than the last checkpoint then.
    "steps.sh": "last=$(ls requeued 2>/dev/null | grep -x '[0-9]*' | sort -n | tail -n 1)\n"
    '[ "$SLURM_RESTART_COUNT" ] && echo $((last + 50)) || echo 1000000000\n',
}
OWN["requeued.sbatch"] = FILES["train.sbatch"].replace(
    "--checkpoint-dir checkpoints", '--checkpoint-dir requeued --save-every 50 --steps "$(bash steps.sh)"'
)
HOW = "type COOKBOOK_CLUSTERS=1 ./launch.sh test tests/slow/test_clusters.py as root on Debian or Ubuntu"
WANTED = os.environ.get("CI") or os.environ.get("COOKBOOK_CLUSTERS")
installs = pytest.mark.skipif(not WANTED, reason=f"needs Slurm, Open MPI and sshd: {HOW}")


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
    for name, text in {**FILES, **OWN}.items():
        (folder / name).write_text(cluster.named(text))
    return folder


@pytest.fixture(scope="module")
def waiting(cluster, checkout):
    """Jobs which wait most of the time, so that others run beside them: name -> Run."""
    again = (
        "job=$(sbatch --parsable --output=requeued.out requeued.sbatch)\n"
        "until ls -d requeued/[0-9]*; do sleep 0.2; done >/dev/null 2>&1\n"
        "scontrol requeue $job; while squeue --noheader --jobs $job 2>&1 | grep -q $job; do sleep 0.5; done\n"
    )
    runs = {BATCH: cluster.run(BATCH, cwd=checkout), "requeue": cluster.run(again, cwd=checkout)}
    yield runs
    for run in runs.values():
        run.kill()


@pytest.fixture(scope="module")
def manifest():
    """The objects of train.yaml by kind."""
    read = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
    said = subprocess.check_output([linter("python"), "-c", read], input=FILES["train.yaml"], text=True)
    found = json.loads(said)
    assert len(found) == 3
    return {one["kind"]: one for one in found}


@functools.lru_cache(maxsize=None)
def on_this_host(script):
    """The lines of a recipe that runs without any scheduler."""
    job = launch(*script.split())
    assert (job.code, job.err) == (0, "") and job.out.count(EQUAL) == 1
    return sorted(job.out.splitlines())


def right(out, script):
    """Whether a job showed each rank's shards and the result, once: what it shows without a scheduler."""
    return out.count(EQUAL) == 1 and sorted(out.splitlines()) == on_this_host(script)


def trained(out):
    """The first and last step that elastic_training.py names; the result must be right, once."""
    assert len(re.findall(r"^\[0] all losses equal those of a single device", out, flags=re.MULTILINE)) == 1, out
    [steps] = re.findall(r"^\[0] loss \S+ in step (\d+) -> \S+ in step (\d+)$", out, flags=re.MULTILINE)
    return tuple(map(int, steps))


# What a starter itself may write on standard error in a job that is well. srun: that it waits until Slurm has started
# the jobs before. Open MPI 4: mpirun sets the process group of the ssh that it starts, and so does that process; where
# mpirun comes second, the kernel refuses, and mpirun warns (plm_rsh_module.c).
HARMLESS = (
    r"srun: job \d+ (queued and waiting for|has been allocated) resources\n",
    r"\[\S+:\d+] plm:rsh: Warning: setpgid\(\d+,\d+\) failed in parent with errno=Permission denied\(13\)\n",
)


def troubles(job):
    """What a job wrote on standard error beyond that."""
    return re.sub("|".join(HARMLESS), "", job.err)


def script_in(command):
    return re.search(r"recipes/.*", command).group()


def test_each_command_of_the_page_is_run():
    starts = ("srun ", "mpirun ", "bash over_ssh.sh ", "HOSTS=")
    assert len(COMMANDS) == 11 and {line for line in COMMANDS if not line.startswith(starts)} == {BATCH}
    assert sorted(FILES) == [".dockerignore", "Dockerfile", "over_ssh.sh", "train.sbatch", "train.yaml"]


@installs
@pytest.mark.parametrize("command", [line for line in COMMANDS if line != BATCH])
def test_command_runs(cluster, checkout, waiting, command):
    [job] = ended([cluster.run(command, cwd=checkout)])
    assert (job.code, troubles(job)) == (0, "") and right(job.out, script_in(command)), job.out + cluster.log()


@installs
def test_batch_file(waiting, checkout, cluster):
    [job] = ended([waiting[BATCH]])
    [output] = checkout.glob("train-*.out")
    assert (job.code, job.err) == (0, ""), output.read_text() + cluster.log()
    number = re.fullmatch(r"Submitted batch job (\d+)\n", job.out).group(1)
    assert output.name == f"train-{number}.out" and trained(output.read_text()) == (1, 4)
    assert (checkout / "checkpoints" / "4").is_dir()


@installs
@pytest.mark.parametrize(
    "start",
    [
        "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ./launch.sh -n 2",
        "mpirun --host host0:2,host1:2 ./launch.sh",
        "bash over_ssh.sh -n 2",
    ],
)
def test_rank_that_fails_ends_all(cluster, checkout, waiting, start):
    [job] = ended([cluster.run(f"{start} fails.py", cwd=checkout)])
    said = job.out + job.err
    assert job.code == 1, said
    assert said.count("Traceback") == said.count("[3] ZeroDivisionError: division by zero") == 1, said
    assert "rank 3 of 4 on node " in said


@installs
def test_launcher_that_is_killed_ends_all(cluster, checkout, waiting):
    command = "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ./launch.sh -n 2 sleeps.py"
    job = cluster.run(command, cwd=checkout).until("ready")
    first, second = job.alive(f"{ROOT}/harness\0".encode())  # the launchers
    os.kill(second, signal.SIGKILL)
    assert ended([job]) and job.code != 0, job.err


@installs
def test_scancel_ends_all(cluster, checkout, waiting):
    job = cluster.run("srun --job-name=sleeps --nodes=2 --ntasks-per-node=2 ./launch.sh sleeps.py", cwd=checkout)
    job.until("ready")
    assert cluster.run("scancel --name=sleeps").wait().code == 0
    assert ended([job]) and job.code == 128 + signal.SIGTERM
    assert "launch.sh: SIGTERM on node" in job.err and "Traceback" not in job.err, job.err


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
    job = cluster.run("bash over_ssh.sh -n 2 sleeps.py", cwd=checkout).until("ready", times=4)
    assert len(job.ranks()) == 4
    os.killpg(job.process.pid, signal.SIGINT)
    assert ended([job]) and job.code != 0


@installs
def test_commands_of_the_pods_run_on_two_hosts(cluster, checkout, manifest):
    [container] = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    own = {one["name"]: one["value"] for one in container["env"]}
    runs = []
    for index in (1, 0):
        [line] = container["args"]
        command = [*container["command"], cluster.named(line.replace("/checkpoints", f"{checkout}/pods"))]
        given = {**cluster.variables, **own, "JOB_COMPLETION_INDEX": str(index)}
        on = cluster.hosts.on(index)
        runs.append(Run(*on, *(["env", "-C", checkout] if on else []), *command, cwd=checkout, **given))
    second, first = ended(runs)
    assert (first.code, second.code, first.err + second.err) == (0, 0, "")
    shown = [line for run in (first, second) for line in run.out.splitlines() if line.startswith("[")]
    assert trained("\n".join(shown)) == (1, 4) and (checkout / "pods" / "4").is_dir()


@installs
def test_job_that_is_requeued_goes_on_from_its_last_checkpoint(waiting, checkout):
    [job] = ended([waiting["requeue"]])
    said = (checkout / "requeued.out").read_text()
    assert (job.code, job.out) == (0, ""), job.err
    first, last = trained(said)
    assert "DUE TO JOB REQUEUE" in said and first > 50 and last == first + 49, said


@installs
def test_names_in_the_manifest_agree(manifest):
    service, claim, job = (manifest[kind] for kind in ("Service", "PersistentVolumeClaim", "Job"))
    pod, spec = job["spec"]["template"], job["spec"]["template"]["spec"]
    [container], [volume], [mount] = spec["containers"], spec["volumes"], spec["containers"][0]["volumeMounts"]
    assert service["spec"]["clusterIP"] == "None"  # headless: a name for each pod
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert spec["subdomain"] == service["metadata"]["name"]
    assert f"{job['metadata']['name']}-0.{spec['subdomain']}" == POD
    assert container["args"][0].count(POD) == 2 and f"--master_addr {POD} " in container["args"][0]
    assert job["spec"]["completionMode"] == "Indexed"
    nodes = int(re.search(r"--nnodes (\d+)", container["args"][0]).group(1))
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == nodes
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mount["name"] == volume["name"] and f"--checkpoint-dir {mount['mountPath']} " in container["args"][0]
    assert f"USER {spec['securityContext']['runAsUser']}\n" in FILES["Dockerfile"]


@installs
@pytest.mark.parametrize("version", KUBERNETES)
def test_manifest_is_valid(tmp_path, version):
    good, bad = tmp_path / "train.yaml", tmp_path / "bad.yaml"
    good.write_text(FILES["train.yaml"])
    bad.write_text(FILES["train.yaml"].replace("completionMode", "completonMode"))
    check = [linter("kubernetes-validate"), "--kubernetes-version", version, "--strict"]
    run = Run(*check, good).wait()
    assert run.code == 0 and (run.out + run.err).count(f"against version {version}") == 3, run.out + run.err
    assert Run(*check, bad).wait().code == 1


@installs
def test_files_pass_their_linters(tmp_path, manifest):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    [container] = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "pod").write_text(container["args"][0])
    for command in ("hadolint Dockerfile", "shellcheck over_ssh.sh train.sbatch", "shellcheck --shell=bash pod"):
        program, *rest = command.split()
        run = Run(linter(program), *rest, cwd=tmp_path).wait()
        assert (run.code, run.out, run.err) == (0, "", ""), command


def test_set_up_in_the_dockerfile(tmp_path):
    """The RUN line that makes .venv, in a folder with no more than the Dockerfile has copied until then."""
    lines = FILES["Dockerfile"].splitlines()
    [number] = [k for k, line in enumerate(lines) if line.startswith("RUN ") and "ensure_environment" in line]
    [shell] = [json.loads(line[len("SHELL ") :]) for line in lines if line.startswith("SHELL ")]
    for line in lines[:number]:
        if line.startswith("COPY "):
            *sources, target = [word for word in line.split()[1:] if not word.startswith("--")]
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                shutil.copy(str(ROOT / source), str(tmp_path / target))
    run = Run(*shell, lines[number][len("RUN ") :], cwd=tmp_path, PYTHON="/nowhere/python").wait()
    assert run.code == 2 and run.err.startswith("launch.sh: PYTHON=/nowhere/python: no such program"), run.err


def test_no_environment_of_the_host_goes_into_the_image():
    ignored = FILES[".dockerignore"].split()
    environments = [line for line in (ROOT / ".gitignore").read_text().split() if line.startswith(".venv")]
    assert ".venv*" in ignored and len(environments) > 1 and all(name.startswith(".venv") for name in environments)
