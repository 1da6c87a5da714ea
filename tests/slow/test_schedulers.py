"""What launch.sh makes of the variables of srun and mpirun; test_clusters.py runs it under both."""

import pytest

from harness.start.options import BadInput, checked
from harness.start.schedulers import first_host, task

SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "954400768.0;tcp://192.0.2.2:33937;tcp6://[fd00::2]:40745",
    "OMPI_MCA_ess_base_jobid": "954400769",
}


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("n[1-2]", "n1"), ("gpu[007-9,12],x", "gpu007"), ("a,b[1-2]", "a"), ("rack-3,rack-4", "rack-3")],
)
def test_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_task_of_srun_and_of_mpirun():
    found = task(SLURM)
    assert (found.count, found.number, found.address) == (4, 3, "gpu07")
    assert task({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).address == "127.0.0.1"
    found = task(MPI)
    assert (found.count, found.number, found.address) == (4, 2, "192.0.2.2")
    assert task({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).address == "127.0.0.1"


def test_what_is_alone_is_no_task():
    batch = {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # the batch script itself
    for alone in ({}, batch, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, {**MPI, "OMPI_COMM_WORLD_SIZE": "1"}):
        assert task(alone) is None


def test_steps_that_run_at_once_have_ports_of_their_own():
    ports = {
        task({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in (812, 813)
        for step in (0, 1)
    }
    assert len(ports) == 4 and all(1024 <= port < 32768 for port in ports)


def options(monkeypatch, variables, *arguments):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return checked([*arguments, "recipes/hybrid_parallel.py"])


def test_task_is_a_node_of_one_rank(monkeypatch):
    found = options(monkeypatch, SLURM)
    assert (found.nnodes, found.node_rank, found.nproc_per_node, found.master_addr) == (4, 3, 1, "gpu07")
    assert found.master_port == task(SLURM).port


def test_options_go_before_the_scheduler(monkeypatch):
    found = options(monkeypatch, SLURM, "--master_addr", "10.0.0.9", "--master_port", "29500")
    assert (found.nnodes, found.master_addr, found.master_port) == (4, "10.0.0.9", 29500)
    found = options(
        monkeypatch, SLURM, "--nnodes", "2", "--node_rank", "1", "--master_addr", "x", "--master_port", "2950"
    )
    assert (found.nnodes, found.node_rank, found.nproc_per_node, found.master_addr) == (2, 1, 2, "x")


@pytest.mark.parametrize("more", [("--nnodes", "1"), ("--node_rank", "0")])
def test_what_is_typed_makes_a_job_of_its_own_of_each_task(monkeypatch, more):
    found = options(monkeypatch, SLURM, *more)
    assert (found.nnodes, found.nproc_per_node, found.master_addr) == (1, 4, "127.0.0.1")


def test_task_of_another_mpirun_is_told_what_to_type(monkeypatch):
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    with pytest.raises(BadInput, match="mpirun does not say where task 0 runs: type --master_addr HOST"):
        options(monkeypatch, variables)
    found = options(monkeypatch, variables, "--master_addr", "10.0.0.9", "-n", "2")
    assert (found.nnodes, found.node_rank, found.master_addr) == (2, 1, "10.0.0.9") and found.master_port
    assert options(monkeypatch, {"PMI_RANK": "0", "PMI_SIZE": "1"}).nproc_per_node == 4
    assert options(monkeypatch, {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}).nnodes == 4  # srun --mpi=pmi2


def test_options_as_torchrun_spells_them(monkeypatch):
    where = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "x", "--master-port", "2950")
    found = options(monkeypatch, {}, *where, "--nproc-per-node", "2", "--max_restarts", "3", "--log_dir", "logs")
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == (2, 1, "x", 2950)
    assert (found.nproc_per_node, found.max_restarts, found.log_dir) == (2, 3, "logs")


def test_wrong_number_of_tasks_is_refused(monkeypatch):
    with pytest.raises(BadInput, match=r"runs on 4 ranks, not on 3 \(1 on each of 3 nodes\)"):
        options(monkeypatch, {**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"})


def test_mpirun_that_does_not_tell_its_host_is_refused(monkeypatch):
    first = {**MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_local_daemon_uri": MPI["OMPI_MCA_orte_hnp_uri"]}
    assert task(first).address == "192.0.2.2"
    away = {**first, "OMPI_MCA_orte_local_daemon_uri": "954400768.1;tcp://192.0.2.3:33937"}
    for unknown in (away, {**MPI, "OMPI_MCA_orte_hnp_uri": ""}):
        with pytest.raises(BadInput, match="mpirun does not say where task 0 runs: type --master_addr HOST"):
            options(monkeypatch, unknown)
