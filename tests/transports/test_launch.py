"""Variables of launchers, and the places where ranks meet."""

import os
import socket
import subprocess
import sys

import pytest

from commpress.errors import InvalidArgument
from commpress.integrations.trainers.launch import LaunchedRank, first_host, own_address, place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, LaunchedRank("torchrun", 3, 4, 1, 2)),
        (OPEN_MPI, LaunchedRank("Open MPI", 5, 8, 1, 4)),
        (MPICH, LaunchedRank("MPICH", 1, 2, 1, 2)),
        (SLURM, LaunchedRank("SLURM", 6, 7, 0, 2)),
        # mpirun inside an allocation
        (SLURM | {"SLURM_PROCID": "0"} | OPEN_MPI, LaunchedRank("Open MPI", 5, 8, 1, 4)),
        (OPEN_MPI | TORCHRUN, LaunchedRank("torchrun", 3, 4, 1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script, not a task of a step
    ],
)
def test_places(environment, expected):
    assert place(environment) == expected


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (TORCHRUN | {"RANK": "4"}, "RANK is 4, expected 0 to 3 because WORLD_SIZE is 4"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "many"}, "the variables of Open MPI are not numbers"),
    ],
)
def test_nonsense_is_refused(environment, says):
    with pytest.raises(InvalidArgument, match=says):
        place(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node[003-007,9],other4", "node003"),
        ("a1,b2", "a1"),
        ("gpu[1,3]-ib", "gpu1-ib"),
    ],
)
def test_the_first_node_of_a_step(nodes, host):
    assert first_host(nodes) == host


def test_an_address_is_one_of_this_machine():
    with socket.socket() as probe:
        probe.bind((own_address(), 0))


SCRIPT = """
import torch, torch.distributed as dist, commpress, os
place = commpress.init_process_group("gloo")
x = torch.ones(1) * (place.rank + 1)
dist.all_reduce(x)
again = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
again.set(f"here {place.rank}", "yes")
print(place.launcher, place.rank, os.environ["RANK"], os.environ["WORLD_SIZE"], int(x))
dist.barrier()
dist.destroy_process_group()
"""


def run(tmp_path, environments):
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "OMPI_", "PMI_", "MASTER_"))
    }
    clean = {k: v for k, v in clean.items() if k not in TORCHRUN} | {"GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=clean | e,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for e in environments
    ]
    outputs = [p.communicate(timeout=120) for p in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), outputs
    return [out.strip() for out, _ in outputs]


def test_one_process_without_a_launcher(tmp_path):
    assert run(tmp_path, [{}]) == ["nobody 0 0 1 1"]


def test_tasks_of_a_slurm_step(tmp_path):
    job = str(10000 + os.getpid() % 9000)
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
    }
    outputs = run(
        tmp_path, [step | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
    )
    assert outputs == ["SLURM 0 0 2 3", "SLURM 1 1 2 3"]
