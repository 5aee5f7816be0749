"""A pool of ranks under mpirun that is used as the pool over Gloo is: each call has a default group
of a backend."""

import itertools
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import commpress.backend
from mpi_ranks import MpiRanks


class MpiWorld:
    def __init__(self, ranks: MpiRanks, folder: Path, backend: str = "commpress_mpi") -> None:
        self.ranks, self.folder, self.backend = ranks, folder, backend
        self._calls = itertools.count()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int = 2,
        pg_options: Any = None,
        seconds: float = 60,
    ) -> list[Any]:
        file = str(self.folder / f"rendezvous-{self.backend}-{next(self._calls)}")
        return self.ranks.run(
            in_world, self.backend, file, function, args, pg_options, seconds, size=size
        )


def in_world(
    comm: Any,
    backend: str,
    file: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pg_options: Any,
    seconds: float,
) -> Any:
    assert "COMMPRESS_MPI" in dir(dist.Backend), commpress.backend
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=comm.rank,
        world_size=comm.size,
        pg_options=pg_options,
        timeout=timedelta(seconds=seconds),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about its renamed functions
        try:
            return function(*args)
        finally:
            comm.Barrier()  # Gloo fails on a rank that still connects while another leaves
            dist.destroy_process_group()
