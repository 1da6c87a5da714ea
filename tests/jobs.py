"""Jobs that tests start through launch.sh or OneFlow's own launcher, and the scripts that these run."""

import signal
import sys

from harness.jobs.run import LAUNCH, Run, free_port

# The first lines of a script: ranks that have met, and ranks without OneFlow, where it makes no difference.
MET = "import os, signal, sys, time\nimport oneflow as flow\nrank = flow.env.get_rank()\nflow.comm.barrier()\n"
PLAIN = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
SLEEPS = "print('ready', flush=True)\ntime.sleep(1000)"  # its last ones: a job that does not end by itself
EQUAL = " on a single device"  # how the last line of a recipe ends


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
