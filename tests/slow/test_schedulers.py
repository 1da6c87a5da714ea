"""What launch.sh makes of the variables of srun and mpirun; test_clusters.py runs it under both."""

import math

import pytest

from oneflow_cookbook.start import cores
from oneflow_cookbook.start.cores import cores_of_ranks
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.options import checked
from oneflow_cookbook.start.schedulers import Task, first_host, task, tasks_by_host

SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_num_nodes": "2",
    "OMPI_MCA_orte_hnp_uri": "954400768.0;tcp://192.0.2.2:33937;tcp6://[fd00::2]:40745",
    "OMPI_MCA_ess_base_jobid": "954400769",
}
FIRST = {**MPI, "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    "hosts, first",
    [("n1", "n1"), ("n[1-2]", "n1"), ("gpu[007-9,12],x", "gpu007"), ("a,b[1-2]", "a"), ("rack-3,rack-4", "rack-3")],
)
def test_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_tasks_of_each_host():
    assert tasks_by_host("2(x3),1") == [2, 2, 2, 1] and tasks_by_host("4") == [4]


ON_ONE_HOST = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"}
TASKS = [  # variables -> number of tasks, this one, address of the first, hosts, this task and their number on its host
    (SLURM, (4, 3, "gpu07", 2, 1, 2)),
    ({**SLURM, **ON_ONE_HOST}, (4, 3, "127.0.0.1", 1, 3, 4)),
    (MPI, (4, 2, "192.0.2.2", 2, 0, 2)),
    ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, (4, 2, "127.0.0.1", 2, 2, 4)),
    ({**FIRST, "OMPI_MCA_orte_local_daemon_uri": MPI["OMPI_MCA_orte_hnp_uri"]}, (4, 0, "192.0.2.2", 2, 0, 2)),
]
NO_TASKS = [
    {},
    {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the batch script itself
    {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
    {**MPI, "OMPI_COMM_WORLD_SIZE": "1"},
]


@pytest.mark.parametrize("variables, wanted", TASKS)
def test_task_of_srun_and_of_mpirun(variables, wanted):
    own = task(variables)
    assert (own.count, own.number, own.address, own.hosts, own.number_on_host, own.count_on_host) == wanted


@pytest.mark.parametrize(
    "allowed, usable, number, count, ranks, wanted",
    [
        ([0, 1, 2, 3], 4, 1, 2, 1, [[2, 3]]),  # no task is bound: the tasks of a host divide its cores
        ([0, 1, 2, 3], 4, 1, 2, 2, [[2], [3]]),
        ([2, 3], 4, 1, 2, 1, [[2, 3]]),  # each task is bound to cores of its own
        ([2, 3], 4, 1, 2, 2, [[2], [3]]),
        ([4, 5], 2, 1, 2, 1, [[5]]),  # of 8 cores, the step has 2 on this host
        ([0, 1], 8, 1, 3, 1, [[0, 1]]),
        ([0], 1, 1, 2, 1, [[0]]),
    ],
)
def test_cores_of_a_task(monkeypatch, allowed, usable, number, count, ranks, wanted):
    monkeypatch.setattr(cores, "available", lambda: allowed)
    monkeypatch.setattr(cores, "cpu_quota", lambda: (math.inf, 0))
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 8)
    own = Task(4, 3, "a", "", number_on_host=number, count_on_host=count, cores_on_host=usable)
    assert cores_of_ranks(ranks, own) == wanted


@pytest.mark.parametrize("variables", NO_TASKS)
def test_process_outside_a_job_step_is_no_task(variables):
    assert task(variables) is None


def test_steps_that_run_at_once_have_ports_of_their_own(monkeypatch):
    steps = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("812", "813") for step in "01"]
    ports = {task({**SLURM, **step}).port for step in steps}
    assert options(monkeypatch, SLURM).master_port == task(SLURM).port
    assert len(ports) == 4 and all(1024 <= port < 32768 for port in ports)


AS_TORCHRUN = "--nnodes 2 --node-rank 1 --master-addr x --master-port 2950 --nproc-per-node 2 --max_restarts 0"
OPTIONS = [  # variables, what is typed -> number of nodes, this one, ranks of each, address of the first
    (SLURM, "", (4, 3, 1, "gpu07")),
    (SLURM, "--master_addr 10.0.0.9 --master_port 29500", (4, 3, 1, "10.0.0.9")),
    (SLURM, AS_TORCHRUN, (2, 1, 2, "x")),
    (SLURM, "--nnodes 1 --max_restarts 3", (1, 0, 4, "127.0.0.1")),  # a job of its own in each task
    (SLURM, "--node_rank 0", (1, 0, 4, "127.0.0.1")),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "--master_addr 10.0.0.9 -n 2", (2, 1, 2, "10.0.0.9")),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "", (1, 0, 4, "127.0.0.1")),
    ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, "", (4, 3, 1, "gpu07")),  # srun --mpi=pmi2
]
REFUSED = [  # variables -> why
    (
        {**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"},
        r"OneFlow 0.9.0 would hang: 3 ranks cannot be divided by 2 hosts",
    ),
    (
        {**MPI, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_MCA_orte_num_nodes": "1"},
        r"runs on 4 ranks, not on 3 \(1 of each of 3 launchers\)",
    ),
    (
        {**FIRST, "OMPI_MCA_orte_local_daemon_uri": "954400768.1;tcp://192.0.2.3:33937"},
        "mpirun does not say where task 0 runs: type --master_addr HOST",
    ),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpirun does not say where task 0 runs: type --master_addr HOST"),
]


def options(monkeypatch, variables, typed=""):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return checked([*typed.split(), "recipes/hybrid_parallel.py"])


@pytest.mark.parametrize("variables, typed, wanted", OPTIONS)
def test_task_is_a_launcher_and_options_go_first(monkeypatch, variables, typed, wanted):
    job = options(monkeypatch, variables, typed)
    assert (job.nnodes, job.node_rank, job.nproc_per_node, job.master_addr) == wanted
    if typed == AS_TORCHRUN:
        assert (job.master_port, job.max_restarts) == (2950, 0)


@pytest.mark.parametrize("variables, words", REFUSED)
def test_variables_that_name_no_job_are_refused(monkeypatch, variables, words):
    with pytest.raises(UsageError, match=words):
        options(monkeypatch, variables)
