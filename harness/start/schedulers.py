"""What Slurm's srun and Open MPI's mpirun tell each task that they start: its number, how many, and where all meet.

Each task starts a launcher, which takes the task for a node with a rank of its own. Source: srun(1), "OUTPUT
ENVIRONMENT VARIABLES"; Open MPI 4.1, mpirun(1), "Exported Environment Variables".
"""

import os
import re
from dataclasses import dataclass

FIRST_PORT, PORTS = 10000, 19997  # a prime; all below the ports that Linux gives away by itself, from 32768


@dataclass
class Task:
    """One of the tasks of a job step."""

    scheduler: str
    count: int  # of tasks
    number: int  # of this one
    address: str  # of task 0, "" if nobody tells
    job: str  # its number, the same in all tasks of a step, another one in the next

    @property
    def port(self):
        """The same in all tasks of a step, another one in the next."""
        return port_of(*self.job.split("."))


def unknown():
    """(number, count) of this process among those of an mpirun that tells no more than that, or None: MPICH, Intel MPI.

    Source: MPICH's "Process Management Interface", PMI_RANK and PMI_SIZE.
    """
    number, count = os.environ.get("PMI_RANK", ""), os.environ.get("PMI_SIZE", "")
    return (int(number), int(count)) if number.isdecimal() and count.isdecimal() and int(count) > 1 else None


def first_host(nodes):
    """The first host of a list in Slurm's notation, such as `gpu[03-05,9],login`."""
    name, number = re.match(r"([^\[,]*)(?:\[(\d+))?", nodes).groups()
    return name + (number or "")


def port_of(*numbers):
    """A port for a job step, from the numbers that name it."""
    mixed = 0
    for number in numbers:
        mixed = mixed * 101 + int(number)
    return FIRST_PORT + mixed % PORTS


def task(variables=None):
    """The Task that this process is by its environment, or None outside of srun and mpirun, or where it is alone.

    Raises KeyError or ValueError where a variable is missing or no number.
    """
    given = {name: value for name, value in (os.environ if variables is None else variables).items() if value}
    if int(given.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        here, there = (given.get(f"OMPI_MCA_orte_{name}_uri", "") for name in ("local_daemon", "hnp"))
        elsewhere = given["OMPI_COMM_WORLD_RANK"] == "0" and here not in ("", there)  # whose address nobody knows
        local = given.get("OMPI_COMM_WORLD_LOCAL_SIZE") == given["OMPI_COMM_WORLD_SIZE"]
        own = re.search(r"tcp://([^,:;]+)", given.get("OMPI_MCA_orte_hnp_uri", ""))  # mpirun's own host
        return Task(
            "mpirun",
            int(given["OMPI_COMM_WORLD_SIZE"]),
            int(given["OMPI_COMM_WORLD_RANK"]),
            "127.0.0.1" if local else own.group(1) if own and not elsewhere else "",
            given.get("OMPI_MCA_ess_base_jobid", "0"),
        )
    if int(given.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in given:
        return Task(
            "srun",
            int(given["SLURM_STEP_NUM_TASKS"]),
            int(given["SLURM_PROCID"]),
            "127.0.0.1"
            if given.get("SLURM_STEP_NUM_NODES") == "1"
            else first_host(given.get("SLURM_STEP_NODELIST", "")),
            f"{given.get('SLURM_JOB_ID', 0)}.{given.get('SLURM_STEP_ID', 0)}",
        )
    return None
