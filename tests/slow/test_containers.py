"""docs/containers.md says what is true: its image is built, and its commands run in containers.

With COOKBOOK_CONTAINERS=full the image makes a .venv of its own, as a user's does; else its containers see the one of
this checkout, and the Dockerfile's line that makes it has nothing to do.
"""

import json
import os
import pickletools
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness.jobs.run import Run, wait_until
from tests.cases import ONE_LAYER, ROOT
from tests.containers import Docker, install
from tests.jobs import EQUAL, MET, PLAIN, SLEEPS, ended
from tests.linters import linter
from tests.markdown import blocks

PAGE = ROOT / "docs" / "containers.md"
FILES = dict(re.findall(r"`([\w.]+)`[^`\n]*:\n\n```\w+\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
SCRIPTS = blocks(PAGE, "bash")
RUNS = [line for script in SCRIPTS for line in script.splitlines() if line.startswith("docker run --rm ")]
BUILD, MINE = "docker build --tag cookbook:1 .\n", "cookbook:1 -n 2 mine.py"
SLOW = 900  # seconds for four ranks that share two cores, which may be busy
KUBERNETES = ("1.27", "1.37")  # the oldest and the newest that kubernetes-validate knows
OWN = {  # scripts of the tests
    "mine.py": f"{PLAIN}print(os.getuid(), sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n",
    "sleeps.py": f"{MET}{SLEEPS}\n",
    "fails.py": f"{PLAIN}if rank == 1: 1 / 0\n{SLEEPS}\n",
    "hungry.py": f"{PLAIN}if rank == 1: print(len(b'x' * 10**9))\n{SLEEPS}\n",
}
WANTED = os.environ.get("COOKBOOK_CONTAINERS", os.environ.get("CI", ""))
WHOLE = WANTED == "full"
HOW = "type COOKBOOK_CONTAINERS=1 ./launch.sh test tests/slow/test_containers.py as root on Debian 12"
installs = pytest.mark.skipif(not WANTED, reason=f"needs Podman: {HOW}")
full = pytest.mark.skipif(not WHOLE, reason="takes long: as above, with COOKBOOK_CONTAINERS=full")


def script_with(words):
    """The one script of the page with these words."""
    [script] = [script for script in SCRIPTS if words in script]
    return script


HYBRID, ELASTIC = script_with("29500 recipes/hybrid_parallel.py"), script_with("elastic_training.py")
AT_THE_END, TIDY = SCRIPTS[SCRIPTS.index(ELASTIC) + 1], script_with("docker volume rm")


@pytest.fixture(scope="module")
def docker(tmp_path_factory):
    install()
    with Docker(tmp_path_factory.mktemp("docker"), WHOLE) as docker:
        docker.make_base()
        yield docker


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone in which the page's files are."""
    folder = tmp_path_factory.mktemp("clone") / "cookbook"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "shared"))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def image(docker, clone):
    """The page's image, built as the page says; returns the seconds."""
    begin = time.monotonic()
    run = docker.start(BUILD, clone).wait(3600)
    assert run.code == 0, run.out + run.err
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a user has scripts of her own."""
    folder = tmp_path_factory.mktemp("scripts")
    folder.chmod(0o755)  # for the user of the image
    for name, text in OWN.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def manifest():
    """The objects of train.yaml by kind."""
    read = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
    said = subprocess.check_output([linter("python"), "-c", read], input=FILES["train.yaml"], text=True)
    objects = json.loads(said)
    assert len(objects) == 3
    return {one["kind"]: one for one in objects}


def own_script(options, arguments):
    """A command of the page that runs a script of a user's, with these options of docker and arguments of launch.sh."""
    [command] = [line for line in RUNS if line.endswith(MINE)]
    return command.replace("--rm", f"--rm {options}").replace(MINE, f"cookbook:1 {arguments}")


def layers(docker, tag):
    return json.loads(docker.asked(f"docker image inspect --format '{{{{json .RootFS.Layers}}}}' {tag}"))


def test_what_the_page_has():
    assert sorted(FILES) == [".dockerignore", "Dockerfile", "train.yaml"]
    others = [script for script in SCRIPTS if not all(line in RUNS for line in script.splitlines())]
    assert others == [BUILD, HYBRID, ELASTIC, AT_THE_END, TIDY]
    assert HYBRID.endswith(AT_THE_END)


@installs
def test_a_changed_recipe_leaves_the_layer_of_venv_as_it_is(docker, image, clone):
    with (clone / "recipes" / "data_parallel.py").open("a") as recipe:
        recipe.write("# changed\n")
    docker.asked(f"cd {clone} && {BUILD.replace(':1', ':2')}")
    first, second = layers(docker, "cookbook:1"), layers(docker, "cookbook:2")
    assert first[:-1] == second[:-1] and first[-1] != second[-1]
    docker.asked("docker rmi cookbook:2")


@installs
def test_image_has_an_ordinary_user_and_no_caches(docker, image):
    look = "id -u; ls -A ~; ls -A / | grep -x checkpoints; find / -xdev -name .cache -o -name '.venv?*'; exit 0"
    said = docker.asked(f"docker run --rm --entrypoint /bin/bash cookbook:1 -c {shlex.quote(look)} 2>/dev/null")
    assert said.splitlines() == ["1000", ".bash_logout", ".bashrc", ".profile", "checkpoints"]


@full
def test_seconds_and_size(docker, image):
    size = int(docker.asked("docker image inspect --format '{{.Size}}' cookbook:1")) / 1e9
    base = int(docker.asked("docker image inspect --format '{{.Size}}' python:3.10-slim-bookworm")) / 1e9
    print(f"image built in {image:.0f} s: {size:.2f} GB, of them the base {base:.2f} GB")
    print(docker.asked("docker history --human=true cookbook:1"))
    on_the_page = float(re.search(r"The image is ([\d.]+) GB", PAGE.read_text()).group(1))
    assert on_the_page == pytest.approx(size, rel=0.05)


@installs
@pytest.mark.parametrize("command", [line for line in RUNS if not line.endswith(MINE)])
def test_command_runs(docker, image, command):
    [run] = ended([docker(command)])
    assert (run.code, run.err) == (0, "") and run.out.count(EQUAL) == 1, run.out + run.err
    assert {line.split(" ")[0] for line in run.out.splitlines()} >= {"[0]", "[1]"}


@full
@pytest.mark.parametrize("mode", ["", "--graph"])
@pytest.mark.parametrize("recipe", [name for name in ONE_LAYER if name.endswith("_parallel")])
def test_every_strategy(docker, image, recipe, mode):
    [run] = ended([docker(f"docker run --rm cookbook:1 {recipe} {mode}")])
    assert (run.code, run.err) == (0, "") and run.out.count(EQUAL) == 1, run.out + run.err


@installs
@pytest.mark.parametrize(
    "options, user, cores",
    [
        ("", 1000, len(os.sched_getaffinity(0))),
        ("--cpus 1", 1000, 1),
        ("--cpuset-cpus 0", 1000, 1),
        ("--user 12345", 12345, len(os.sched_getaffinity(0))),
    ],
)
def test_script_of_a_user_on_the_cores_of_the_container(docker, image, folder, options, user, cores):
    """Each of two ranks is bound to its half of the cores, and has as many threads."""
    [run] = ended([docker(own_script(options, "-n 2 mine.py"), folder)])
    assert (run.code, run.err) == (0, ""), run.err
    lines = [re.fullmatch(r"\[\d] (\d+) \[([\d, ]+)] (\d+)", line) for line in sorted(run.out.splitlines())]
    each = max(1, cores // 2)
    ranks = [set(line.group(2).split(", ")) for line in lines]
    assert [(line.group(1), len(own), line.group(3)) for line, own in zip(lines, ranks)] == 2 * [
        (str(user), each, str(each))
    ]
    assert len(set.union(*ranks)) == min(2 * each, cores)


@installs
def test_rank_that_fails(docker, image, folder):
    [run] = ended([docker(own_script("", "-n 2 fails.py"), folder)])
    assert run.code == 1 and run.err.count("ZeroDivisionError: division by zero") == 1, run.err
    assert run.err.endswith("launch.sh: rank 1 of 2 failed: exit code 1; every rank is ended\n")


@installs
def test_bad_input(docker, image, folder):
    [run] = ended([docker(own_script("", "-n 2 missing.py"), folder)])
    assert run.code == 2 and run.err.startswith("launch.sh: ") and run.err.count("\n") == 1, run.err


@installs
def test_time_limit(docker, image, folder):
    [run] = ended([docker(own_script("", "-n 2 --timeout 3 sleeps.py"), folder)])
    assert run.code == 124 and "launch.sh: time limit of 3 s reached (--timeout)" in run.err, run.err


@installs
def test_interrupt(docker, image, folder):
    run = docker.start(own_script("", "-n 2 sleeps.py"), folder).until("ready", times=2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert ended([run]) and (run.code, run.err) == (130, "launch.sh: SIGINT: every rank is ended\n")


@installs
def test_docker_stop(docker, image, folder):
    run = docker.start(own_script("--name stopped", "-n 2 sleeps.py"), folder).until("ready", times=2)
    docker.asked("docker exec stopped bash -c 'kill -USR1 1'")  # as errors-hangs.md says
    run.until('sleeps.py", line', times=2, stream="stderr")
    docker.asked("docker stop --time 100 stopped")
    assert ended([run]) and run.code == 143 and run.err.endswith("launch.sh: SIGTERM: every rank is ended\n")


@installs
def test_rank_that_needs_more_memory_than_the_container_may_have(docker, image, folder):
    [run] = ended([docker(own_script("--memory 300m", "-n 2 hungry.py"), folder)])
    killed = "launch.sh: rank 1 of 2 failed: killed by signal 9, SIGKILL; every rank is ended\n"
    assert (run.code, run.err) == (137, killed)


@pytest.fixture(scope="module")
def network(docker, image):
    """The page's network. Its containers are called host0 and host1."""
    docker.asked("docker network create train")


@installs
@pytest.mark.parametrize("mode", ["", pytest.param("--graph", marks=full)])
def test_two_containers_are_two_hosts(docker, network, mode):
    script = HYBRID.replace("docker network create train\n", "").replace("parallel.py", f"parallel.py {mode}")
    [run] = ended([docker(script)])
    assert run.code == 0 and run.out.count(EQUAL) == 1, run.out + run.err
    assert "\n0\n0\n" in run.out and set(re.findall(r"^\[(\d)]", run.out, flags=re.MULTILINE)) == set("0123"), run.out


class Training:
    """Two containers that train, as the page says, each volume with the checkpoints of one job."""

    def __init__(self, docker, volume, more=""):
        self.docker, self.volume = docker, volume
        script = ELASTIC.replace("volume create checkpoints", f"volume create {volume}")
        script = script.replace("checkpoints:/", f"{volume}:/").replace("--save-every 5", f"--save-every 5 {more}")
        docker.asked(script)
        self.folder = Path(docker.asked(f"docker volume inspect --format '{{{{.Mountpoint}}}}' {volume}"))

    def inspect(self, name, field):
        return self.docker.asked(f"docker inspect --format '{{{{.{field}}}}}' {name}")

    def end(self):
        """Wait for the end of both; returns how often each was started again, and what each wrote."""
        names = ("host0", "host1")
        wait_until(lambda: {self.inspect(name, "State.Status") for name in names} == {"exited"}, "the end", SLOW, 1)
        codes = [self.inspect(name, "State.ExitCode") for name in names]
        restarts = [int(self.inspect(name, "RestartCount")) for name in names]
        logs = [self.docker.asked(f"docker logs {name} 2>&1") for name in names]
        said = self.docker.asked(AT_THE_END)
        assert codes == ["0", "0"] and "all losses equal" in said, logs
        return restarts, logs

    def result(self):
        """All that is in the only checkpoint, in order; the names of its tensors' files differ from job to job."""
        [folder] = self.folder.iterdir()
        assert folder.name == "60"
        content = []
        for opcode, value, _ in pickletools.genops((folder / "pickled_data").read_bytes()):
            if str(value).startswith("global_tensor_"):
                content.append((folder / value / "out").read_bytes())
            elif opcode.name != "FRAME":  # the length of what follows
                content.append(value)
        return content


@pytest.fixture(scope="module")
def undisturbed(docker, network):
    """The result of a job to which nothing happens."""
    training = Training(docker, "checkpoints")
    restarts, logs = training.end()
    assert restarts == [0, 0] and "all losses equal" in logs[0]
    return training.result()


@installs
def test_rank_that_dies_and_then_a_container(docker, undisturbed):
    """Both start again, and the result does not differ by a bit. Once more where the job ended before its container."""
    for volume in ("disturbed", "disturbed-again"):
        training = Training(docker, volume, "--die 17")
        launcher = int(training.inspect("host1", "State.Pid"))
        resumed = [training.folder / str(step) for step in range(20, 61, 5)]
        wait_until(lambda resumed=resumed: any(path.exists() for path in resumed), "the next checkpoint", SLOW)
        os.kill(launcher, signal.SIGKILL)
        restarts, logs = training.end()
        if restarts[1]:
            break
    assert min(restarts) > 0 and training.result() == undisturbed
    for text in ("rank 3 of 4 on node 1 (", "launch.sh: restart 1 of 3", "launch.sh: node 1 (", ") is gone"):
        assert text in logs[0], logs[0]
    steps = re.findall(r"^\[0] resumes after step (\d+), from its checkpoint$", logs[0], flags=re.MULTILINE)
    assert int(steps[0]) == 15 and int(steps[-1]) >= 20 and "all losses equal" in logs[0], logs[0]


@installs
def test_commands_of_the_pods_run_in_two_containers(docker, network, manifest):
    """As Kubernetes would run them, but for the restarts; eager and in a graph, a job has other files."""
    spec = manifest["Job"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    limits = container["resources"]["limits"]
    options = f"--network train --user {spec['securityContext']['runAsUser']} --volume pods:/checkpoints"
    options += f" --cpus {limits['cpu']} --memory {limits['memory'].replace('Gi', 'g')}"
    program, *arguments = [*container["command"], *container["args"]]
    for k in (1, 0):
        own = f"--name train-{k} --network-alias train-{k}.train --env JOB_COMPLETION_INDEX={k} --entrypoint {program}"
        docker.asked(f"docker run --detach {options} {own} cookbook:1 {shlex.join(arguments)}")
    codes = docker.asked("docker wait train-0 train-1").split()
    first, second = (docker.asked(f"docker logs train-{k} 2>&1") for k in (0, 1))
    docker.asked("docker rm train-0 train-1")
    assert codes == ["0", "0"], first + second
    assert "[0] all losses equal those of a single device" in first and "[2] w (64, 64) of (64, 64)" in second


@installs
def test_volume_and_network_of_the_page_can_be_removed(docker, undisturbed):
    docker.asked(TIDY)
    assert "checkpoints" not in docker.asked("docker volume ls --quiet").splitlines()
    assert "train" not in docker.asked("docker network ls --format '{{.Name}}'").splitlines()


@installs
def test_names_in_the_manifest_agree(manifest):
    service, claim, job = (manifest[kind] for kind in ("Service", "PersistentVolumeClaim", "Job"))
    pod, spec = job["spec"]["template"], job["spec"]["template"]["spec"]
    [container], [volume], [mount] = spec["containers"], spec["volumes"], spec["containers"][0]["volumeMounts"]
    assert service["spec"]["clusterIP"] == "None"  # headless: a name for each pod
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert spec["subdomain"] == service["metadata"]["name"]
    first = f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert container["args"][0].count(first) == 2 and f"--master_addr {first} " in container["args"][0]
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
    [container] = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "Dockerfile").write_text(FILES["Dockerfile"])
    (tmp_path / "pod").write_text(container["args"][0])
    for command in ("hadolint Dockerfile", "shellcheck --shell=bash pod"):
        program, *rest = command.split()
        run = Run(linter(program), *rest, cwd=tmp_path).wait()
        assert (run.code, run.out, run.err) == (0, "", ""), command


def test_set_up_in_the_dockerfile(tmp_path):
    """The instruction that makes .venv, in a folder with no more than the Dockerfile has copied until then."""
    lines = FILES["Dockerfile"].replace("\\\n", "").splitlines()
    [number] = [k for k, line in enumerate(lines) if line.startswith("RUN ") and "ensure_environment" in line]
    for line in lines[:number]:
        if line.startswith("COPY "):
            *sources, target = [word for word in line.split()[1:] if not word.startswith("--")]
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                shutil.copy(str(ROOT / source), str(tmp_path / target))
    command = json.loads(lines[number][len("RUN ") :])
    run = Run(*command, cwd=tmp_path, HOME=str(tmp_path), PYTHON="/nowhere/python").wait()
    assert run.code == 2 and run.err.startswith("launch.sh: PYTHON=/nowhere/python: no such program"), run.err


def test_no_environment_of_the_host_goes_into_the_image():
    ignored = FILES[".dockerignore"].split()
    environments = [line for line in (ROOT / ".gitignore").read_text().split() if line.startswith(".venv")]
    assert ".venv*" in ignored and len(environments) > 1 and all(name.startswith(".venv") for name in environments)
