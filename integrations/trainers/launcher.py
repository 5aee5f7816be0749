"""The rank that torchrun, mpirun or srun gave this process, from its environment. Nothing here
loads torch."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from commpress.errors import InvalidArgument


class LaunchedRank(NamedTuple):
    """Rank of this process according to its launcher."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


# In this order: mpirun inside a SLURM allocation leaves SLURM's variables of the first task to
# every rank.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def place(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the rank that a launcher gave this process, or None without a launcher."""
    for launcher, (rank, size, local_rank, local_size) in _VARIABLES.items():
        if rank not in environment or size not in environment:
            continue
        try:
            number, count = int(environment[rank]), int(environment[size])
            local = int(environment.get(local_rank, 0))
            per_node = re.match(r"\d+", environment.get(local_size, ""))  # SLURM writes 2(x3),1
        except ValueError as error:
            raise InvalidArgument(
                f"the variables of {launcher} are not numbers ({error}): unset or correct them"
            ) from None
        if not 0 <= number < count:
            raise InvalidArgument(
                f"{rank} is {number}, expected 0 to {count - 1} because {size} is {count}"
            )
        return LaunchedRank(launcher, number, count, local, int(per_node[0]) if per_node else 1)
    return None
