"""What Slurm's srun and MPI's mpirun tell each task: its number, the number of tasks, and where to meet.

Each task runs launch.sh, which treats the task as a node. Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; Open MPI
4.1, mpirun(1), "Exported Environment Variables"; MPICH, "Process Management Interface".
"""

import re
import zlib
from dataclasses import dataclass

FIRST_PORT, PORTS = 10000, 20000  # below 32768, where the ports begin that Linux hands out itself


@dataclass
class Task:
    """This task among those of a job step."""

    count: int
    number: int
    address: str  # of task 0; "" if not known
    job: str  # the same in all tasks of a step, different in each step

    @property
    def port(self):
        """A port for the step: the same in all its tasks."""
        return FIRST_PORT + zlib.crc32(self.job.encode()) % PORTS


def task(variables):
    """The Task of a process with these environment variables; None if it is not part of a step of several tasks."""
    if int(variables.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return _task_of_open_mpi(variables)
    if int(variables.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        on_this_host = variables.get("SLURM_STEP_NUM_NODES") == "1"
        address = "127.0.0.1" if on_this_host else first_host(variables["SLURM_STEP_NODELIST"])
        job = f"srun {variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"
        return Task(int(variables["SLURM_STEP_NUM_TASKS"]), int(variables["SLURM_PROCID"]), address, job)
    if int(variables.get("PMI_SIZE", 1)) > 1:  # MPICH, Intel MPI
        return Task(int(variables["PMI_SIZE"]), int(variables["PMI_RANK"]), "", "mpirun")
    return None


def first_host(nodes):
    """The first host of a list in Slurm's notation, such as `gpu[03-05,9],login`."""
    name, number = re.match(r"([^\[,]*)(?:\[(\d+))?", nodes).groups()
    return name + (number or "")


def _task_of_open_mpi(variables):
    count, number = int(variables["OMPI_COMM_WORLD_SIZE"]), int(variables["OMPI_COMM_WORLD_RANK"])
    mpirun, daemon = (variables.get(f"OMPI_MCA_orte_{name}_uri", "") for name in ("hnp", "local_daemon"))
    host_of_mpirun = re.search(r"tcp://([^,:;]+)", mpirun)
    address = host_of_mpirun.group(1) if host_of_mpirun else ""
    if number == 0 and daemon not in ("", mpirun):  # task 0 is not on mpirun's host, and no variable names its host
        address = ""
    if variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(count):
        address = "127.0.0.1"
    return Task(count, number, address, f"mpirun {variables.get('OMPI_MCA_ess_base_jobid', '')}")
