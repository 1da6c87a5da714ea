"""What Slurm's srun and MPI's mpirun tell each task: its number, the number of tasks, and where rank 0 is.

Each task runs launch.sh, as one launcher of the job. Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; Open MPI 4.1,
mpirun(1), "Exported Environment Variables"; MPICH, "Process Management Interface".
"""

import math
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
    hosts: int = 0  # of the step; 0 if not known
    number_on_host: int = 0  # of this task
    count_on_host: int = 1  # of the tasks on this host
    cores_on_host: float = math.inf  # that the step may use there; infinite: all

    @property
    def port(self):
        """A port for the step: the same in all its tasks."""
        return FIRST_PORT + zlib.crc32(self.job.encode()) % PORTS


def task(variables):
    """The Task of a process with these environment variables; None if it is not part of a step of several tasks."""
    if int(variables.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return _task_of_open_mpi(variables)
    if int(variables.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _task_of_slurm(variables)
    if int(variables.get("PMI_SIZE", 1)) > 1:  # MPICH, Intel MPI
        number_on_host = int(variables.get("MPI_LOCALRANKID", 0))
        count_on_host = int(variables.get("MPI_LOCALNRANKS", 1))
        own = {"number_on_host": number_on_host, "count_on_host": count_on_host}
        return Task(int(variables["PMI_SIZE"]), int(variables["PMI_RANK"]), "", "mpirun", **own)
    return None


def first_host(hosts):
    """The first host of a list in Slurm's notation, such as `gpu[03-05,9],login`."""
    name, number = re.match(r"([^\[,]*)(?:\[(\d+))?", hosts).groups()
    return name + (number or "")


def tasks_by_host(counts):
    """The number of tasks on each host, from Slurm's notation: `2(x3),1` is [2, 2, 2, 1]."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


def _task_of_slurm(variables):
    hosts = int(variables["SLURM_STEP_NUM_NODES"])
    return Task(
        count=int(variables["SLURM_STEP_NUM_TASKS"]),
        number=int(variables["SLURM_PROCID"]),
        address="127.0.0.1" if hosts == 1 else first_host(variables["SLURM_STEP_NODELIST"]),
        job=f"srun {variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}",
        hosts=hosts,
        number_on_host=int(variables["SLURM_LOCALID"]),
        count_on_host=tasks_by_host(variables["SLURM_STEP_TASKS_PER_NODE"])[int(variables["SLURM_NODEID"])],
        cores_on_host=int(variables.get("SLURM_CPUS_ON_NODE", 0)) or math.inf,
    )


def _task_of_open_mpi(variables):
    count, number = int(variables["OMPI_COMM_WORLD_SIZE"]), int(variables["OMPI_COMM_WORLD_RANK"])
    mpirun, daemon = (variables.get(f"OMPI_MCA_orte_{name}_uri", "") for name in ("hnp", "local_daemon"))
    host_of_mpirun = re.search(r"tcp://([^,:;]+)", mpirun)
    address = host_of_mpirun.group(1) if host_of_mpirun else ""
    if number == 0 and daemon not in ("", mpirun):  # task 0 is not on mpirun's host, and no variable names its host
        address = ""
    count_on_host = int(variables["OMPI_COMM_WORLD_LOCAL_SIZE"])
    return Task(
        count,
        number,
        address="127.0.0.1" if count_on_host == count else address,
        job=f"mpirun {variables.get('OMPI_MCA_ess_base_jobid', '')}",
        hosts=int(variables.get("OMPI_MCA_orte_num_nodes", 0)),
        number_on_host=int(variables["OMPI_COMM_WORLD_LOCAL_RANK"]),
        count_on_host=count_on_host,
    )
