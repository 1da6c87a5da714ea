"""Jobs that tests start through launch.sh or OneFlow's own launcher, and the scripts that these run."""

import shutil
import signal
import sys

from tests.cases import ROOT
from tests.run import LAUNCH, Run, free_port

# The first lines of a script: ranks that have met, and ranks without OneFlow, where it makes no difference.
MET = "import os, signal, sys, time\nimport oneflow as flow\nrank = flow.env.get_rank()\nflow.comm.barrier()\n"
PLAIN = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
SLEEPS = "print('ready', flush=True)\ntime.sleep(1000)"  # its last ones: a job that does not end by itself
EQUAL = " on a single device"  # how the last line of a recipe ends
ELASTIC = "recipes/starting/elastic_training.py"


def ended(runs):
    """All of them, at their end, with nothing left."""
    runs = list(runs)
    for run in runs:
        run.wait()
    assert all(run.all_gone() for run in runs)
    return runs


def launch(*arguments, **options):
    """./launch.sh with these arguments, at its end, with nothing left; once more where OneFlow died of itself."""
    [job] = ended([Run(LAUNCH, *arguments, **options)])
    if job.code == 128 + signal.SIGSEGV:
        repeated.append(" ".join(str(argument) for argument in arguments))
        [job] = ended([Run(LAUNCH, *arguments, **options)])
    return job


repeated = []  # the jobs that were


def official(n, *arguments, **options):
    """OneFlow's own launcher, which starts a script's ranks, on a port of its own; returns at once."""
    command = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", n, "--master_port", free_port()]
    return Run(*command, *arguments, **options)


def start(hosts, *arguments, only=(0, 1), port=None, where=(0, 1), **more):
    """launch.sh as each of these nodes; returns at once. where: the host of each; hosts None: all are this host."""
    port, address, runs = port or free_port(), hosts.addresses[0] if hosts else "127.0.0.1", []
    for node in only:
        meeting = ["--nnodes", len(where), "--node_rank", node, "--master_addr", address, "--master_port", port]
        runs.append(Run(*(hosts.on(where[node]) if hosts else []), LAUNCH, *meeting, *arguments, **more))
    return runs


def changed(path, folder, *changes):
    """A copy of a recipe, in a folder, with each of these (old text, new text) replaced."""
    text = (ROOT / path).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / path.rpartition("/")[2]
    copy.write_text(text)
    return copy


def saved(folder):
    """The tensors of each checkpoint in a folder, byte by byte, by step."""
    steps = [path for path in folder.glob("*") if path.name.isdecimal()]
    return {int(path.name): sorted(file.read_bytes() for file in path.glob("*/out")) for path in steps}


def train(folder, *more, n=2, options=(), script=ELASTIC, code=0):
    """A job from the checkpoints in a folder; once more, from the same, where OneFlow died of itself."""
    command = [LAUNCH, "-n", n, *options, script, "--checkpoint-dir", folder, *more]
    before = folder.with_suffix(".before")
    if folder.exists():
        shutil.copytree(folder, before, dirs_exist_ok=True)
    [run] = ended([Run(*command)])
    if run.code == 128 + signal.SIGSEGV:
        repeated.append(" ".join(map(str, command)))
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            before.rename(folder)
        [run] = ended([Run(*command)])
    shutil.rmtree(before, ignore_errors=True)
    assert run.code == code and (code or "equal those of a single device" in run.out), run.err
    return run


def undisturbed(folder, *more):
    """The checkpoint after step 6 of a job without a death; those before it are gone."""
    assert "[0] starts with step 1: no checkpoint\n" in train(folder, "--steps", 6, *more).out
    checkpoints = saved(folder)
    assert list(checkpoints) == [6] and len(checkpoints[6]) >= 2  # weight and momentum
    return checkpoints
