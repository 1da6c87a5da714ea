"""What Slurm's srun and Open MPI's mpirun tell each task: its number, how many there are, and where to meet.

Each task runs launch.sh, which treats the task as a node. Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; Open MPI
4.1, mpirun(1), "Exported Environment Variables".
"""

import os
import re
from dataclasses import dataclass

FIRST_PORT, PORTS = 10000, 19997  # a prime number of ports, all below those that Linux hands out itself, from 32768


@dataclass
class Task:
    """This task among those of a job step."""

    scheduler: str
    count: int
    number: int
    address: str  # of task 0; "" if the scheduler does not say
    job: str  # job and step: the same in all tasks of a step, and another one in the next step

    @property
    def port(self):
        """A port for the step: the same in all its tasks."""
        return port_of(*self.job.split("."))


def port_of(*numbers):
    """A port for a job step, from the numbers that name it."""
    mixed = 0
    for number in numbers:
        mixed = mixed * 101 + int(number)
    return FIRST_PORT + mixed % PORTS


def first_host(nodes):
    """The first host of a list in Slurm's notation, such as `gpu[03-05,9],login`."""
    name, number = re.match(r"([^\[,]*)(?:\[(\d+))?", nodes).groups()
    return name + (number or "")


def task(variables=None):
    """The Task that this process is; None outside of srun and mpirun, or if it is the only one.

    Raises KeyError or ValueError where a variable is missing or not a number.
    """
    variables = {name: value for name, value in (os.environ if variables is None else variables).items() if value}
    if int(variables.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return _task_of_mpirun(variables)
    if int(variables.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in variables:
        one_host = variables.get("SLURM_STEP_NUM_NODES") == "1"
        return Task(
            "srun",
            int(variables["SLURM_STEP_NUM_TASKS"]),
            int(variables["SLURM_PROCID"]),
            "127.0.0.1" if one_host else first_host(variables.get("SLURM_STEP_NODELIST", "")),
            f"{variables.get('SLURM_JOB_ID', 0)}.{variables.get('SLURM_STEP_ID', 0)}",
        )
    return None


def _task_of_mpirun(variables):
    count, number = int(variables["OMPI_COMM_WORLD_SIZE"]), int(variables["OMPI_COMM_WORLD_RANK"])
    mpirun, daemon = (variables.get(f"OMPI_MCA_orte_{name}_uri", "") for name in ("hnp", "local_daemon"))
    found = re.search(r"tcp://([^,:;]+)", mpirun)  # the host of mpirun itself
    address = found.group(1) if found else ""
    if number == 0 and daemon not in ("", mpirun):  # task 0 is not on that host, and no variable names its own
        address = ""
    if variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(count):
        address = "127.0.0.1"
    return Task("mpirun", count, number, address, variables.get("OMPI_MCA_ess_base_jobid", "0"))


def pmi_task():
    """(number, count) under an mpirun that tells no more than that, such as MPICH or Intel MPI; None elsewhere.

    Source: MPICH's "Process Management Interface", PMI_RANK and PMI_SIZE.
    """
    number, count = os.environ.get("PMI_RANK", ""), os.environ.get("PMI_SIZE", "")
    return (int(number), int(count)) if number.isdecimal() and count.isdecimal() and int(count) > 1 else None
